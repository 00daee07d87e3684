"""A page on which the inside of runs can be pointed at: one file that any browser opens.

    python -m pages.explore results/A results/D        # writes out/explorer.html
    python -m pages.explore results/A --out A.html

No server, no network, no library: explorer.js draws, and all data are in the page.
"""

import base64
import html
import itertools
import json
import os
import pathlib
import shlex
import time

from parts import command_line, config, program
from parts.circuit import PatchedModel
from parts.emergence import removal_rises
from parts.search import attention_knockout
from parts.theory import Place

import torch
from matplotlib.colors import to_hex

import analyze
from data import held_out, token_names


HERE = pathlib.Path(__file__).parent
SEQUENCES = 8  # to choose from, fewer where their maps would be more than MOST numbers
MOST = 1_000_000
MOMENTS = 8  # checkpoints of which all is measured, spread evenly


# ---- what a run directory tells


def moments_of(run):
    """[(step, weights), ...] at which the model is looked into, the final weights last; [] without
    weights."""
    if run.model is None:
        return []
    last = config.read_log(run.folder)[-1]["step"]
    known = {*run.emergence.steps} - {last} if run.emergence else range(last)
    files = [file for file in config.checkpoints_of(run.folder) if int(file.stem) in known]
    count = min(len(files), MOMENTS)
    files = [files[number * len(files) // count] for number in range(count)]
    return [*((int(file.stem), f"ckpt/{file.name}") for file in files), (last, "model.pt")]


def why_missing(run, count):
    """{view: why it cannot be drawn}; count: of the sequences whose maps are in the page."""
    missing, folder = {}, shlex.quote(str(run.folder))
    if run.model is None:
        why = "This run left no weights (model.pt): train it again to see this."
        missing = dict.fromkeys(("map", "answer", "information"), why)
    elif not count:
        missing["map"] = "The attention maps of this run are too large for a page."
    if run.report and not run.paths:
        missing["circuit"] = f"ablate.py found no circuit: {run.report['verdict']}."
    elif not run.report:
        look = f"run python ablate.py {folder}" if run.model else "there are no weights for it"
        missing["circuit"] = f"No circuit was looked for: {look}."
    return missing


# ---- who is who


def describe(run, batch):
    """A dict for each sequence: of its tokens the names and chains (-1: nobody's), of each chain
    its query, and for each path and chain its [source, target], null where there is none."""
    described = []
    ends = [[end.tokens(run.task, batch.positions) for end in path[2:]] for path in run.paths]
    for number, positions in enumerate(batch.positions):
        chains, joined = torch.full((run.task.T,), -1), []
        chains[positions] = torch.arange(len(positions))[:, None]
        for (source, there), (target, too) in ends:
            pairs = torch.stack([source, target], -1)[number].tolist()
            known = (there & too)[number].tolist()
            joined.append([pair if known[n] else None for n, pair in enumerate(pairs)])
        one = dict(chains=chains.tolist(), queries=positions[:, 0].tolist(), ends=joined)
        names = token_names(run.task, batch.inputs[number, :, : run.flags.K], positions)
        described.append(one | dict(names=names))
    return described


# ---- what the model does at one moment


class Says(PatchedModel):
    """A model that returns what it says in place of its errors: (B, N, asked*K)."""

    @torch.no_grad()
    def errors_with(self, patterns):
        with config.precision(self.flags):
            return self.model(self.batch.inputs, patterns).float()


def named(run, batch, described, said):
    """For each sequence and chain its [[name, error], ...], a pair per symbol that is asked for:
    the nearest of all symbols that the sequence shows, ≈ before it where that is not near, and the
    squared error; said: (B, N in the order of the queries, asked*K)."""
    K, first, found = run.flags.K, run.task.T - run.task.N, []
    for number, one in enumerate(described):
        own = torch.tensor(one["queries"]) - first
        answers, right = (each[number, own].unflatten(1, (-1, K)) for each in (said, batch.targets))
        shown, errors = batch.inputs[number, :, :K], (answers - right).square().mean(-1)
        apart, nearest = (answers[:, :, None] - shown).square().mean(-1).min(-1)  # (N, asked)
        rows, cells = (x.flatten().tolist() for x in (apart, nearest, errors)), []
        for far, token, error in zip(*rows, strict=True):
            cells.append(["≈" * (far > run.task.lost) + one["names"][token], round(error, 3)])
        asked = answers.shape[1]
        found.append([cells[start : start + asked] for start in range(0, len(cells), asked)])
    return found


@torch.no_grad()
def look_into(run, weights, batch, described, count):
    """What is shown of these weights: the maps of all heads in whole percent, bytes; what is said,
    free and without each path."""
    model = config.load(run.folder, weights)[0]
    maps = model(batch.inputs[:count], return_patterns=True)[1]
    maps = (100 * torch.stack(maps, 1)).round().byte()  # (count, layers, heads, T, T)
    free = Says(model, run.flags, batch)
    without = [attention_knockout(free, [path]) for path in run.paths]
    said = [named(run, batch, described, each) for each in (free.errors({}), *without)]
    return maps.numpy().tobytes(), said


def information_of(run):
    """[level][role][symbol] what can be read where at the end, in whole percent; it takes longest
    of all."""
    if run.model is None:
        return []
    read = config.sequences(run.flags, held_out("information", 1024))
    scores = analyze.information(run.model, run.task, read, run.flags.K).clamp(0, 1)
    return (100 * scores).round().int().tolist()


# ---- what was measured before


def what_is_brought(run):
    """{path: the k of the symbols x_k that its source then holds for the first time}, if each token
    starts with what it shows, and takes all that the targets of its paths hold (Section 5)."""
    brought, holds = {}, {Place(n): {role.symbol} - {-1} for n, role in enumerate(run.task.roles)}
    for _, layer in itertools.groupby(sorted(run.paths), key=lambda path: path.layer):
        before = {place: set(held) for place, held in holds.items()}
        for path in layer:
            own = holds.setdefault(path.source, set())
            brought[path] = sorted(before.get(path.target, set()) - before.get(path.source, set()))
            own |= {*brought[path]}
    return brought


def path_rows(run, steps, letters):
    """A dict per path: where it is drawn, its attention at each of the steps, what circuit.json
    says of it, and its history."""
    rows, across = [], analyze.columns_of(run.task, run.paths)
    brought = what_is_brought(run)
    for path, measured in run.paths.items():
        head = f", head {path.head + 1}" * (run.flags.heads > 1)
        ends = " attends to ".join(end.name(run.task) for end in path[2:])
        row = dict(title=f"layer {path.layer + 1}{head}: {ends}", layer=path.layer, head=path.head)
        row["brings"] = [letters[k] for k in brought[path]]
        row |= dict(source=across[path.source], target=across[path.target])
        row["attention"] = [measured["attention"]] * len(steps)
        row |= {name: measured[name] for name in ("carried", "alone", "everywhere", "destroys")}
        history = run.emergence and run.emergence.paths.get(path)
        if history:
            mean = dict(zip(run.emergence.steps, history.mean, strict=True))
            row["attention"] = [mean.get(step, measured["attention"]) for step in steps]
            rises = removal_rises(run.emergence, [history.without])
            rises = {name: [round(rise, 4) for rise in rises[name][0]] for name in rises}
            row["history"] = dict(mean=history.mean, without=rises)
        rows.append(row)
    return rows


def first_seen(run, described, said):
    """What is chosen to begin with: the first path from the query, and the query that errs most
    without it."""
    paths, token = list(run.paths), run.task.T - 1
    if not paths:
        return dict(layer=run.flags.layers - 1, head=0, path=0, token=token)
    path = next((path for path in paths if path.source == (0, 0)), paths[-1])
    number = paths.index(path)
    if said:
        errors = [sum(error for _, error in cells) for cells in said[-1][1 + number][0]]
        token = described[0]["queries"][errors.index(max(errors))]
    return dict(layer=path.layer, head=path.head, path=number, token=token)


def tell(run):
    """All that the page holds of a run."""
    # the sequences whose maps fit into a page
    flags, task, moments = run.flags, run.task, moments_of(run)
    size = task.T**2 * flags.layers * flags.heads * max(1, len(moments))
    count = min(SEQUENCES, MOST // size)
    batch = config.sequences(flags, held_out("validation", max(1, count)))
    described, looks, began = describe(run, batch), [], time.time()
    for _, weights in moments:
        looks.append(look_into(run, weights, batch, described, count))
        config.progress(f"{run.folder}: weights", len(looks), len(moments), began)
    maps, said = zip(*looks, strict=True) if looks else ([], [])

    # names: of roles, symbols and the columns of the circuit
    log = config.read_log(run.folder)
    steps = [step for step, _ in moments] or [log[-1]["step"]]
    block, _, place, _ = (column.tolist() for column in task.tokens)
    roles = [task.role_at(*where).name for where in zip(block, place, strict=True)]
    letters = [chr(ord("A") + k) if k < 26 else f"x{k}" for k in range(task.symbols)]
    places = []
    for place in analyze.columns_of(task, run.paths):
        below = [*letters, "nobody's"][task.roles[place.role].symbol]
        below = "relay" if place.offset else below
        places.append([place.name(task), below])
    return dict(
        name=run.folder.as_posix(),
        about=about(run),
        task=dict(T=task.T, roles=roles, names=task.names, letters=letters),
        blocks=task.blocks,
        places=places,
        reading=task.in_reading_order,
        layers=flags.layers,
        heads=flags.heads,
        symbols=flags.target_names,
        asked=flags.target_names,
        colors=[to_hex(config.symbol_color(k, task.symbols - 1)) for k in range(1, task.symbols)],
        steps=steps,
        sequences=described,
        right=named(run, batch, described, batch.targets),
        said=said,
        maps=base64.b64encode(b"".join(maps)).decode() if count else "",
        information=information_of(run),
        paths=path_rows(run, steps, letters),
        emerged=run.emergence and dict(steps=run.emergence.steps, n=run.emergence.sequences),
        losses={name: [row[name] for row in log] for name in ("step", *flags.target_names)},
        plateaus=[f"{loss:.3g}: {what.replace('$', '')}" for loss, what in task.plateaus],
        missing=why_missing(run, count),
        first=first_seen(run, described, said),
    )


# ---- what is said of a run


FILLS = dict(zero="nothing", identity="itself alone", uniform="all that it may, alike")


def about(run):
    """What stands above and below the views, {name: text or list of texts}."""
    last, report, task = config.read_log(run.folder)[-1], run.report, run.task
    said = f"{run.title}: MSE {last.get('confirmed', last['val']):.4f}. "
    if run.paths:
        held = "held to it in all heads, MSE {mse:.4f} [{low:.4f}, {high:.4f}]"
        said += f"A circuit of {len(run.paths)} paths ({report['verdict']}): the model "
        said += f"{held.format(**report['sufficient'])} on {report['sequences']} fresh sequences."
    pairs = "beside B3 in a pair, then B3 beside C3 in another, and so on"
    roles = "1a 1b the pair (x_0, x_1), 2a 2b the pair (x_1, x_2), ..."
    if task.crossed:
        pairs = "beside B3 in a pair and beside C3 in another, then D3 beside both; D1.2, grey, is"
        pairs += " nobody's: of the triple of B1 and C2"
        roles = "1a 1b the pair (x_0, x_1), 2a 2b the pair (x_0, x_2), 3a 3b 3c the triple"
    legend = [
        "A tile is a token: A3 shows x_0 of chain 3, B3 its x_1, C3 its x_2, ...; a colour a chain."
        f" Asked A3, one must find A3 {pairs}.",
        f"Below it stands its role in its chain: q the query, {roles}; 3b+1 is what stands right"
        " after 3b, a relay.",
        "A path: in this head the token with one role attends to that with another, of its chain,"
        " which it knows by something that both hold; what it brings, the first then holds too.",
    ]
    if run.paths:
        fill = FILLS.get(report["fill"], report["fill"])
        legend[2] += f" PatchedModel to the circuit, tokens without a path attend to {fill}."
    settings = ", ".join(f"{name} {value}" for name, value in vars(run.flags).items())
    return dict(said=said, legend=legend, settings=settings)


# ---- the page


BODY = """<h1 id="title"></h1><div id="controls"></div><p id="said"></p>
<div class="columns"><section id="answer"></section><section id="legend"></section></div>
<section id="strip"></section>
<div class="columns"><div><section id="circuit"></section><section id="path"></section></div>
<section id="map"></section></div>
<section id="heads"></section><section id="information"></section><section id="history"></section>
<details id="made"></details>"""


def page(title, body, data="", script="", about=""):
    """A whole page of HTML that asks nothing of any server, and may not. data: anything for JSON.
    about: the run directories that it shows, one a line."""
    data = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:;
 script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="runs" content="{html.escape(about)}"><link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>
{(HERE / "style.css").read_text()}</style></head>
<body>{body}
<noscript>This page draws itself with JavaScript: please allow it.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body></html>
"""


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(file, text)
    print(f"{file} ({len(text) / 1e6:.1f} MB)")


def main():
    p = command_line("pages.explore", __doc__)
    p.add_argument("run", type=pathlib.Path, nargs="+", help="run directories of train.py")
    p.add_argument("--out", type=pathlib.Path, default="out/explorer.html", help="the page")
    with program("pages.explore"):
        args = p.parse_args()
        weights = [(folder / "model.pt").exists() for folder in args.run]
        told = [tell(analyze.read_run(*one)) for one in zip(args.run, weights, strict=True)]
        beside = "\n".join(os.path.relpath(folder, args.out.parent) for folder in args.run)
        script = (HERE / "explorer.js").read_text()
        write(args.out, page("Inside a transformer", BODY, told, script, beside))


if __name__ == "__main__":
    main()
