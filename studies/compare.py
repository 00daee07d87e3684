"""Compare runs: a table of their circuits, what they have in common, and when each learned what.

    python compare.py results/L12_H1_D3_s{0..10}    # prints Markdown, draws results/order.png
    python compare.py results/cleaning/*_s*/        # other weight decays: cleaning.png too

What is not known of a run (it has no circuit.json or no emergence.json) is left out of the counts.
"""

import os
import pathlib
import statistics

from parts import runs
from parts.emergence import read_circuit, read_emergence
from parts.flags import command_line
from parts.intervals import wilson
from parts.runs import in_order

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.markers import TICKDOWN, TICKUP

from analyze import USEFUL
from studies.order import induction_names, what_came_first, what_heads_did
from train import schedule


# ---- the facts of one run


def decay_of(flags, steps):
    """e-folds of weight decay in so many steps: weights that nothing needs shrink by exp(-this)."""
    rates = (flags.lr * schedule(step, flags) for step in range(steps))
    return flags.weight_decay * sum(rates)


def facts(folder):
    """What is compared over runs, a dict without what is not known."""
    flags, log = runs.read_flags(folder), runs.read_log(folder)
    task, learned = flags.problem, runs.crossings(log)
    report, paths = read_circuit(folder, task)
    found = dict(
        run=folder.name,
        flags=flags,
        kind=f"{flags.optimizer}, --rotary {flags.rotary}",
        decay=decay_of(flags, log[-1]["step"]),
        steps=log[-1]["step"],
        task=task,
        mse=log[-1].get("confirmed", log[-1]["val"]),
        learned=learned,
        in_order=in_order(list(learned.values())),
        report=report,
    )
    if report:
        found["literal"] = report["grade"] == "literal"
    if not paths:
        return found

    # of the circuit that was found
    found["shape"] = tuple(path[2:] for path in paths)
    found["fewest_layers"] = report["layers_with_paths"] == report["least_layers"]
    found["fewest_paths"] = report["paths"] == report["least_paths"]
    found["starts_with_previous_token"] = report["first_useful_layer_is_previous_token"]
    emergence = read_emergence(folder, paths)
    if emergence:
        found |= what_came_first(emergence, learned, task)
        found |= what_heads_did(emergence, {path[:2] for path in paths}, task)
    return found


# ---- the tables


COLUMNS = [
    "run",
    "e-folds of weight decay",
    "steps",
    "MSE",
    "paths that it uses",
    "circuit (rows without a path)",
    "all heads replaced",
    "first useful head uniform",
    "paths (least), in layers (least)",
    "without one path (0.05, 0.17 or more)",
    "lowest control",
    "flow right",
    "first useful layer: previous token",
    "x_1, x_2, ... below 0.5 at step",
    "first path between slots above 0.5 at step, with what it needs and what follows",
]


def table_row(fact):
    """A line of Markdown on one run, a cell for each of COLUMNS."""
    # the certificate
    report = fact["report"]
    certificate = ["none" if report else "not looked for", *[""] * 7]
    if "shape" in fact:
        without = [removal["frozen"]["mse"] for removal in report["removals"]]
        needed = f"{report['removals_above_threshold']}, {report['removals_at_the_papers_least']}"
        paths = f"{report['paths']} ({report['least_paths']})"
        layers = f"{report['layers_with_paths']} ({report['least_layers']})"
        lowest = min(mse for mse in report["controls"].values() if mse is not None)
        certificate = [
            f"{report['grade']} ({report['fill']})",
            "{mse:.4f} [{low:.4f}, {high:.4f}]".format(**report["replaced"]),
            f"{report['first_head_uniform']['mse']:.3f}",
            f"{paths} in {layers}",
            f"{min(without):.3f} to {max(without):.2f} ({needed} of {len(without)})",
            f"{lowest:.2f}",
            f"{report['predictions_right']} of {len(without)}",
            "yes" if fact["starts_with_previous_token"] else "no",
        ]

    # when it learned what, and how
    steps = ["never" if step is None else f"{step:.0f}" for step in fact["learned"].values()]
    names, told = fact["task"].names, []
    for path, step in fact.get("first_paths", {}).items():
        source, target = names[path.source], names[path.target]
        told.append(f"layer {path.layer + 1}: {source} -> {target} at {step:.0f}")
    mse = f"{fact['mse']:.4f}"
    begin = [fact["run"], f"{fact['decay']:.2g}", str(fact["steps"]), mse]
    begin.append(str(report.get("candidates", "not counted")) if report else "")
    cells = [*begin, *certificate, ", ".join(steps), ", ".join(told)]
    return f"| {' | '.join(cells)} |"


def share(group, name):
    """How many of the runs for which it is known it is true of, with a 95% Wilson interval."""
    known = [fact[name] for fact in group if fact.get(name) is not None]
    if not known:
        return "not measured"
    low, high = wilson(sum(known), len(known))
    return f"{sum(known)} of {len(known)} [{low:.2f}, {high:.2f}]"


def waiting_times(group):
    """{"x_1 to x_2": [steps, ...], ...} of the runs that learned all symbols in order."""
    waits = {}
    for fact in group:
        if fact["in_order"] and None not in fact["learned"].values():
            learned = list(fact["learned"].items())
            for (before, began), (after, ended) in zip(learned, learned[1:], strict=False):
                waits.setdefault(f"{before} to {after}", []).append(ended - began)
    return waits


def in_common(group):
    """{what: text} over runs of one kind."""
    # of how many runs each is true
    upper, lower = induction_names(group[0]["task"])
    counted = {
        "literal": "a literal circuit",
        "fewest_layers": "in the least number of layers",
        "fewest_paths": "with the least number of paths",
        "starts_with_previous_token": "first useful layer attends to the previous token",
        "previous_token_first": "the same, counting only paths above 0.5 when the last symbol is"
        " learned",
        "in_order": "x_1, x_2, ... cross 0.5 in this order",
        "induction_head_first": f"an induction head first ({upper}, with {lower} below, before any"
        " other)",
        "checkpoint_between": "a checkpoint stands between it and the next path",
        "lower_before_upper": f"its {lower} passes 0.5 before its {upper}",
        "later_symbol_lost": f"without its {upper} at the end a later symbol is lost",
        "first_heads_stay": "the heads without which x_1 was first lost are in the circuit",
        "no_head_died": "no head that a symbol once needed can be spared at the end",
    }
    said = {what: share(group, name) for name, what in counted.items()}

    # how they differ
    shapes = {fact["shape"] for fact in group if "shape" in fact}
    said["different circuits, by the roles of their paths in order"] = str(len(shapes))
    for symbols, steps in waiting_times(group).items():
        middle, least, most = statistics.median(steps), min(steps), max(steps)
        text = f"{middle:.0f} ({least:.0f} to {most:.0f}), n = {len(steps)}"
        said[f"steps from {symbols}, median (range)"] = text
    return said


def tables(every):
    """The facts of several runs as Markdown: run by run, then over the runs of each kind."""
    if len({induction_names(fact["task"]) for fact in every}) > 1:
        raise ValueError("these runs are of tasks with other roles: compare them apart")
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(table_row, every)]
    lines += ["", "| over the runs of a kind (95% Wilson intervals) | |", "|---|---|"]
    for kind in sorted({fact["kind"] for fact in every}):
        group = [fact for fact in every if fact["kind"] == kind]
        for what, text in in_common(group).items():
            lines.append(f"| {kind}: {what} | {text} |")
    return "\n".join(lines)


# ---- the pictures


def with_zero_rows(report):
    """The paper's own test of a circuit: tokens without a path attend to nothing."""
    return report.get("fills", {}).get("zero", {}).get("mse")


CLEANING = {  # the title of a panel, and what it shows of a certificate
    "paths that the model uses": lambda report: report.get("candidates"),
    "paths of its circuit": lambda report: report.get("paths"),
    "layers with paths": lambda report: report.get("layers_with_paths"),
    "MSE, tokens without a path held at zero": with_zero_rows,
}


def draw_cleaning(every, file):
    """What weight decay leaves of the paths and layers that a model uses: against its e-folds, a
    mark per run that ablate.py has looked at, hollow where no literal circuit was found; a line
    through the marks of one run at several checkpoints."""
    kinds = sorted({fact["kind"] for fact in every})
    runs_of = {kind: set() for kind in kinds}  # those with a mark
    figure, panels = plt.subplots(2, 2, figsize=(10, 7), sharex=True, layout="constrained")
    for axes, (title, read) in zip(panels.flat, CLEANING.items(), strict=True):
        lines, there = {}, []
        for fact in every:
            x, y = fact["decay"], read(fact["report"])
            if y is not None and x:  # a log scale has no place for no decay
                color = f"C{kinds.index(fact['kind'])}"
                face = color if fact["literal"] else "none"
                spot = f"{x:.2g}", round(y, 3)
                beside = x * 1.07 ** there.count(spot)  # where others would hide it
                there.append(spot)
                axes.plot(beside, y, "o", mec=color, mfc=face, ms=6, alpha=0.8)
                lines.setdefault((str(fact["flags"]), color), []).append((x, y))
                runs_of[fact["kind"]].add(str(fact["flags"]))
        for (_, color), points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), color=color, lw=0.8, zorder=0)
        axes.set(xscale="log", ylabel=title, ylim=(0, 1.1 * axes.get_ylim()[1]))
        if read is with_zero_rows:
            axes.axhline(0.05, color="k", ls="--", lw=0.8, zorder=0)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(lw=0.3)

    # what the marks mean, with how many runs
    for number, kind in enumerate(kinds):
        label = f"{kind} (n = {len(runs_of[kind])})"
        panels[0, 0].plot([], [], "o", color=f"C{number}", label=label)
    panels[0, 0].plot([], [], "ko", mfc="none", label="no literal circuit")
    panels[0, 0].plot([], [], "k", lw=0.8, label="one run, at several checkpoints")
    panels[0, 0].plot([], [], "k--", lw=0.8, label="0.05, what a circuit stays below")
    for axes in panels[1]:
        axes.set_xlabel("e-folds of weight decay (rate x decay, summed over the steps)")
    figure.suptitle("What weight decay leaves of a solved model")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    runs.save_figure(figure, file)


def draw_order(every, file):
    """When each run learned each symbol and formed its induction head (Sections 7.2 and 9)."""
    # a list per kind of mark: its step in each run, or None
    marks, symbols = {}, sorted({int(name[2:]) for fact in every for name in fact["learned"]})
    for k in symbols:
        steps = [fact["learned"].get(f"x_{k}") for fact in every]
        marks[f"$x_{{{k}}}$ below 0.5"] = steps, "o", runs.symbol_color(k, symbols[-1])
    upper, lower = induction_names(every[0]["task"])
    for path, name, tick, side in (
        ("lower_step", lower, TICKUP, "up"),
        ("upper_step", upper, TICKDOWN, "down"),
    ):
        arrow = name.replace("->", "\N{RIGHTWARDS ARROW}")
        steps = [fact.get(path) for fact in every]
        marks[f"{arrow} attention above 0.5 (tick {side})"] = steps, tick, USEFUL

    # the runs from top to bottom
    figure, axes = plt.subplots(figsize=(10, 1.8 + 0.22 * len(every)), layout="constrained")
    for label, (steps, marker, color) in marks.items():
        lines = [line for line, step in enumerate(steps) if step is not None]
        if lines:
            label = f"{label} (n = {len(lines)})"
            known = [steps[line] for line in lines]
            axes.scatter(known, lines, s=25, marker=marker, color=color, label=label)
    names = [fact["run"] for fact in every]
    shared = os.path.commonprefix(names).rfind("_") + 1
    axes.set_yticks(range(len(every)), [name[shared:] for name in names], fontsize=8)
    axes.set(xlabel="training step", ylim=(len(every) - 0.5, -0.5))
    axes.set_title("When each run learned what")
    axes.grid(axis="y", lw=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    runs.save_figure(figure, file)


# ---- the command line


def main():
    p = command_line("compare.py", __doc__)
    p.add_argument("run", type=pathlib.Path, nargs="+", help="run directories of train.py")
    folders = p.parse_args().run
    matplotlib.use("Agg")
    try:
        every, file = [facts(folder) for folder in folders], folders[0].parent / "order.png"
        print(tables(every))
        if any(step is not None for fact in every for step in fact["learned"].values()):
            draw_order(every, file)
            print(file)
        looked_at = [fact["decay"] for fact in every if fact["report"] and fact["decay"]]
        if looked_at and max(looked_at) > 2 * min(looked_at):
            file = file.with_name("cleaning.png")
            draw_cleaning(every, file)
            print(file)
    except (OSError, ValueError) as error:
        p.error(error)


if __name__ == "__main__":
    main()
