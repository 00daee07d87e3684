"""A page that shows the inside of runs, one file that any browser opens: attention, answers, paths.

    python -m extras.pages.explore results/A results/D        # writes out/explorer.html

It needs no server, no network and no library: explorer.js draws the data, which are in the page.
"""

import base64
import contextlib
import itertools
import json
import pathlib
import shlex

import analyze
import train
from ablate import MEAN, PatchedModel, marks_of, parts_of, paths_in
from data import UserError, command_line, held_out, program, progress
from extras.studies.stats import knock_out_rises

import torch
from matplotlib.colors import to_hex


HERE = pathlib.Path(__file__).parent
SEQUENCES, CHECKPOINTS = 8, 8  # in the page; these are evenly spread


def weights_of(run):
    """Return [(step, weights), ...] of the models in the page, the final one last."""
    last = run.log[-1]["step"]
    files = [file for file in train.checkpoints_of(run.folder) if int(file.stem) < last]
    count = min(len(files), CHECKPOINTS)
    files = [files[number * len(files) // count] for number in range(count)]
    return [*((int(file.stem), f"ckpt/{file.name}") for file in files), (last, "model.pt")]


def describe_sequences(run, batch):
    """Return a dict for each sequence: the name and the chain (-1: distractor) of each token, the
    query of each chain, and of each path and chain its [reader, read], None if not both exist."""
    sequences = []
    ends = []  # of each path (2, B, N, T)
    for path in run.paths:
        ends.append(torch.stack([marks_of(end, run.problem, batch.positions) for end in path[2:]]))
    for number, positions in enumerate(batch.positions):
        chains, pairs = torch.full((run.problem.T,), -1), []
        chains[positions] = torch.arange(len(positions))[:, None]
        for marks in ends:
            tokens = [both.nonzero()[:, 1].tolist() for both in marks[:, number].unbind(1)]
            pairs.append([pair if len(pair) == 2 else None for pair in tokens])
        names = [run.problem.labels[symbol] for symbol in batch.symbols[number].tolist()]
        row = dict(names=names, chains=chains.tolist(), queries=positions[:, 0].tolist())
        sequences.append(row | dict(ends=pairs))
    return sequences


# ---- what a model does


def name_answers(run, batch, sequences, predictions):
    """Return for each sequence and chain [[name, squared error], ...] of its target symbols. The
    name is that of the nearest symbol in the sequence, after ≈ where that is not near. predictions:
    (B, N in the order of the queries, symbols*K)."""
    K, first_query, answers = run.flags.K, run.problem.T - run.problem.N, []
    for number, sequence in enumerate(sequences):
        queries = torch.tensor(sequence["queries"]) - first_query
        predicted, targets = (
            tensor[number, queries].unflatten(1, (-1, K)) for tensor in (predictions, batch.targets)
        )
        shown, errors = batch.inputs[number, :, :K], (predicted - targets).square().mean(-1)
        distances, nearest = (predicted[:, :, None] - shown).square().mean(-1).min(-1)
        answers.append([])
        for columns in zip(distances.tolist(), nearest.tolist(), errors.tolist(), strict=True):
            cells = []
            for distance, token, error in zip(*columns, strict=True):
                name = "≈" * (distance > run.problem.lost_above) + sequence["names"][token]
                cells.append([name, round(error, 3)])
            answers[-1].append(cells)
    return answers


@torch.no_grad()
def measure(run, weights, batch, sequences):
    """Return (attention, answers) of a model: the patterns of all heads in whole percent, as bytes;
    the answers of the full model, and with each path knocked out."""
    model = train.load(run.folder, weights)[0]
    with train.precision(run.flags):
        patterns = model(batch.inputs, return_patterns=True)[1]
    patterns = torch.stack(patterns, 1)  # (B, layers, heads, T, T)
    patterns = (100 * patterns.float()).round().byte()
    full = PatchedModel(model, run.flags, batch, metric=torch.Tensor.float)  # predictions
    predictions = [full.baseline, *(full.knock_out([path]) for path in run.paths)]
    answers = [name_answers(run, batch, sequences, each) for each in predictions]
    return patterns.numpy().tobytes(), answers


# ---- information in the residual stream: an empirical Lemma 2


@torch.no_grad()
def residual_streams(model, inputs):
    """Return [(B, T, width), ...], the residual stream before the first and after each layer."""
    streams = []

    def append(module, arguments, output):
        streams.append(output[0] if isinstance(output, tuple) else output)

    with contextlib.ExitStack() as hooks:
        for module in dict.fromkeys((model.embed, *model.blocks)):  # layers may share weights
            hooks.enter_context(module.register_forward_hook(append))
        model(inputs, return_patterns=True)  # with it, the last layer computes all tokens too
    return streams


def information(model, task, batch, K):
    """Return R^2 of reading x_k from the residual stream at a role, (layers+1, roles, symbols),
    before the first and after each layer: least squares, fitted on the first half of the sequences
    and tested on the second."""

    def at_role(values, role):  # (B, T, size) -> (B*N, size)
        tokens = batch.positions[:, :, role, None].expand(-1, -1, values.shape[-1])
        return values.gather(1, tokens).flatten(0, 1)

    # the labels: every symbol of each chain, read at a role that shows it
    shown = [*task.roles.values()]
    labels = [at_role(batch.inputs[..., :K], shown.index(k)) for k in range(task.symbols)]
    fit_labels, test_labels = torch.cat(labels, -1).double().chunk(2)

    scores = []
    for stream in residual_streams(model, batch.inputs):
        for role in range(len(task.roles)):
            features = at_role(stream, role).double()
            ones = torch.ones(len(features), 1)
            fit, test = torch.cat([features, ones], -1).chunk(2)
            weights = torch.linalg.lstsq(fit, fit_labels, driver="gelsy").solution
            errors = (test @ weights - test_labels).square().mean(0)
            scores.append((1 - errors / test_labels.var(0)).view(-1, K).mean(1))
    return torch.stack(scores).view(-1, len(task.roles), task.symbols).float()


# ---- the circuit


def new_symbols(run):
    """Return {path: the k of the symbols x_k that it brings to its reader}, if each token starts
    with its symbol and takes all that what it reads holds (Section 5)."""
    known = {role: {symbol} - {-1} for role, symbol in run.problem.roles.items()}
    brought = {}
    for _, layer in itertools.groupby(sorted(run.paths), key=lambda path: path.layer):
        before = {place: set(symbols) for place, symbols in known.items()}
        for path in layer:
            source = before.get(path.reader, set())
            read = before.get(path.token, set())
            brought[path] = sorted(read - source)
            known.setdefault(path.reader, set()).update(brought[path])
    return brought


def path_rows(run, steps, letters):
    """Return a dict for each path: its ends in the diagram, its attention, its use."""
    rows, columns, brought = [], analyze.columns_of(run.problem, run.paths), new_symbols(run)
    histories = paths_in(run.emergence)
    for path, measured in run.paths.items():
        row = dict(title=str(path), layer=path.layer, head=path.head)
        row |= dict(reader=columns[path.reader], read=columns[path.token])
        row |= dict(brings=[letters[k] for k in brought[path]])
        row |= dict(cost=measured["cost"], without=measured["without"])
        means = {}
        if path in histories:
            history = histories[path]
            means = dict(zip(run.emergence["steps"], history["mean"], strict=True))
            removed = knock_out_rises(run.emergence, history) if "without" in history else {}
            rises = {name: [round(rise, 4) for rise in curve] for name, curve in removed.items()}
            row["history"] = dict(mean=history["mean"], rises=rises)
        row["attention"] = [means.get(step, measured["attention"]) for step in steps]
        rows.append(row)
    return rows


def first_choice(run, sequences, answers):
    """Return what is selected at first: a path from the query, a chain that errs without it."""
    paths = list(run.paths)
    if not paths:
        return dict(layer=run.flags.layers - 1, head=0, path=0, token=run.problem.T - 1)
    path = next((path for path in paths if path.reader == run.problem.names[0]), paths[-1])
    number = paths.index(path)
    errors = [sum(error for _, error in cells) for cells in answers[-1][1 + number][0]]
    token = sequences[0]["queries"][errors.index(max(errors))]
    return dict(layer=path.layer, head=path.head, path=number, token=token)


def data_of(run):
    """Return all that the page holds of a run, a dict for JSON."""
    flags, task, weights = run.flags, run.problem, weights_of(run)

    # attention and answers
    batch = train.sequences(flags, held_out("validation", SEQUENCES))
    sequences, measured = describe_sequences(run, batch), []
    for _, file in progress(f"{run.folder}: weights", weights):
        measured.append(measure(run, file, batch, sequences))
    patterns, answers = zip(*measured, strict=True)

    # R^2 of each symbol at each role before and after each layer, at the end of training
    many = train.sequences(flags, held_out("information", 1024))
    scores = information(run.model, task, many, flags.K).clamp(0, 1)

    # why there is no circuit, if there is none
    missing = f"There is no circuit.json: run python ablate.py {shlex.quote(str(run.folder))}."
    if run.report:
        missing = f"ablate.py found no circuit: {run.report['verdict']}."

    # names: of roles, symbols and the columns of the circuit
    steps = [step for step, _ in weights]
    blocks, roles, reading = [], [], []
    for block in task.blocks:
        slots, size = block.symbols.shape
        blocks.append([len(roles), size, slots])
        roles += block.roles[:size] * slots
        reading += [task.names.index(role) for role in block.roles]
    letters = [chr(ord("A") + k) if k < 26 else f"x{k}" for k in range(task.symbols)]
    places = []
    for place in analyze.columns_of(task, run.paths):
        role, offset = parts_of(place)
        symbol = [*letters, "distractor"][task.roles[role]]
        places.append([place, "intermediate" if offset else symbol])
    return dict(
        name=run.folder.as_posix(),
        about=about(run),
        task=dict(T=task.T, roles=roles, names=task.names, letters=letters),
        blocks=blocks,
        places=places,
        reading=reading,
        layers=flags.layers,
        heads=flags.heads,
        symbols=flags.target_names,
        colors=[to_hex(analyze.symbol_color(k, task.symbols - 1)) for k in range(1, task.symbols)],
        steps=steps,
        sequences=sequences,
        targets=name_answers(run, batch, sequences, batch.targets),
        answers=answers,
        attention=base64.b64encode(b"".join(patterns)).decode(),
        information=(100 * scores).round().int().tolist(),
        paths=path_rows(run, steps, letters),
        emergence={name: run.emergence.get(name) for name in ("steps", "sequences", "ablation")},
        losses={name: [row[name] for row in run.log] for name in ("step", *flags.target_names)},
        plateaus=[f"{loss:.3g}: {what}" for loss, what in task.plateaus],
        missing=missing,
        first=first_choice(run, sequences, answers),
    )


def about(run):
    """Return the text above the views, the legend and the settings of a run."""
    last, report, task = run.log[-1], run.report, run.problem
    loss = last.get("confirmed", last["val"])
    summary = f"{run.flags.title}, step {last['step']}: MSE {loss:.4f}."
    if run.paths:
        verdict = report["verdict"]
        worst = max(report[MEAN], key=lambda name: report[MEAN][name][0])
        loss = "{:.3f} [{:.3f}, {:.3f}]".format(*report[MEAN][worst])
        summary += f" A circuit of {len(run.paths)} paths ({verdict}): with everything outside it"
        summary += f" ablated to its mean, the worst symbol, {worst}, has an MSE of {loss}"
        summary += f" on {report['sequences']} fresh sequences."
    pairs = "beside B3 in a pair, then B3 beside C3 in another, and so on"
    roles = "1a 1b the pair (x_0, x_1), 2a 2b the pair (x_1, x_2), ..."
    if task.title == "conditional":
        pairs = "beside B3 in one pair and beside C3 in another, then D3 beside both B3 and C3"
        pairs += "; D1.2, in grey, is a distractor, in the triple of B1 and C2"
        roles = "1a 1b the pair (x_0, x_1), 2a 2b the pair (x_0, x_2), 3a 3b 3c the triple"
    legend = [
        "A tile is a token: A3 shows x_0 of chain 3, B3 its x_1, C3 its x_2, ...; a colour is a"
        f" chain. To answer the query A3, the model must find A3 {pairs}.",
        f"Below a tile stands the role of the token in its chain: q the query, {roles}. 3b+1 is an"
        " intermediate token: the one right after 3b, which has no role in this chain.",
        "A path, L6H0: q -> 1b, is an attention edge between two tokens of a chain: in layer 6,"
        " head 0, the query q reads the token 1b, and then holds what that token held.",
    ]
    settings = ", ".join(f"{name} {value}" for name, value in vars(run.flags).items())
    return dict(summary=summary, legend=legend, settings=settings)


def page(runs):
    """Return a page of HTML, which may not ask anything of a server; runs: from data_of."""
    data = json.dumps(runs, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:;
 script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<title>Inside a transformer</title>
<style>
{(HERE / "style.css").read_text(encoding="utf-8")}</style></head>
<body><h1 id="title"></h1><div id="controls"></div><p id="summary"></p>
<div class="columns"><section id="answer"></section><section id="legend"></section></div>
<section id="strip"></section>
<div class="columns"><div><section id="circuit"></section><section id="path"></section></div>
<section id="map"></section></div>
<section id="heads"></section><section id="information"></section><section id="history"></section>
<details id="settings"></details>
<noscript>This page needs JavaScript: please allow it.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{(HERE / "explorer.js").read_text(encoding="utf-8")}</script>
</body></html>
"""


def main():
    p = command_line("extras.pages.explore", __doc__)
    p.add_argument("run", type=pathlib.Path, nargs="+", help="run directories of train.py")
    p.add_argument("--out", type=pathlib.Path, default="out/explorer.html", help="the page")
    with program("extras.pages.explore"):
        args = p.parse_args()
        runs = [analyze.read_run(folder) for folder in args.run]
        for run in runs:
            if run.model is None:
                raise UserError(f"{run.folder} has no weights, model.pt: train it to its end")
        text = page([data_of(run) for run in runs])
        with train.writing(args.out):
            args.out.write_text(text, encoding="utf-8")
        print(f"{args.out} ({len(text) / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
