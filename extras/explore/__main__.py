"""A page that shows runs from inside, one file that any browser opens: attention, answers, paths.

    python -m extras.explore results/A results/D    # writes out/explorer.html

It needs no server and no network: the data are in the page, and explorer.js draws them. A run with
checkpoints (--save-every) also gets a slider for the training step.
"""

import base64
import functools
import html
import json
import math
import pathlib

import analyze
import train
from ablate import PatchedModel, marks_of, parts_of, paths_in, read_report
from data import command_line, held_out, progress

import torch


HERE = pathlib.Path(__file__).parent
SEQUENCES, CHECKPOINTS = 6, 8  # in the page, at most


def weights_of(run):
    """Return the steps and the files of some checkpoints of a run and of its final weights."""
    last = train.read_log(run)[-1]["step"]
    files = [file for file in analyze.checkpoints_of(run) if int(file.stem) < last]
    files = files[:: math.ceil(len(files) / CHECKPOINTS) or 1]  # evenly spread
    steps = [int(file.stem) for file in files]
    return [*steps, last], [*(f"ckpt/{file.name}" for file in files), "model.pt"]


def answers_of(task, predictions, batch):
    """Return two lists (B, N queries, symbols): the number of the symbol of the sequence that is
    nearest to each prediction, -1 if it is not near, and the squared error."""
    predicted = predictions.unflatten(-1, (-1, task.K))  # (B, N, symbols, K)
    errors = task.losses(predictions, batch)
    shown = batch.inputs[:, None, None, :, : task.K]  # (B, 1, 1, T, K)
    distances, tokens = (predicted[..., None, :] - shown).square().mean(-1).min(-1)
    symbols = batch.symbols.gather(1, tokens.flatten(1)).view_as(tokens)
    symbols[distances > task.lost_above] = -1
    return symbols.tolist(), errors.double().round(decimals=2).tolist()


@torch.no_grad()
def measure(run, file, batch, paths):
    """Return (attention, answers) of a model: the patterns of all heads in whole percent, as bytes;
    the answers of the full model, of the circuit alone, and of both without each path."""
    model, task, _ = train.load(run, file)
    _, patterns = model(batch.inputs, return_patterns=True)
    percent = (100 * torch.stack(patterns, 1).float()).round().byte()  # (B, layers, heads, T, T)
    patched = PatchedModel(model, task, batch, score=functools.partial(answers_of, task))
    answers = [patched.baseline, patched.circuit(paths)]
    for path in paths:
        answers += [patched.knock_out([path]), patched.circuit(paths.keys() - {path})]
    return percent.numpy().tobytes(), answers


def columns_of(task, paths):
    """Return the ends of paths in the order of the diagram's columns."""
    return [end for slot in analyze.slots_of(task, paths) for end in slot]


def path_rows(task, report, positions):
    """Return a dict for each path: its place in the diagram, its tokens in each sequence and chain,
    what is lost without it."""

    def tokens_of(end):
        marks = marks_of(end, task, positions)  # (B, N, T)
        return [[row.nonzero().flatten().tolist() for row in chains] for chains in marks]

    paths, rows = paths_in(report), []
    columns = columns_of(task, paths)
    for path, measured in paths.items():
        cost = measured["cost"]
        most = max(cost, key=cost.get)
        text = f"After training, over {report['sequences']} sequences, the full model's loss on"
        text += f" {most} rises by {cost[most]:.2f} without {path}."
        row = dict(title=str(path), text=text, layer=path.layer, head=path.head, cost=cost[most])
        row.update(x0=columns.index(path.token), x1=columns.index(path.reader))
        rows.append(dict(row, readers=tokens_of(path.reader), read=tokens_of(path.read)))
    return rows


def data_of(run):
    """Return all that the page holds of a run, a dict for JSON."""
    flags, report = train.read_flags(run), read_report(run)
    task, paths = train.task_of(flags), paths_in(report)
    steps, files = weights_of(run)
    batch = task.batch(held_out("validation", SEQUENCES))
    measured = [measure(run, file, batch, paths) for file in progress("weights", files)]
    attention, answers = zip(*measured, strict=True)

    # of each token its chain, -1 for none, and its role; of each block [first token, size, slots]
    chains = torch.full_like(batch.symbols, -1)
    chains[torch.arange(SEQUENCES)[:, None, None], batch.positions] = torch.arange(flags.N)[:, None]
    roles, blocks = [], []
    for block in task.blocks:
        blocks.append([len(roles), block.size, block.slots])
        roles += [*block.roles][: block.size] * block.slots

    # the columns of the diagram: role and letter
    columns = []
    for end in columns_of(task, paths):
        role, offset = parts_of(end)
        k = task.roles[role]  # -1 if it shows none of the chain
        columns.append([end, "" if offset or k < 0 else task.labels[k][0]])

    verdict = report.get("verdict", f"run python ablate.py {run} first")
    return dict(
        name=html.escape(run.as_posix()),
        about=f"Layers {flags.layers}, heads {flags.heads}, {task.title}, seed {flags.seed}",
        found=f"Circuit of {len(paths)} paths: {verdict}.",
        N=flags.N,
        T=task.T,
        labels=task.labels,
        tokens=batch.symbols.tolist(),
        chains=chains.tolist(),
        roles=roles,
        blocks=blocks,
        layers=flags.layers,
        heads=flags.heads,
        symbols=task.target_names,
        steps=steps,
        targets=answers_of(task, batch.targets, batch),
        answers=answers,
        attention=base64.b64encode(b"".join(attention)).decode(),
        paths=path_rows(task, report, batch.positions),
        columns=columns,
    )


def main():
    p = command_line("extras.explore", __doc__)
    p.add_argument("run", type=train.run_directory, nargs="+", help="run directories of train.py")
    p.add_argument("--out", type=pathlib.Path, default="out/explorer.html", help="the page")
    args = p.parse_args()
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
