"""A page that shows runs from inside, one file that any browser opens: attention, answers, paths.

    python -m extras.explore results/A results/D    # writes out/explorer.html

It needs no server and no network: the data are in the page, and explorer.js draws them. A run with
checkpoints (--save-every) also shows earlier steps.
"""

import html
import json
import math
import pathlib

import analyze
import train
from ablate import PatchedModel, paths_in, places_of, read_report, record_reads
from data import command_line, progress

import torch


HERE = pathlib.Path(__file__).parent
SEQUENCES, CHECKPOINTS = 3, 8  # in the page, at most


def weights_of(run):
    """Return the steps and the files of some checkpoints of a run and of its final weights."""
    last = train.read_log(run)[-1]["step"]
    files = [file for file in analyze.checkpoints_of(run) if int(file.stem) < last]
    files = files[:: math.ceil(len(files) / CHECKPOINTS) or 1]  # evenly spread
    steps = [int(file.stem) for file in files]
    return [*steps, last], [*(f"ckpt/{file.name}" for file in files), "model.pt"]


def answers_of(task, predictions, batch):
    """Return (B, N queries, targets, 2): the nearest symbol of the sequence, -1 if none is near,
    and the squared error."""
    predicted = predictions.unflatten(-1, (-1, task.K))  # (B, N, targets, K)
    shown = batch.inputs[:, None, None]  # (B, 1, 1, T, K)
    distances, tokens = (predicted[..., None, :] - shown).square().mean(-1).min(-1)
    symbols = batch.symbols.gather(1, tokens.flatten(1)).view_as(tokens)
    symbols[distances > task.chance / 2] = -1
    found = torch.stack([symbols, task.losses(predictions, batch)], -1)
    return found.double().round(decimals=3)


@torch.no_grad()
def measure(run, file, batch, paths):
    """Return (attention, answers) of a model: the patterns of all heads in percent, and the answers
    of the full model and of the circuit alone, first with all paths and then without each."""
    model, task, _ = train.load(run, file)
    patterns = [pattern for pattern, _ in record_reads(model, batch.inputs).values()]
    percent = (100 * torch.stack(patterns, 1)).round().int()  # (B, layers * heads, T, T)
    patched = PatchedModel(model, task, batch)
    patched.losses = lambda heads: answers_of(task, model(batch.inputs, heads=heads), batch)
    answers = []
    for removed in [(), *((path,) for path in paths)]:
        both = patched.knock_out(removed), patched.keep_only(paths.keys() - {*removed})
        answers.append([kind.tolist() for kind in both])
    return percent.tolist(), answers


def path_rows(task, report, places, ends):
    """Return a dict for each path: its place in a diagram with these ends of paths as columns, its
    pairs of tokens in each sequence and chain, what is lost without it."""
    rows = []
    for path, measured in paths_in(report).items():
        title, cost = str(path), measured["cost"]
        most = max(cost, key=cost.get)
        text = f"Without {title} the trained model's loss on {most} rises by {cost[most]:.2f}."
        row = dict(title=title, text=text, layer=path.layer, head=path.head, cost=cost[most])
        row.update(x0=ends.index(path.read.rstrip("*")), x1=ends.index(path.reader))
        tokens = torch.broadcast_tensors(*(places_of(end, task, places) for end in path[2:]))
        pairs = torch.stack(tokens, -1).tolist()  # [sequence][chain] is [[reader, read], ...]
        there = [[[p for p in chain if max(p) < task.T] for chain in each] for each in pairs]
        rows.append(dict(row, pairs=there))
    return rows


def data_of(run):
    """Return all that the page holds of a run, a dict for JSON."""
    flags, report = train.read_flags(run), read_report(run)
    task, paths = train.task_of(flags), paths_in(report)
    steps, files = weights_of(run)
    batch = task.draw("validation", SEQUENCES)
    measured = [measure(run, file, batch, paths) for file in progress("weights", files)]

    # of each token its chain, and the number of its role in it
    order = batch.places.flatten(1).argsort(1)  # every token has one of the N * roles places
    chains, roles = order // len(task.roles), order % len(task.roles)

    # the columns of the diagram: role and letter
    columns, ends = [], analyze.columns_of(task, paths)
    for end in ends:
        columns.append([end, task.labels[task.roles[end]][0] if end in task.roles else ""])

    verdict = report.get("verdict", f"run python ablate.py {run} first")
    attention, answers = zip(*measured, strict=True)
    return dict(
        name=html.escape(run.as_posix()),
        about=f"Layers {flags.layers}, heads {flags.heads}, D={task.D}, seed {flags.seed}",
        found=f"Circuit of {len(paths)} paths: {verdict}.",
        N=flags.N, layers=flags.layers, heads=flags.heads, steps=steps,
        labels=task.labels, names=[*task.roles], symbols=task.target_names,
        tokens=batch.symbols.tolist(), chains=chains.tolist(), roles=roles.tolist(),
        columns=columns, paths=path_rows(task, report, batch.places, ends),
        targets=answers_of(task, batch.answers, batch)[..., 0].int().tolist(),
        attention=attention, answers=answers,
    )  # fmt: skip


def main():
    p = command_line("python -m extras.explore", __doc__)
    p.add_argument("run", type=train.run_directory, nargs="+", help="run directories of train.py")
    p.add_argument("--out", type=pathlib.Path, default="out/explorer.html", help="the page")
    args = p.parse_args()
    if args.out.is_dir():
        p.error(f"--out {args.out} is a folder: name a file")
    for run in args.run:
        if (task := train.read_flags(run).task) != "chain":
            p.error(f"{run} has --task {task}, and the page shows chains alone")
    runs = [data_of(run) for run in args.run]
    page = (HERE / "page.html").read_text(encoding="utf-8")
    for name in "style.css", "explorer.js":
        page = page.replace(f"/* {name} */", (HERE / name).read_text(encoding="utf-8"))
    data = json.dumps(runs, separators=(",", ":")).replace("<", "\\u003c")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page.replace("/* data */", data), encoding="utf-8")
    print(f"{args.out} ({args.out.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
