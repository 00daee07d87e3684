"""The paper's literal settings, and what weight decay leaves.

    python -m extras.studies.literal results/runs/literal.jsonl    # prints, draws literal.png

The test of a circuit here is the paper's own: all attention is frozen to the circuit, where tokens
without a path attend to nothing. Its loss is that of the report or, of runs whose weights are gone,
older_test.
"""

import statistics

import analyze
from extras import studies
from extras.studies.order import ended
from extras.studies.rows import committed, group_by_settings, name_of
from train import schedule

import matplotlib.pyplot as plt


PASSED = 0.05  # the paper: a circuit stays below


def stability_table(rows=None):
    """Return a row per run: when it learned, for how long it was solved, and how it ends. Lost: how
    often its loss rises above 0.5 after all symbols were learned."""
    lines = []
    for row in rows or committed("literal/*"):
        log, learned = row["log"], [*row["learned"].values()]
        solved = [entry["val"] < 0.01 for entry in log]
        longest = max(map(len, "".join("x" if s else " " for s in solved).split()), default=0)
        lost = ""
        if None not in learned:
            later = [entry["val"] for entry in log if entry["step"] > max(learned)]
            lost = sum(a < 0.5 <= b for a, b in zip(later, later[1:], strict=False))
        cells = studies.steps_text(learned), f"{sum(solved)} of {len(log)}", longest, lost
        lines.append([name_of(row), row["steps"], *cells, f"{log[-1]['val']:.3f}"])
    head = "run", "steps", "learned at step", "evaluations below 0.01", "most in a row", "lost"
    return studies.markdown([*head, "at the end"], *lines)


def claim():
    """Return how the runs with all of the literal settings end, beside the paper's."""
    rows = committed("literal/no_aid_*", "literal/D_s0")
    ends = [row["mse"] <= (0.0315 if row["name"] == "D_s0" else 0.01) for row in rows]
    learned = [row for row in rows if None not in row["learned"].values()]
    lost = sum(len(row["known"]) < len(row["learned"]) for row in learned)
    return f"""\
**{sum(ends)} of {len(ends)} runs with the literal settings end where the paper's do** (0.01; D:
0.031). {len(learned)} learn all symbols, and {lost} of these have lost some at their end."""


def e_folds(row):
    """Return the e-folds of weight decay: a weight that nothing needs shrinks by exp(-e-folds)."""
    flags = row["flags"]
    return flags.weight_decay * sum(flags.lr * schedule(n, flags) for n in range(row["steps"]))


def test_of(row):
    """Return the loss of the paper's test of a run, None if there was none."""
    return row["report"].get("paper", {}).get("held", row.get("older_test"))


def decay_table(rows=None):
    """Return a row per settings: how many runs learn all, and how many circuits pass the test."""
    names = "cleaning/*_e*", "[ABC]", "adamw/*", "last/*", "decay/*", "rope/s[0-5]", "rope_twice/*"
    lines = []
    for group in group_by_settings([*filter(ended, rows or committed(*names))]).values():
        flags, folds = group[0]["flags"], statistics.median(map(e_folds, group))
        tests = [loss for loss in map(test_of, group) if loss is not None]
        title = f"{flags.optimizer}, {flags.rotary}, width {flags.width}"
        learned = sum(len(row["known"]) == len(row["learned"]) for row in group)
        ends = f"{min(tests):.3f} to {max(tests):.3f}" if tests else ""
        passed = f"{sum(loss < PASSED for loss in tests)} of {len(tests)}" if tests else ""
        lines.append([title, folds, f"{learned} of {len(group)}", passed, ends])
    lines = [[title, f"{folds:.2g}", *cells] for title, folds, *cells in sorted(lines)]
    return studies.markdown(["settings", "e-folds", "learn all", "pass", "its MSE"], *lines)


def tables(rows):
    """Return the table of these runs, and that of weight decay of the committed ones."""
    return f"{stability_table(rows)}\n\n{decay_table()}"


def draw(rows, out):
    """Draw the validation loss of the runs that were trained to step 24,000."""
    figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    runs = [row for row in rows if row["steps"] == 24000]
    for row in runs:
        label = f"seed {row['flags'].seed}"
        steps, losses = ([entry[key] for entry in row["log"]] for key in ("step", "val"))
        axes.plot(steps, losses, lw=1, label=label)
    axes.axhline(0.01, color="gray", ls=":", lw=1, label="0.01, which A, B, C of the paper reach")
    axes.set(yscale="log", xlabel="training step", ylabel="validation MSE")
    axes.set_title(f"The literal settings, {len(runs)} seeds (1024 sequences)", fontsize=11)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    analyze.save_figure(figure, out / "literal.png")
    return out / "literal.png"


if __name__ == "__main__":
    studies.command(__file__, __doc__, tables, draw)
