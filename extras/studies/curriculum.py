"""Which part of the implicit curriculum is needed: runs with different target symbols.

python -m extras.studies.curriculum results/runs/curriculum.jsonl --out results/figures
"""

import itertools

import analyze
from extras import studies
from extras.studies import order
from extras.studies.rows import committed


def table(rows):
    """Return a row per D and targets, from fresh weights: how many know each symbol, and when."""
    groups, lines = {}, []
    for row in (row for row in rows if not row["flags"].init):
        groups.setdefault((row["flags"].D, *row["task"].targets), []).append(row)
    names = sorted({name for row in rows for name in row["learned"]})
    for (D, *_), group in groups.items():
        asked, cells = group[0]["task"].target_names, []
        for name in names:
            known = [row["learned"][name] for row in group if name in row["known"]]
            text = f"{len(known)}: {studies.spread(known)}" if known else "0"
            cells.append(text if name in asked else "")
        lines.append([D, ", ".join(asked), len(group), *cells])
    return studies.markdown(["D", "asked for", "runs", *names], *lines)


def despite_gap(rows, gap):
    """Return ([bool, ...], left out): of these runs whose lowest symbol that is not asked for is
    x_gap, from their start, whether they know one above it, if the run of the same D and seed that
    asks for all does; and the number of those whose control knows none."""
    answers, left_out, controls = [], 0, {}
    for row in rows:
        if order.asks_all(row["flags"]):
            controls[row["flags"].D, row["flags"].seed] = {*row["known"]}
    for row in rows:
        flags, symbols = row["flags"], row["task"].targets
        above = {f"x_{k}" for k in symbols if k > gap}
        if not flags.init and gap not in symbols and {*range(1, gap)} <= {*symbols} and above:
            if above & controls.get((flags.D, flags.seed), set()):
                answers.append(bool(above & {*row["known"]}))
            else:
                left_out += 1
    return answers, left_out


def claim():
    """Return what the table decides."""
    rows, D3 = committed("curriculum/*"), "curriculum/D3_"
    no_x1, no_x1_left = despite_gap(rows, 1)
    whole, no_x2 = committed(f"{D3}targets1-2-3_*"), committed(f"{D3}targets1-3_*")
    alone, turns = committed(f"{D3}x1-2_then_x3_*"), committed(f"{D3}x1_then_x1-2_then_all_*")
    return f"""\
- **Without x_1**: {sum(no_x1)} of {len(no_x1)} fresh runs that did not ask for x_1 learned a later
  symbol (D = 2, 3, 5). Left out are {no_x1_left}, whose seed learns no later one if asked for all.
- **Without x_2**: x_3 is learned in {sum("x_3" in row["known"] for row in whole)} of {len(whole)}
  seeds if all three are asked for, and in {sum("x_3" in row["known"] for row in no_x2)} of the same
  {len(no_x2)} if x_1 and x_3 are.
- **After x_1 and x_2**: {sum("x_3" in row["known"] for row in alone)} of {len(alone)} runs that
  knew only both and then were asked for x_3 alone learned it. Of {len(turns)} others, asked for all
  three, {sum("x_3" in row["known"] for row in turns)} did."""


def draw(rows, out):
    """Draw which symbols each run with D=3 and fresh weights learned, by what it was asked for."""
    groups, (figure, [axes]) = {}, analyze.panels(1, 1, 7.5, 3.4)
    for row in (row for row in rows if row["flags"].D == 3 and not row["flags"].init):
        groups.setdefault(tuple(row["task"].targets), []).append(row)
    for (y, (asked, group)), k in itertools.product(enumerate(groups.items()), (1, 2, 3)):
        known = [f"x_{k}" in row["known"] for row in group]
        text, color = f"{sum(known)} of {len(known)}", analyze.symbol_color(k)
        if k not in asked:
            axes.text(k - 0.4, y, "not asked for", size=9, color="silver", va="center")
            continue
        for x, learned in enumerate(known):  # a run has the same place in each column
            style = dict(mec=color, mfc=color if learned else "white", mew=1.5, ms=9)
            axes.plot(k - 0.4 + 0.065 * x, y, "o", **style)
        axes.text(k + 0.17, y, text, size=9, color="gray", va="center")
    asked = [", ".join(f"x_{k}" for k in symbols) for symbols in groups]
    axes.set_yticks(range(len(groups)), asked)
    axes.set_xticks((1, 2, 3), ["x_1 learned", "x_2 learned", "x_3 learned"], weight="bold")
    axes.set(xlim=(0.5, 3.5), ylim=(len(groups) - 0.5, -0.5), ylabel="what is asked for")
    axes.hlines([y + 0.5 for y in range(len(groups) - 1)], 0.5, 3.5, analyze.PALE)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.set_frame_on(False)
    title = "No symbol is learned above one that is not asked for"
    figure.suptitle(title, x=0.01, ha="left", size=13, weight="bold")
    text = "A dot is a run (D=3, fresh weights), filled if it knows the symbol at its end."
    figure.supxlabel(text, x=0.01, ha="left", size=8.5, color="gray")
    analyze.save_figure(figure, out / "curriculum.png")
    return out / "curriculum.png"


# ---- conditional retrieval: x_1, x_2, x_3 are called x, y, z


def conditional_claim():
    """Return in which order the symbols are learned, and what runs with fewer targets learn."""
    rows = committed("conditional/*", "again/cond*")
    part = [row for row in rows if len(row["learned"]) < 3]
    whole = [row for row in rows if len(row["learned"]) == 3]
    steps = [(row["flags"].seed, *row["learned"].values()) for row in whole]
    both = [(seed, x, y, z) for seed, x, y, z in steps if None not in (x, y)]
    known = [(x, y, z) for _, x, y, z in both if z is not None]
    seeds = len({seed for seed, *_ in both})
    return f"""\
- Of {len(whole)} runs that ask for all three, repeats included, {len(both)} ({seeds} seeds) learn x
  and y, {sum(y < x for _, x, y, _ in both)} of them y first. {len(known)} learn z too,
  {sum(z < max(x, y) for x, y, z in known)} of them before x or y.
- If x or y is not asked for, {sum(bool(row["known"]) for row in part)} of {len(part)} runs learn
  anything."""


if __name__ == "__main__":
    studies.command(__file__, __doc__, table, draw)
