"""A page on which the inside of runs can be pointed at: one file that any browser opens.

    python explore.py results/A              # writes results/A/explorer.html
    python explore.py results/A results/D    # one page to choose from, results/explorer.html

No server, no network: the libraries (Vega-Lite) and all data are in the page.
"""

import functools
import html
import json
import pathlib
import shlex
import sys
import time

from parts import runs
from parts.circuit import name_of, path_name
from parts.emergence import checkpoints_of, read_circuit, read_emergence, removal_rises
from parts.flags import command_line

import altair
import torch
import vl_convert

import analyze
from analyze import path_title
from data import held_out, token_names
from pages.views import Story, draw_run, place_arrows


SEQUENCES = 8  # to choose from, fewer where their maps would be more than MOST numbers
MOST = 1_000_000
MOMENTS = 8  # checkpoints of which maps are kept, spread evenly


# ---- what a run directory tells


def read_run(folder):
    """analyze.Run, its model None if the weights are not there. ValueError with one line if the
    folder is no run directory."""
    if (folder / "model.pt").exists():
        return analyze.read_run(folder)
    flags = runs.read_flags(folder)
    task = flags.problem
    report, paths = read_circuit(folder, task)
    emerged = read_emergence(folder, paths) if paths else None
    return analyze.Run(folder, None, flags, task, report, paths, emerged)


def moments_of(run):
    """[(step, weights), ...] whose maps are shown, the final weights last; [] without weights."""
    if run.model is None:
        return []
    last, found = runs.read_log(run.folder)[-1]["step"], []
    files = [file for file in checkpoints_of(run.folder) if int(file.stem) < last]
    count = min(len(files), MOMENTS)
    for number in range(count):
        file = files[number * len(files) // count]
        found.append((int(file.stem), f"ckpt/{file.name}"))
    return [*found, (last, "model.pt")]


def why_missing(run, sequences):
    """{view: why it cannot be drawn}"""
    folder, missing = run.folder, {}
    if run.model is None:
        again = "this run left no weights (model.pt): train it again to see"
        missing |= dict(map=f"{again} attention maps.", information=f"{again} what it knows where.")
    elif not sequences:
        missing["map"] = "The attention maps of this run are too large for a page."
    if not run.report:
        missing["circuit"] = f"No circuit was looked for: run python ablate.py {folder}"
    elif not run.paths:
        why = run.report.get("no_circuit", "see circuit.json")
        missing["circuit"] = f"ablate.py found no circuit: {why}."
    if not run.paths:
        missing["history"] = "Without a circuit there is no path whose history could be drawn."
    elif not run.emergence:
        what = "This run left no checkpoints and no emergence.json"
        missing["history"] = f"{what}: train it with --save-every 80 to see its paths emerge."
    return missing


# ---- rows for the views


@torch.no_grad()
def map_rows(run, weights, batch, shown):
    """A row per sequence, layer and head: its attention map in whole percent."""
    model, rows = runs.load(run.folder, weights)[0], []
    for layer, patterns in enumerate(model(batch.inputs, return_patterns=True)[1], 1):
        for number, heads in enumerate((100 * patterns).round().int().flatten(2).tolist(), 1):
            for head, pattern in enumerate(heads, 1):
                where = dict(shown=shown, sequence=number, layer=layer, head=head)
                rows.append(where | dict(map=pattern))
    return rows


def information_rows(run, weights, shown):
    """A row per layer, role and symbol, as information_map.png shows them."""
    model, rows = runs.load(run.folder, weights)[0], []
    batch = runs.sequences(run.flags, held_out("information", 1024))
    scores = analyze.information(model, run.task, batch, run.flags.K)
    for level, of_roles in enumerate(scores.clamp(0, 1).tolist()):
        for role, of_symbols in enumerate(of_roles):
            for symbol, score in enumerate(of_symbols):
                row = dict(shown=shown, level=level, layer=max(1, level), role=role, symbol=symbol)
                row |= dict(at=run.task.names[role], of=f"x_{symbol}")
                rows.append(row | dict(R2=round(score, 3)))
    return rows


def names_of(run, batch):
    """The names of all tokens of each sequence."""
    shown = zip(batch.inputs[..., : run.flags.K], batch.positions, strict=True)
    return [token_names(run.task, symbols, positions) for symbols, positions in shown]


def token_rows(run, batch):
    """A row per sequence and token: its name, role and chain."""
    rows, named = [], zip(names_of(run, batch), batch.positions, strict=True)
    for number, (names, positions) in enumerate(named, 1):
        for chain, tokens in enumerate(positions.tolist(), 1):
            for role, token in zip(run.task.names, tokens, strict=True):
                row = dict(sequence=number, token=token, name=names[token], role=role, chain=chain)
                rows.append(row)
    return rows


def arrow_rows(run, batch):
    """A row for each two tokens of a sequence that the circuit joins in a head."""
    rows = []
    for number, positions in enumerate(batch.positions.tolist(), 1):
        for path in run.paths:
            where = dict(sequence=number, layer=path.layer + 1, head=path.head + 1)
            for tokens in positions:
                rows.append(where | dict(token=tokens[path.source], other=tokens[path.target]))
    return rows


def path_rows(run):
    """A row per path, with its attention at each step and what ablate.py says of its removal; and
    a row per path and symbol: by how much its error rises without the path."""
    paths, rises = [], []
    removals = {name_of(removal): removal for removal in run.report.get("removals", [])}
    places = place_arrows(run.task, list(run.paths))
    for (path, attention), place in zip(run.paths.items(), places, strict=True):
        row = dict(path=title_of(run, path), layer=path.layer + 1, head=path.head + 1, **place)
        row |= dict(source=run.task.names[path.source], target=run.task.names[path.target])
        row["attentions"] = [round(attention, 4)]
        if run.emergence:
            row["attentions"] = run.emergence.paths[path].mean
        row |= dict.fromkeys(("held", "alive", "destroyed", "predicted"), "not measured")
        removal = removals.get(path_name(path, run.task))
        if removal:
            interval = "{mse:.3f} [{low:.3f}, {high:.3f}]"
            row["held"] = interval.format(**removal["frozen"])
            row["alive"] = interval.format(**removal["alive"])
            for name in ("destroyed", "predicted"):
                row[name] = ", ".join(removal[name]) or "nothing"
            for k, rise in zip(run.flags.symbols, removal["alive"]["partial"], strict=True):
                rises.append(dict(path=row["path"], symbol=k, rise=round(rise, 4)))
        paths.append(row)
    return paths, rises


def title_of(run, path):
    return path_title(path, run.task, run.flags.heads)


def training_rows(run):
    """Rows of each path at each checkpoint; of its removal by symbol; and of the losses."""
    history, rises, losses = [], [], []
    for row in runs.read_log(run.folder):
        for symbol in run.flags.symbols:
            losses.append(dict(step=row["step"], symbol=symbol, loss=round(row[symbol], 4)))
    if not run.emergence:
        return history, rises, losses
    steps = run.emergence.steps
    for path, values in run.emergence.paths.items():
        columns = zip(steps, values.mean, values.low, values.high, values.hits, strict=True)
        for step, mean, low, high, hits in columns:
            row = dict(path=title_of(run, path), step=step)
            history.append(row | dict(mean=mean, low=low, high=high, hits=hits))
    removed = [path.without for path in run.emergence.paths.values()]
    for symbol, by_path in removal_rises(run.emergence, removed).items():
        for path, curve in zip(run.emergence.paths, by_path, strict=True):
            for step, rise in zip(steps, curve, strict=True):
                row = dict(path=title_of(run, path), symbol=symbol, step=step)
                rises.append(row | dict(rise=round(rise, 4)))
    return history, rises, losses


def tell(run):
    """The Story of a run and its rows, {name: [row, ...]}."""
    # the sequences whose maps fit into a page
    flags, task, moments = run.flags, run.task, moments_of(run)
    size = task.T**2 * flags.layers * flags.heads * max(1, len(moments))
    count = min(SEQUENCES, MOST // size)
    batch = runs.sequences(flags, held_out("validation", max(1, count)))
    rows = dict(tokens=token_rows(run, batch), arrows=arrow_rows(run, batch))
    rows["maps"], rows["information"] = [], []

    # what takes time: the model, at each checkpoint
    began = time.time()
    for shown, (_, weights) in enumerate(moments):
        if count:
            rows["maps"] += map_rows(run, weights, batch, shown)
        rows["information"] += information_rows(run, weights, shown)
        done = shown + 1
        left = (time.time() - began) / done * (len(moments) - done)
        progress = f"\r{run.folder}: weights {done}/{len(moments)}, {left:.0f} s left "
        print(progress, end="\n" if done == len(moments) else "", file=sys.stderr, flush=True)

    # what was measured before
    rows["paths"], rows["removals"] = path_rows(run)
    rows["history"], rows["rises"], rows["losses"] = training_rows(run)

    # at each step to choose, the maps of the last weights before it, if there are any
    map_steps, shown_at = [step for step, _ in moments], []
    last_step = runs.read_log(run.folder)[-1]["step"]
    steps = run.emergence.steps if run.emergence else map_steps or [last_step]
    for step in steps:
        before = [number for number, at in enumerate(map_steps) if at <= step]
        shown_at.append(before[-1] if before else 0)
    story = Story(
        task=task,
        flags=flags,
        symbols=flags.symbols,
        titles=[row["path"] for row in rows["paths"]],
        layers=sorted({path.layer for path in run.paths}),
        names=names_of(run, batch),
        steps=steps,
        sequences=run.emergence.sequences if run.emergence else 512,
        shown=shown_at,
        map_steps=map_steps,
        missing=why_missing(run, count),
    )
    return story, rows


# ---- the page


STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 1100px; margin: 0 auto; padding: 0 12px 40px; }
h1 { font-size: 1.4em; margin: .6em 0 .2em; } p, ul { margin: .4em 0; }
#controls { position: sticky; top: 0; z-index: 1; background: Canvas; padding: 6px 0;
  display: flex; flex-wrap: wrap; gap: 4px 18px; border-bottom: 1px solid #8888; }
#sliders, #sliders form, #sliders span { display: contents; }
.vega-bind-name { display: inline !important; }
#controls label, .vega-bind { display: flex; gap: 6px; align-items: center; }
#controls input[type=range] { width: 110px; }
#controls select, #controls input { font: inherit; max-width: 300px; min-height: 28px; }
#controls :focus-visible { outline: 3px solid #E69F00; }
#views svg { display: block; }
#views .mark-text, #views path[fill=transparent] { pointer-events: none; }
.role-legend-symbol path { filter: drop-shadow(0 0 1px #999) drop-shadow(0 0 1px #999); }
#vg-tooltip-element { background: Canvas !important; color: CanvasText !important;
  border-color: #888 !important; font-size: 13px !important; }
#vg-tooltip-element td { color: inherit !important; }
table { border-collapse: collapse; } .wide { overflow-x: auto; }
td, th { text-align: left; padding: 2px 10px 2px 0; border-bottom: 1px solid #8884; }
"""
SCRIPT = """
const about = document.querySelector("#about");
const sliders = document.querySelector("#sliders");
const places = ["sequence", "checkpoint", "layer", "head", "token", "path"];
const narrow = matchMedia("(max-width: 700px)"), menu = document.querySelector("#run select");
let drawn = null;
async function draw() {
  const run = pages[menu ? menu.value : 0];
  about.innerHTML = run.about;
  sliders.innerHTML = places.map((name) => `<span id="${name}"></span>`).join("");
  if (drawn) drawn.finalize();
  const spec = { ...(narrow.matches ? run.narrow : run.wide), datasets: run.rows };
  const how = { renderer: "svg", actions: false };
  drawn = await vegaEmbed("#views", spec, how);
  document.body.dataset.seconds = performance.now() / 1000;
}
if (menu) menu.onchange = draw;
narrow.onchange = draw;
draw().catch((error) => { about.append(`This page cannot be drawn: ${error}`); throw error; });
"""


SETTINGS = (
    "D N layers heads width mlp causal rotary ic optimizer lr batch steps seed dtype torch git"
).split()


def about(run, command):
    """What a page says of a run: two sentences, its settings and verdict, how it was made."""
    report, last = run.report, runs.read_log(run.folder)[-1]
    said = [
        "Choose a sequence, a layer and a token to see who attends to whom in this trained"
        " transformer, and what can be read where.",
        "Choose a path of its circuit to see what the model loses without it.",
    ]
    error = last.get("confirmed", last["val"])
    verdict = f"MSE {error:.4f} at step {last['step']}. "
    if run.paths:
        verdict += f"A circuit of {len(run.paths)} paths, grade {report['grade']}"
        if "replaced" in report:
            held = "; all heads held to it: MSE {mse:.4f} [{low:.4f}, {high:.4f}]"
            verdict += held.format(**report["replaced"])
            verdict += f" on {report['sequences']} fresh sequences"
            verdict += f"; rows without a path: {report['fill']}"
        verdict += "."
    else:
        verdict += why_missing(run, 1)["circuit"]
    settings = ", ".join(f"{name} {getattr(run.flags, name, None)}" for name in SETTINGS)
    made = f"Made by {command} with Altair {altair.__version__}; all data are in this file."
    parts = [" ".join(said), f"Verdict: {verdict}", f"Settings: {settings}.", made]
    return "".join(f"<p>{html.escape(part)}</p>" for part in parts)


@functools.cache
def library():
    """Vega, Vega-Lite and Vega-Embed, as text of JavaScript."""
    version = altair.SCHEMA_VERSION.lstrip("v").split(".")
    return vl_convert.javascript_bundle(vl_version=f"v{version[0]}.{version[1]}")


def page(title, pages):
    """A whole page of HTML that asks nothing of any server, and may not; pages: {name: dict} of
    what can be chosen, each with HTML `about`, `wide` and `narrow` Vega-Lite, and its `rows`."""
    data = json.dumps(list(pages.values()), separators=(",", ":")).replace("<", "\\u003c")
    allowed = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; "
    allowed += "style-src 'unsafe-inline'; img-src data:"
    options = [f'<option value="{n}">{html.escape(name)}' for n, name in enumerate(pages)]
    menu = f"<label>run <select>{''.join(options)}</select></label>" if len(pages) > 1 else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{allowed}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{STYLE}</style></head>
<body><h1>{html.escape(title)}</h1><div id="about" class="wide"></div>
<div id="controls"><span id="run">{menu}</span><span id="sliders"></span></div>
<noscript>This page draws itself with JavaScript: please allow it.</noscript>
<div id="views" class="wide"></div>
<script>{library()}</script>
<script>const pages = {data};{SCRIPT}</script>
</body></html>
"""


def explorer(folders, command):
    """The page of one run, or of several to choose from, as text."""
    pages = {}
    for folder in folders:
        run = read_run(folder)
        story, rows = tell(run)
        levels = [f"{level:.3g}: {what}" for level, what in run.task.plateaus]
        levels = [text.replace("$", "") for text in levels]  # marks of formulas
        specs = dict(wide=draw_run(story, False, levels), narrow=draw_run(story, True, levels))
        pages[str(folder)] = dict(about=about(run, command), rows=rows, **specs)
    return page(f"Inside {', '.join(folder.name for folder in folders)}", pages)


# ---- the command line


def main():
    p = command_line("explore.py", __doc__)
    p.add_argument("run", type=pathlib.Path, nargs="+", help="run directories of train.py")
    folders = p.parse_args().run
    command = shlex.join(["python", "explore.py", *map(str, folders)])
    try:
        file = (folders[0] if len(folders) == 1 else folders[0].parent) / "explorer.html"
        text = explorer(folders, command)
        runs.write_text(file, text)
        print(f"{file} ({len(text) / 1e6:.1f} MB)")
    except (OSError, ValueError) as error:
        p.error(error)


if __name__ == "__main__":
    main()
