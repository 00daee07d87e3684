"""Which part of the implicit curriculum is needed: runs with different target symbols.

    python -m extras.studies.curriculum results/runs/curriculum.jsonl --out results/figures

Of a run with --init, the runs that it started from are its earlier stages, and their steps count.
"""

from pathlib import Path

import analyze
from data import UserError
from extras import studies
from extras.studies.rows import committed, group_by_settings, settings_of

import matplotlib.pyplot as plt


# ---- chains


def stages_of(row, rows):
    """Return [row, ...] of a run and of those of these rows that it started from, the first one
    first."""
    by_name, stages = {(other["group"], other["name"]): other for other in rows}, [row]
    while init := stages[0]["flags"].init:
        key = row["group"], Path(init).name
        if key not in by_name:
            raise UserError(f"{row['name']} started from {init}: name that run too")
        stages.insert(0, by_name[key])
    return stages


def join_stages(row, rows):
    """Return the row of a run with its stages as one: learned has the steps of all together, None
    for what is not known at the end; targets says what each stage asked for."""
    learned, before, settings, targets = {}, 0, [], []
    for stage in stages_of(row, rows):
        flags, stage_learned = stage["flags"], stage["learned"]
        for name, step in stage_learned.items():
            earlier = learned.get(name)
            learned[name] = earlier if earlier or step is None else before + step
        learned |= {name: None for name in stage_learned if name not in stage["known"]}
        before += stage["steps"]
        names = ", ".join(flags.target_names)
        targets.append("one at random" if getattr(flags, "mixture", False) else names)
        settings += [f"stage {len(targets)}", *settings_of(flags.replace(init=""))]
    targets = "; then ".join(targets)
    return row | dict(learned=learned, settings=tuple(settings), targets=targets)


def table(rows=None):
    """Return a row per training: of how many runs, how many know each symbol at their end, and the
    median step at which these learned it."""
    rows = rows or committed("curriculum/*")
    groups = group_by_settings([join_stages(row, rows) for row in rows])
    groups = sorted(groups.values(), key=lambda g: (g[0]["targets"].count("then"), g[0]["flags"].D))
    names, lines = sorted({name for row in rows for name in row["learned"]}), []
    for group in groups:
        cells = []
        for name in names:
            steps = [row["learned"].get(name) for row in group if name in row["learned"]]
            known = [step for step in steps if step is not None]
            asked = name in group[0]["flags"].target_names
            text = f"{len(known)}: {studies.spread(known)}" if known else "0"
            cells.append(text if asked else "not asked" * bool(steps))
        lines.append([group[0]["flags"].D, group[0]["targets"], len(group), *cells])
    return studies.markdown(["D", "asked for", "runs", *names], *lines)


def known_to_control(row, rows):
    """Return what those of these runs know that differ from a run in that they ask for all symbols,
    from their start."""
    known = set()
    for flags, names in ((other["flags"], other["known"]) for other in rows):
        asks_all = flags.ic and not (flags.targets or flags.init or getattr(flags, "mixture", ""))
        if asks_all and (flags.D, flags.seed) == (row["flags"].D, row["flags"].seed):
            known |= {*names}
    return known


def learned_despite_gap(rows):
    """Return ({symbol that is no target: [bool, ...]}, left out): of the runs that have, from their
    start, a target symbol above this gap (the lowest one of the run), whether they learned such a
    symbol. Left out is the number of those that did not, and whose control learned none either."""
    answers, left_out = {}, 0
    for row in rows:
        symbols = row["flags"].target_symbols
        gap = min({*range(1, 2 + len(symbols))} - {*symbols})
        above = {f"x_{k}" for k in symbols if k > gap}
        if above and not row["flags"].init:
            learned = bool(above & {*row["known"]})
            if learned or above & known_to_control(row, rows):
                answers.setdefault(gap, []).append(learned)
            else:
                left_out += 1
    return answers, left_out


def knows(name, pattern):
    """Return "0 of 8", in how many of the committed runs that match a symbol is known at the
    end."""
    answers = [name in row["known"] for row in committed(pattern)]
    return f"{sum(answers)} of {len(answers)}"


def claim():
    """Return what the table decides."""
    rows, D3 = committed("curriculum/*"), "curriculum/D3_"
    gaps, left_out = learned_despite_gap(rows)
    random = [row for row in rows if getattr(row["flags"], "mixture", False)]
    random = [row for row in random if "x_2" in known_to_control(row, rows)]
    first, second = (sum(name in row["known"] for row in random) for name in ("x_1", "x_2"))
    gap, full = (
        ["x_3" in row["known"] for row in committed(f"{D3}targets{targets}_*")]
        for targets in ("1-3", "1-2-3")
    )
    return f"""\
- **Without x_1**: {sum(gaps[1])} of {len(gaps[1])} runs that did not ask for x_1 learned a later
  symbol within 2400 steps. Here and in the [claims](paper.md), {left_out} more runs with a gap
  are left out: with their seed, no symbol above it is learned when all are asked for either.
- **Without x_2**: {studies.share(gap)} runs that asked for x_1 and x_3 learned x_3, and
  {studies.share(full)} that asked for all three (95% Wilson intervals).
- **To have learned x_1 and x_2 is not enough**: {knows("x_3", f"{D3}x1-2_then_x3_*")} runs that
  then asked for x_3 alone learned it; {knows("x_3", f"{D3}all_then_x3_*")} that had learned all
  three kept it when it alone was asked for.
- **One at random**: {first} of {len(random)} runs learned x_1 and {second} x_2, where the same
  seed learns both when all are asked for."""


def draw(rows, out):
    """Draw the last loss of each symbol of the runs with D=3 and fresh first weights, a dot each,
    by what they ask for."""
    runs = [row for row in rows if row["flags"].D == 3 and not row["flags"].init]
    groups = {}
    for row in [join_stages(row, rows) for row in runs]:
        groups.setdefault(row["targets"], []).append(row)
    figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    for k in (1, 2, 3):
        xs, ys = [], []
        for x, group in enumerate(groups.values()):
            losses = [row["log"][-1].get(f"x_{k}") for row in group]
            left = x + 0.22 * (k - 2) - 0.015 * len(losses)
            asked = [(left + 0.03 * n, loss) for n, loss in enumerate(losses) if loss is not None]
            xs, ys = xs + [x for x, _ in asked], ys + [y for _, y in asked]
        color = analyze.symbol_color(k, 3)
        axes.scatter(xs, ys, s=16, color=color, label=f"$x_{k}$")
    axes.axhline(0.5, color="gray", ls=":", lw=1, label="a symbol counts as learned below")
    axes.axhline(0.75, color="gray", lw=0.6, label="average of the four candidates")
    ticks = [f"{targets}\nn = {len(group)}" for targets, group in groups.items()]
    axes.set_xticks(range(len(groups)), ticks, fontsize=8)
    axes.set(xlabel="what is asked for", ylabel="last validation MSE", ylim=(0, 1.15))
    axes.set_title("Last loss of each symbol, a dot per run and symbol (D=3)", fontsize=11)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)
    analyze.save_figure(figure, out / "curriculum.png")
    return out / "curriculum.png"


# ---- conditional retrieval: x_1, x_2, x_3 are called x, y, z


def conditional_runs():
    """Return (rows, left out): the runs of conditional retrieval, of several of one seed, encoding,
    depth, group and targets the longest alone, which begins like the shorter ones; and how many
    these are."""
    runs, rows = {}, committed("conditional/*", "again/cond*")
    for row in sorted(rows, key=lambda row: row["flags"].steps):
        flags = row["flags"]
        key = flags.rotary, flags.layers, flags.seed, getattr(flags, "circuit", "")
        runs[(*key, row["group"], *flags.target_symbols)] = row
    return [*runs.values()], len(rows) - len(runs)


def conditional_table():
    """Return a row per training: how many runs know each symbol at their end, and when all."""
    lines = []
    for group in group_by_settings(conditional_runs()[0]).values():
        flags, cells = group[0]["flags"], []
        attention = getattr(flags, "circuit", "") or ("RoPE" if flags.rotary == "qk" else "")
        title = f"{flags.layers} layers" + f", {attention}" * bool(attention)
        for k in (1, 2, 3):
            asked = k in flags.target_symbols
            cells.append(sum(f"x_{k}" in row["known"] for row in group) if asked else "")
        done = [max(row["learned"].values()) for row in group if len(row["known"]) == 3]
        cells.append(studies.spread(done) if done else "")
        lines.append([title, flags.steps, len(group), *cells])
    lines.sort(key=lambda line: ("" in line[3:6], -len(line[0]), *map(str, line)))
    return studies.markdown(["", "steps", "runs", "x", "y", "z", "all at step"], *lines)


def conditional_claim():
    """Return in which order the symbols are learned, and what runs with fewer targets learn."""
    rows, left_out = conditional_runs()
    learning = [row for row in rows if not getattr(row["flags"], "circuit", "")]
    whole = [row for row in learning if len(row["learned"]) == 3]
    runs = [(*row["learned"].values(), row["steps"]) for row in whole]
    both = [steps for steps in runs if None not in steps[:2]]
    done = [steps for steps in both if steps[2] is not None]
    later = [z - max(x, y) for x, y, z, _ in done]
    never = [end - max(x, y) for x, y, z, end in both if z is None]
    part = [row for row in learning if len(row["learned"]) < 3]
    seeds = {row["flags"].seed for row in part}
    same = [row for row in whole if row["flags"].layers == 4 and row["flags"].rotary == "input"]
    tried = {row["flags"].seed for row in same if {"x_1", "x_2"} <= {*row["known"]}} & seeds
    known = sum(bool(row["known"]) for row in part)
    return f"""\
- **All three are asked for** in {len(runs)} of these runs that learn their attention. {left_out}
  shorter runs are left out here and in the table: a longer one of the same seed begins like them.
  {len(runs) - len(done)} never learn z, and {len(runs) - len(both)} not both x and y.
- **Either of x and y may come first**: of the {len(both)} that learn both,
  {sum(y < x for x, y, *_ in both)} learn y first.
- **z comes last** in {sum(gap > 0 for gap in later)} of the {len(later)} that learn it,
  {min(later):.0f} to {max(later):.0f} steps after x and y are known. To know both is not enough:
  runs that never learn z know them for their last {studies.steps_text(never)} steps.
- **Where not all three are asked for**, {known} of {len(part)} runs learned anything. Of their
  seeds, {len(tried)} of {len(seeds)} learn x and y when all are asked for."""


if __name__ == "__main__":
    studies.command(__file__, __doc__, table, draw)
