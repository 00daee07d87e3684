"""An index of all runs below a folder, with what they show together to point at.

python -m pages.index results     # writes out/index.html, one file that any browser opens
"""

import html
import math
import os
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote

from parts import Refused, program, runs
from parts.circuit import read_report
from parts.flags import command_line
from parts.flow import DEPTH_LAWS

import sweep
from pages.explore import colors_of, page, write


# ---- charts, as SVG whose marks tell what they are when they are pointed at


class Axis(NamedTuple):
    """place: of a value, from 0 to 1; ticks: {value: text}."""

    label: str
    ticks: dict
    place: Callable


class Mark(NamedTuple):
    x: float
    y: float
    colors: list  # [on white, on black]
    says: str
    hollow: bool = False


def linear(low, high):
    return lambda value: (value - low) / ((high - low) or 1)


def chart(title, note, across, upward, marks, lines=(), key=(), height=240):
    """A section of HTML. lines: [([(x, y), ...], colors), ...]; key: {name: colors}."""
    left = 34 + 6 * max(len(str(text)) for text in upward.ticks.values())
    width, bottom, drawn = 480, 44, []

    def x(value):
        return f"{left + (width - left - 16) * across.place(value):.1f}"

    def y(value):
        return f"{(height - bottom) * (1 - upward.place(value)) + 8:.1f}"

    for value, text in across.ticks.items():
        drawn.append(f'<text x="{x(value)}" y="{height - 24}">{text}</text>')
    for value, text in upward.ticks.items():
        grid = f'<path class="block" d="M{left} {y(value)}H{width}"/>'
        drawn.append(f'{grid}<text class="right" x="{left - 5}" y="{y(value)}">{text}</text>')
    for points, colors in lines:
        joined = " ".join(f"{x(a)},{y(b)}" for a, b in points)
        drawn.append(f'<polyline class="curve" style="{style(colors)}" points="{joined}"/>')
    for mark in marks:
        kind, says = "mark hollow" if mark.hollow else "mark", html.escape(mark.says)
        where = f'cx="{x(mark.x)}" cy="{y(mark.y)}" style="{style(mark.colors)}"'
        drawn.append(f'<circle class="{kind}" r="4" {where} data-say="{says}"/>')
    drawn.append(f'<text x="{(left + width) / 2}" y="{height - 7}">{across.label}</text>')
    turned = f'transform="translate(9 {height / 2 - 10}) rotate(-90)"'
    drawn.append(f"<text {turned}>{upward.label}</text>")
    named = "".join(f'<span style="{style(own)}"><i></i>{name}</span>' for name, own in key.items())
    return f"""<section><h2>{title}</h2><p class="note">{note}</p><p class="key">{named}</p>
<p class="say">Point at a mark.</p>
<svg viewBox="0 0 {width} {height}">{"".join(drawn)}</svg></section>"""


def style(colors):
    return f"--light:{colors[0]};--dark:{colors[1]}"


INK, RED, BLUE = ["#000", "#fff"], ["#d62728", "#ff6b6b"], ["#1f77b4", "#4ea3e0"]


# ---- what the runs show together


def draw_order(every):
    """When each run learned each symbol, a line for each run."""
    marks, sets, last = [], {}, max(run["flags"].problem.symbols for run in every) - 1
    colors = colors_of([f"x_{k}" for k in range(1, last + 1)], last)
    steps = [step for run in every for step in run["learned"].values() if step]
    least, most = math.log(max(1, min(steps, default=1))), math.log(max(steps, default=10))
    for line, run in enumerate(every):
        sets.setdefault(line, html.escape(run["name"].rpartition("/")[0].rpartition("/")[2]))
        for symbol, step in run["learned"].items():
            says = f"{run['name']}, seed {run['flags'].seed}: {symbol} "
            says += "never below 0.5" if step is None else f"below 0.5 at step {step:.0f}"
            beyond = most + (0.05 + 0.02 * int(symbol[2:])) * (most - least)
            place = beyond if step is None else math.log(max(1, step))
            marks.append(Mark(place, -line, colors[symbol], says, hollow=step is None))
    first = {name: line for line, name in reversed(sets.items())}
    ticks = {math.log(step): step for n in range(6) for step in (10**n, 3 * 10**n)}
    ticks = {place: step for place, step in ticks.items() if least <= place <= most}
    across = Axis("training step, logarithmic", ticks, linear(least, most + 0.15 * (most - least)))
    ticks = {-line: name for name, line in first.items() if name}
    upward = Axis("", ticks, linear(-len(every), 1))
    key = {name: colors[name] for name in colors if name[:2] == "x_"}
    note = "A line for each run, by folder: the step at which a symbol passes below 0.5; "
    note += "hollow, at the right: never."
    height = 60 + 7 * len(every)
    return chart("When each run learned what", note, across, upward, marks, key=key, height=height)


def draw_table(name, rows):
    """Figure 4, each symbol alone, and the depth law with each mask, of one table of runs."""
    charts, own = [], [row for row in rows if row["causal"] and not row["circuit"]]
    seeds, deepest = 1 + max(row["seed"] for row in rows), max(row["layers"] for row in rows)
    layers = Axis("layers", {n: n for n in range(1, deepest + 1)}, linear(0.5, deepest + 0.5))
    loss = Axis("MSE", {n / 4: n / 4 for n in range(5)}, linear(0, 1.15))
    kinds = {"with implicit curriculum": BLUE, "without": RED}
    final = [
        (row, "val", kinds["with implicit curriculum" if row["ic"] else "without"]) for row in own
    ]
    last = max(sweep.symbols_in(own), default=1)
    colors = colors_of([f"x_{k}" for k in range(1, last + 1)], last)
    each = [(row, f"x_{k}") for row in own if row["ic"] for k in sweep.symbols_in([row])]
    for title, shown, key in (
        ("Final loss by layers", final, kinds),
        ("Each symbol alone", [(*one, colors[one[1]]) for one in each], colors),
    ):
        marks = []
        for row, column, color in shown:
            what = "all" if column == "val" else column
            says = f"{row['run']}, seed {row['seed']}, {row['layers']} layers, {what}: "
            x = row["layers"] + 0.5 * row["seed"] / seeds - 0.25  # a seed beside the other
            marks.append(Mark(x, row[column], color, f"{says}{row[column]:.3f}"))
        key = {text: color for text, color in key.items() if text[:2] == "x_" or key is kinds}
        charts.append(
            chart(f"{title}, {name}", "A mark for each run.", layers, loss, marks, key=key)
        )
    return "".join(charts) + "".join(draw_law(name, rows, causal) for causal in (True, False))


def draw_law(name, rows, causal):
    """For each seed the fewest layers that learned x_k, beside the law; nothing without runs."""
    marks, kinds = [], {"minimal circuit held": BLUE, "attention learned": RED}
    seeds = 1 + max(row["seed"] for row in rows)
    for (kind, color), held in zip(kinds.items(), (True, False), strict=True):
        group = sweep.with_attention(rows, causal, held)
        for k in sweep.symbols_in(group):
            found = {}  # the shallowest run of each seed that learned x_k
            for row in sorted(group, key=lambda row: row["layers"]):
                if sweep.learned(row, k):
                    found.setdefault(row["seed"], row)
            for seed, row in found.items():
                says = f"{row['run']}, seed {seed}, {kind}: x_{k} {row[f'x_{k}']:.3f}"
                aside = (-0.35 if held else 0.05) + 0.3 * seed / seeds
                marks.append(Mark(k + aside, row["layers"], color, says))
    if not marks:
        return ""
    last, deepest = max(sweep.symbols_in(rows)), max(row["layers"] for row in rows)
    across = Axis("k of x_k", {k: k for k in range(1, last + 1)}, linear(0.5, last + 0.5))
    ticks = {n: n for n in range(1, deepest + 1)}
    upward = Axis("fewest layers", ticks, linear(0.5, deepest + 0.5))
    law = [(k + end, DEPTH_LAWS[causal](k)) for k in range(1, last + 1) for end in (-0.5, 0.5)]
    law = [(k, layers) for k, layers in law if layers <= deepest]
    title = f"The depth law, {'causal mask' if causal else 'no mask'}, {name}"
    note = "A mark for each seed, at the fewest layers that learned x_k."
    key = kinds | {"the law": INK}
    return chart(title, note, across, upward, marks, [(law, INK)], key)


# ---- the runs


def read_runs(folder):
    """[dict, ...] of all runs below a folder, at any depth: those without a log have begun."""
    every = []
    for file in sorted(folder.rglob("config.json")):
        run, flags = file.parent, runs.read_flags(file.parent)
        one = dict(folder=run, name=run.relative_to(folder).as_posix(), flags=flags, learned={})
        if (run / "log.jsonl").exists():
            log = runs.read_log(run)
            one |= dict(last=log[-1], learned=runs.crossings(log), report=read_report(run))
        every.append(one)
    if not every:
        raise Refused(f"{folder} holds no run directories: train.py makes them")
    return every


def pages_of(folder, out):
    """{run directory: the address of its page, seen from `out`}, of the pages that exist."""
    found = {}
    for file in sorted({*folder.rglob("*.html"), *out.parent.glob("*.html")}):
        with open(file, encoding="utf-8", errors="replace") as opened:
            shown = re.search('<meta name="runs" content="([^"]+)">', opened.read(10_000))
        for number, name in enumerate(shown[1].split("\n") if shown else [], 1):
            address = quote(os.path.relpath(file, out.parent))
            run = (file.parent / html.unescape(name)).resolve()
            found.setdefault(run, f"{address}#run={number}")
    return found


SHOWN = ["task", "D", "layers", "heads", "optimizer", "rotary", "seed"]  # of the flags of a run
HEADS = ["run", *SHOWN, "steps", "MSE", "x_1, x_2, ... below 0.5 at step", "circuit"]


def run_table(every, addresses):
    """The runs as a table of HTML, each with a page linked to it."""
    lines = []
    for run in every:
        cells = [getattr(run["flags"], name) for name in SHOWN] + ["begun", "", "", ""]
        if "last" in run:
            last, report = run["last"], run["report"]
            steps = ["never" if at is None else f"{at:.0f}" for at in run["learned"].values()]
            paths = f", {len(report['paths'])} paths" if report.get("paths") else ""
            circuit = report.get("verdict", "not looked for") + paths
            error = f"{last.get('confirmed', last['val']):.4f}"
            cells[-4:] = [last["step"], error, ", ".join(steps), circuit]
        name, address = html.escape(run["name"]), addresses.get(run["folder"].resolve())
        link = f'<a href="{html.escape(address)}">{name}</a>' if address else name
        lines.append("".join(f"<td>{one}" for one in (link, *map(html.escape, map(str, cells)))))
    head = "".join(f"<th>{one}" for one in HEADS)
    return f"<table><thead><tr>{head}<tbody><tr>{'<tr>'.join(lines)}</table>"


SCRIPT = """
for (const kind of ["pointerover", "click"]) document.addEventListener(kind, ({ target }) => {
  const { say } = target.dataset;
  if (say) target.closest("section").querySelector(".say").textContent = say;
});
const filter = document.getElementById("filter"), rows = [...document.querySelectorAll("tbody tr")];
filter.oninput = () => {
  const words = filter.value.toLowerCase().split(/\\s+/);
  for (const row of rows) {
    const text = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
  document.getElementById("left").value = rows.filter((row) => !row.hidden).length;
};
"""


def index(folder, out):
    """The page of all runs below a folder, as text. Refused if there is none."""
    every = read_runs(folder)
    charts = [draw_order(every)]
    for file in sorted(folder.rglob("results.jsonl")):
        table = sweep.read_table(file).values()
        rows = sweep.plain(row for row in table if not row["error"] and row["val"] is not None)
        if rows:
            charts.append(draw_table(html.escape(file.parent.name), rows))
    name = html.escape(folder.name)
    body = f"""<h1>All runs in {name}</h1><div class="charts">{"".join(charts)}</div>
<section><h2>The {len(every)} runs</h2><p><label>only those with the words
<input id="filter" type="search" placeholder="certified never"></label>
<output id="left">{len(every)}</output> shown; a link opens a run from inside</p>
<div class="wide all">{run_table(every, pages_of(folder, out))}</div></section>"""
    return page(f"All runs in {folder.name}", body, script=SCRIPT)


def main():
    p = command_line("pages.index", __doc__)
    p.add_argument("folder", type=pathlib.Path, help="a folder with run directories, results")
    p.add_argument("--out", type=pathlib.Path, default="out/index.html", help="the page")
    with program("pages.index"):
        args = p.parse_args()
        write(args.out, index(args.folder, args.out))


if __name__ == "__main__":
    main()
