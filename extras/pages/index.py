"""An index of all runs below a folder: the figures over many runs, then a table to filter.

python -m extras.pages.index results     # writes out/index.html, one file that any browser opens
"""

import base64
import html
import os
import pathlib
import re
from urllib.parse import quote

from data import UserError, command_line, program
from extras.pages.explore import page, write
from extras.studies.rows import load, name_of


FLAGS = ["task", "seed", "layers", "heads", "D", "optimizer", "rotary"]
COLUMNS = ["run", *FLAGS, "MSE", "x_1, x_2, ... learned at step", "circuit"]
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
    """Return {run directory: (page, number of the run in it)} of all pages below a folder."""
    pages = {}
    for file in sorted(folder.rglob("*.html")):
        text = file.read_text(encoding="utf-8", errors="replace")
        runs = re.search(r'<meta name="runs" content="([^"]*)">', text)
        for number, name in enumerate(html.unescape(runs[1]).splitlines() if runs else ()):
            pages.setdefault((file.parent / name).resolve(), (file, number))
    return pages


def cells_of(row):
    """Return the cells of a run after its name: its settings and how it ended."""
    cells = [getattr(row["flags"], name) for name in FLAGS]
    learned = " ".join(
        "never" if step is None else f"{step:.0f}" for step in row["learned"].values()
    )
    return [*cells, f"{row['mse']:.4f}", learned, row["report"].get("verdict", "not searched")]


def index(folder, out):
    """Return the page of all runs below a folder, as text; UserError if there is no run."""
    pages, folders = pages_of(folder), [file.parent for file in sorted(folder.rglob("config.json"))]
    files = sorted(folder.rglob("runs/*.jsonl"))
    runs = load([*(run for run in folders if (run / "log.jsonl").exists()), *files])
    if not runs:
        raise UserError(f"{folder} holds no run directories with a log: train.py makes them")

    # the figures, embedded in the page
    parts = [f"<h1>All runs in {html.escape(folder.name)}</h1>"]
    for picture in (picture for pattern in FIGURES for picture in sorted(folder.glob(pattern))):
        data = base64.b64encode(picture.read_bytes()).decode()
        picture = f'<img alt="{picture.stem}" src="data:image/png;base64,{data}">'
        parts.append(f'<div class="wide">{picture}</div>')

    # a row for each run, linked to the page that shows it
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in COLUMNS) + "</tr>"]
    for row in runs:
        run = row["folder"]
        name = html.escape(run.relative_to(folder).as_posix() if run else name_of(row))
        if run and run.resolve() in pages:
            file, number = pages[run.resolve()]
            link = quote(os.path.relpath(file, out.parent))
            name = f'<a href="./{link}#run={number}">{name}</a>'
        cells = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells_of(row))
        rows.append(f'<tr class="run"><td>{name}</td>{cells}</tr>')
    parts.append(
        f'<h2>The runs</h2><p><label>filter by words: <input id="filter" type="search"></label> '
        f'<span id="count">{len(runs)}</span> of {len(runs)} runs</p>'
        f'<div class="wide all"><table>{"".join(rows)}</table></div>'
    )
    return page(f"All runs in {folder.name}", "\n".join(parts), script=FILTER)


def main():
    p = command_line("python -m extras.pages.index", __doc__)
    p.add_argument("folder", type=pathlib.Path, help="a folder with run directories: results")
    p.add_argument("--out", type=pathlib.Path, default="out/index.html", help="the page")
    with program("extras.pages.index"):
        args = p.parse_args()
        write(args.out, index(args.folder, args.out))


if __name__ == "__main__":
    main()
