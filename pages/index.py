"""An index of all runs below a folder, with the figures over many runs to point at.

python index.py results     # writes results/index.html, one file that any browser opens
"""

import html
import pathlib

from parts import runs
from parts.flags import command_line
from parts.flow import DEPTH_LAWS

import altair as alt

import sweep
from pages.explore import page
from pages.views import (
    BLUE,
    GRAY,
    INK,
    RED,
    THEME,
    beside,
    heading,
    name_marks,
    note,
    rows_of,
    symbol_colors,
)
from studies.order import facts, induction_names


# ---- rows


def order_rows(every):
    """A row per run and thing learned: the step at which it crossed 0.5."""
    rows = []
    for name, fact in every:
        where = dict(run=name, seed=fact["flags"].seed, MSE=round(fact["mse"], 4))
        for symbol, step in fact["learned"].items():
            if step is not None:
                row = where | dict(symbol=symbol, what=f"{symbol} below 0.5")
                rows.append(row | dict(step=round(step)))
        upper, lower = induction_names(fact["task"])
        for key, path in dict(upper_step=upper, lower_step=lower).items():
            if fact.get(key) is not None:
                row = where | dict(what=f"{path} above 0.5", step=round(fact[key]))
                rows.append(row | dict(symbol="attention"))
    return rows


def figure_4_rows(table_rows):
    """A row per run and loss: of all that was asked for, and of each symbol."""
    rows = []
    for row in table_rows:
        if row["causal"] and not row["circuit"]:
            curriculum = f"{'with' if row['ic'] else 'without'} implicit curriculum, D={row['D']}"
            where = dict(run=row["run"], seed=row["seed"], layers=row["layers"], kind=curriculum)
            rows.append(where | dict(symbol="all", loss=round(row["val"], 4)))
            for k in sweep.symbols_in([row]) if row["ic"] else ():
                rows.append(where | dict(symbol=f"x_{k}", loss=round(row[f"x_{k}"], 4)))
    return rows


def law_rows(table_rows):
    """A row per symbol, seed and kind of run: the fewest layers that learned it, and in which run;
    and a row per symbol and mask of what the law says."""
    rows, laws = [], []
    for causal, mask in (True, "causal mask"), (False, "no mask"):
        for held, kind in (True, "minimal circuit held"), (False, "attention learned"):
            group = sweep.with_attention(table_rows, causal, held)
            for k in sweep.symbols_in(group):
                found = {}  # the shallowest run of each seed that learned x_k
                for row in sorted(group, key=lambda row: row["layers"]):
                    if sweep.learned(row, k):
                        found.setdefault(row["seed"], row)
                for row in found.values():
                    where = dict(run=row["run"], seed=row["seed"], layers=row["layers"])
                    rows.append(
                        where | dict(k=k, mask=mask, kind=kind, loss=round(row[f"x_{k}"], 4))
                    )
        for k in sweep.symbols_in(table_rows):
            laws.append(dict(mask=mask, k=k, layers=DEPTH_LAWS[causal](k)))
    return rows, laws


# ---- charts


def tips(*fields):
    return [alt.Tooltip(f"{field}:N") for field in ("run", "seed", *fields)]


def filled(symbols):
    """The colours of symbols, for marks that are filled."""
    return symbol_colors(symbols, len(symbols)).legend(orient="top", title=None)


def draw_order(every, steps, symbols, width):
    """order.png: when each run learned each symbol and formed its induction head."""
    names = [name for name, *_ in every]
    x = alt.X("step:Q", title="training step (logarithmic)", axis=alt.Axis(tickCount=6))
    ends = [0.9 * max(1, min(steps)), 1.1 * max(steps)]  # said, since a kind of mark may be missing
    x = x.scale(type="log", domain=ends, nice=False)
    axis = alt.Axis(labelLimit=0.4 * width, labelFontSize=9, grid=True, orient="right")
    y = alt.Y("run:N", title=None, sort=names, scale=alt.Scale(domain=names), axis=axis)
    rows, shape = rows_of("order"), dict(width=0.6 * width, height=13 * len(names))
    dots = rows.transform_filter("datum.symbol != 'attention'")
    dots = dots.mark_circle(size=60, opacity=1, stroke=GRAY).encode(x=x, y=y)
    dots = dots.encode(color=filled(symbols), tooltip=tips("what", "step", "MSE"))
    dots = dots.properties(name="learned")
    ticks = rows.transform_filter("datum.symbol == 'attention'").mark_tick(color=RED, thickness=2)
    ticks = ticks.encode(x=x, y=y, tooltip=tips("what", "step", "MSE"))
    title = heading("When each run learned what", width, "red: the two paths of its induction head")
    return alt.layer(dots, ticks).properties(title=title, **shape)


def draw_figure_4(symbols, width):
    """Figure 4: final losses by the number of layers."""
    x = alt.X("layers:O", axis=alt.Axis(labelAngle=0))
    y = alt.Y("loss:Q", title="MSE, mean over the last 100 steps")
    kinds = alt.Color("kind:N", scale=alt.Scale(range=[BLUE, RED]))
    kinds = kinds.legend(orient="bottom", title=None, direction="vertical", labelLimit=width)
    panels = []
    for name, only, color, said in (
        ("final", "== 'all'", kinds, "Figure 4: final loss, every run and the mean"),
        ("symbols", "!= 'all'", filled(symbols), "Each symbol alone"),
    ):
        rows = rows_of("figure_4").transform_filter(f"datum.symbol {only}")
        dots = rows.mark_circle(size=70, opacity=0.6, stroke=GRAY).encode(x=x, y=y, color=color)
        dots = dots.encode(tooltip=tips("symbol", "layers", "loss")).properties(name=name)
        means = rows.mark_line().encode(x=x, y=alt.Y("mean(loss):Q"), color=color)
        panels.append(alt.layer(means, dots).properties(width=width, height=250, title=said))
    return panels


def draw_law(deepest, seeds, width):
    """law.png: the fewest layers that learned each symbol, beside the law."""
    x = alt.X("at:Q", title="k of x_k", scale=alt.Scale(nice=False, zero=False))
    x = x.axis(values=list(range(1, 100)), format="d", grid=False)
    y = alt.Y("layers:Q", title="fewest layers", scale=alt.Scale(domain=[1, deepest + 1]))
    y = y.axis(values=list(range(1, deepest + 2)), format="d")
    color = alt.Color("kind:N", scale=alt.Scale(range=[BLUE, "#E69F00"]))
    color = color.legend(orient="bottom", title=None)
    shape, panels = alt.Shape("kind:N", legend=None), []
    for name, mask in ("held", "causal mask"), ("unmasked", "no mask"):
        only = f"datum.mask == '{mask}'"
        law = rows_of("laws").transform_filter(only).mark_line(interpolate="step", color=INK)
        law = law.transform_calculate(at="datum.k")
        dots = rows_of("law").transform_filter(only).mark_point(filled=True, size=70)
        # a seed beside the other, held and learned apart
        aside = f"(datum.kind[0] == 'm' ? -0.26 : 0.1) + {0.3 / seeds} * datum.seed"
        dots = dots.transform_calculate(at=f"datum.k + {aside}")
        dots = dots.encode(x=x, y=y, color=color, shape=shape)
        dots = dots.encode(tooltip=tips("kind", "k", "layers", "loss")).properties(name=name)
        chart = alt.layer(law.encode(x=x, y=y), dots)
        title = heading(
            f"The depth law, {mask}", width, "line: the law; a dot per seed that learned x_k"
        )
        panels.append(chart.properties(width=width, height=230, title=title))
    return panels


def draw_index(every, rows, narrow):
    """Vega-Lite of all charts, a dict without the rows."""
    width, stack = (280, alt.vconcat) if narrow else (460, alt.hconcat)
    last = max(fact["flags"].D for _, fact in every)
    symbols = [f"x_{k}" for k in range(1, last + 1)]
    charts = [note("None of these runs has learned a symbol.", "When each run learned what", width)]
    if rows["order"]:
        steps = [row["step"] for row in rows["order"]]
        charts = [draw_order(every, steps, symbols, width if narrow else 2 * width)]
    if rows["figure_4"]:
        charts.append(beside(stack, *draw_figure_4(symbols, width)))
        deepest = max(row["layers"] for row in rows["figure_4"] + rows["law"])
        seeds = 1 + max([row["seed"] for row in rows["law"]], default=0)
        charts.append(beside(stack, *draw_law(deepest, seeds, width)))
    drawn = beside(alt.vconcat, *charts).to_dict() | dict(config=THEME)
    name_marks(drawn)
    return drawn


# ---- the page


SHOWN = ["seed", "layers", "heads", "D", "optimizer", "rotary"]  # of the flags of a run
HEADS = ["run", *SHOWN, "MSE", "x_1 x_2 ... below 0.5", "circuit"]


def run_table(folder, every):
    """The runs as a table of HTML, those with an explorer.html linked to it."""
    lines = ["".join(f"<th>{head}" for head in HEADS)]
    for name, fact in every:
        link = html.escape(name)
        if (folder / name / "explorer.html").exists():
            link = f'<a href="{html.escape(name)}/explorer.html">{link}</a>'
        steps = ["never" if step is None else f"{step:.0f}" for step in fact["learned"].values()]
        circuit = "not looked for" if not fact["report"] else "none"
        if "shape" in fact:
            circuit = f"{fact['report']['grade']}, {len(fact['shape'])} paths"
        cells = [getattr(fact["flags"], flag) for flag in SHOWN]
        cells += [f"{fact['mse']:.4f}", " ".join(steps), circuit]
        lines.append("".join(f"<td>{cell}" for cell in (link, *cells)))
    return f"<table><tr>{'<tr>'.join(lines)}</table>"


def index(folder):
    """The page of all runs below a folder, as text. ValueError with one line if there is none."""
    every = []
    for file in sorted(folder.glob("**/config.json")):
        run = file.parent
        every.append((run.relative_to(folder).as_posix(), facts(run)))
    if not every:
        raise ValueError(f"{folder} holds no run directories: train.py makes them")
    swept = [row for row in sweep.read_table(folder / "sweep" / "results.csv").values()]
    swept = sweep.plain(row for row in swept if not row["error"] and row["val"] is not None)
    law, laws = law_rows(swept)
    rows = dict(order=order_rows(every), figure_4=figure_4_rows(swept), law=law, laws=laws)
    inside = '<p><a href="explorer.html">Some of them from inside</a></p>'
    name = html.escape(folder.name)
    said = f"""<p>The {len(every)} runs below {name}/, and what they show together.
Point at a mark to see its run, seed and numbers.</p>
{inside if (folder / "explorer.html").exists() else ""}
<details><summary>All runs as a table</summary>{run_table(folder, every)}</details>"""
    specs = {name: draw_index(every, rows, name == "narrow") for name in ("wide", "narrow")}
    return page(f"All runs in {folder.name}", {folder.name: dict(about=said, rows=rows, **specs)})


def main():
    p = command_line("index.py", __doc__)
    p.add_argument("folder", type=pathlib.Path, help="a folder with run directories, results")
    folder = p.parse_args().folder
    try:
        text = index(folder)
        runs.write_text(folder / "index.html", text)
        print(f"{folder / 'index.html'} ({len(text) / 1e6:.1f} MB)")
    except (OSError, ValueError) as error:
        p.error(error)


if __name__ == "__main__":
    main()
