"""An index of all runs below a folder: the figures over many of them, then a table to filter.

python -m pages.index results     # writes out/index.html, one file that any browser opens
"""

import base64
import html
import os
import pathlib
import re
from urllib.parse import quote

from parts import UserError, command_line, config, program
from parts.circuit import read_report

from pages.explore import page, write


SHOWN = ["task", "seed", "layers", "heads", "D", "optimizer", "rotary"]  # of the flags of a run
HEADS = ["run", *SHOWN, "MSE", "x_1, x_2, ... below 0.5 at step", "circuit"]
FIGURES = ["sweep/*.png", "figures/*.png"]
FILTER = """
const field = document.querySelector("#filter"), rows = [...document.querySelectorAll("tr.run")];
function choose() {
  const words = field.value.toLowerCase().split(" ");
  const fits = (row) => words.every((word) => row.textContent.toLowerCase().includes(word));
  for (const row of rows) row.hidden = !fits(row);
  document.querySelector("#count").textContent = rows.filter((row) => !row.hidden).length;
}
field.oninput = choose;
choose();
"""


def pages_of(folder):
    """{run directory: page, ...} of the pages below a folder that say which runs they show."""
    found = {}
    for file in sorted(folder.rglob("*.html")):
        told = re.search(r'<meta name="runs" content="([^"]*)">', file.read_text(errors="replace"))
        for number, name in enumerate(html.unescape(told[1]).splitlines() if told else (), 1):
            found.setdefault((file.parent / name).resolve(), (file, number))
    return found


def row_of(run):
    """The cells of a run as texts, but for its name: its settings and how it ended; a run that has
    no log yet has begun."""
    flags, report = config.read_flags(run), read_report(run)
    cells = [getattr(flags, name) for name in SHOWN]
    if not (run / "log.jsonl").exists():
        return [*cells, "begun", "", ""]
    log = config.read_log(run)
    steps = config.crossings(log, flags).values()
    learned = " ".join("never" if step is None else f"{step:.0f}" for step in steps)
    error = log[-1].get("confirmed", log[-1]["val"])
    return [*cells, f"{error:.4f}", learned, report.get("verdict", "not looked for")]


def index(folder, out):
    """The page of all runs below a folder, as text. UserError if there is none."""
    files, shown = sorted(folder.rglob("config.json")), pages_of(folder)
    if not files:
        raise UserError(f"{folder} holds no run directories: train.py makes them")

    # the figures, whole in the page
    parts = [f"<h1>All runs in {html.escape(folder.name)}</h1>"]
    for picture in (picture for pattern in FIGURES for picture in sorted(folder.glob(pattern))):
        data = base64.b64encode(picture.read_bytes()).decode()
        picture = f'<img alt="{picture.stem}" src="data:image/png;base64,{data}">'
        parts.append(f'<div class="wide">{picture}</div>')

    # a row per run, linked to the page that shows it
    rows = ["<tr>" + "".join(f"<th>{html.escape(head)}</th>" for head in HEADS) + "</tr>"]
    for run in (file.parent for file in files):
        name = html.escape(run.relative_to(folder).as_posix())
        if run.resolve() in shown:
            file, number = shown[run.resolve()]
            link = quote(os.path.relpath(file, out.parent))
            name = f'<a href="./{link}#run={number}">{name}</a>'
        cells = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row_of(run))
        rows.append(f'<tr class="run"><td>{name}</td>{cells}</tr>')
    parts.append(
        f'<h2>The runs</h2><p><label>filter by words: <input id="filter" type="search"></label> '
        f'<span id="count">{len(files)}</span> of {len(files)} runs</p>'
        f'<div class="wide all"><table>{"".join(rows)}</table></div>'
    )
    return page(f"All runs in {folder.name}", "\n".join(parts), script=FILTER)


def main():
    p = command_line("python -m pages.index", __doc__)
    p.add_argument("folder", type=pathlib.Path, help="a folder with run directories: results")
    p.add_argument("--out", type=pathlib.Path, default="out/index.html", help="the page")
    with program("pages.index"):
        args = p.parse_args()
        write(args.out, index(args.folder, args.out))


if __name__ == "__main__":
    main()
