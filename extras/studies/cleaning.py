"""What weight decay removes from a circuit: the paper's own test against the e-folds of decay.

    python -m extras.studies.cleaning results/runs/cleaning/*_s? results/runs/literal/no_aid_s?

The test freezes all attention to the circuit, where tokens without a path attend to nothing. Its
loss is read from circuit.json or, of runs whose weights are gone, from zero_rows.jsonl, rows of
{step, paths, mse}.
"""

import statistics

import train
from ablate import read_report
from extras.studies import command, group_by_config, load_row, markdown, name_of, steps_text
from train import schedule


PASSED = 0.05  # the paper: a circuit stays below


def e_folds(flags, steps):
    """Return the e-folds of weight decay in so many steps: a weight that nothing needs shrinks by
    exp(-e-folds)."""
    return flags.weight_decay * sum(flags.lr * schedule(step, flags) for step in range(steps))


def load_test(row):
    """Return the loss of the last test of a run, None if there was none."""
    report, file = read_report(row["run"]), row["run"] / "zero_rows.jsonl"
    if "paper" in report:
        return report["paper"]["held"]
    return train.read_rows(file)[-1]["mse"] if file.exists() else None


def lowest_to_highest(values):
    """Return "0.005 to 0.029"."""
    ends = sorted({f"{min(values):.3f}", f"{max(values):.3f}"}) if values else []
    return " to ".join(ends)


def folds_table(folders):
    """Return a row per config: how many runs learn, and how many circuits pass the test."""
    lines = []
    for group in group_by_config(map(load_row, folders)).values():
        flags = group[0]["flags"]
        folds = statistics.median(e_folds(row["flags"], row["steps"]) for row in group)
        solved = [row["mse"] for row in group if len(row["known"]) == len(row["learned"])]
        tests = [loss for loss in map(load_test, group) if loss is not None]
        passed = f"{sum(loss < PASSED for loss in tests)} of {len(tests)}" if tests else ""
        setting = f"{flags.optimizer}, --rotary {flags.rotary}, width {flags.width}"
        line = [setting, folds, f"{len(solved)} of {len(group)}", lowest_to_highest(solved)]
        lines.append([*line, passed, lowest_to_highest(tests)])
    lines = [[setting, f"{folds:.2g}", *cells] for setting, folds, *cells in sorted(lines)]
    heads = "setting", "e-folds", "learn all", "their MSE", "pass the test", "its MSE"
    return markdown(heads, *lines)


def stability_table(folders):
    """Return a row per run: when it learned, how often it was solved, how often it lost that."""
    lines = []
    for row in map(load_row, folders):
        log, learned = row["log"], [*row["learned"].values()]
        solved = sum(entry["val"] < 0.01 for entry in log)
        line = [name_of(row["run"]), row["steps"], steps_text(learned), f"{solved} of {len(log)}"]
        if None in learned:
            line += ["", ""]
        else:
            later = [entry["val"] for entry in log if entry["step"] > max(learned)]
            lost = sum(a < 0.5 <= b for a, b in zip(later, later[1:], strict=False))
            line += [lost, f"{max(later):.2f}"]
        lines.append([*line, f"{log[-1]['val']:.3f}"])
    heads = "run", "steps", "learned at step", "evaluations below 0.01"
    return markdown([*heads, "times lost", "highest since learned", "at the end"], *lines)


def tables(folders):
    return f"{folds_table(folders)}\n\n{stability_table(folders)}"


if __name__ == "__main__":
    command(__file__, __doc__, tables)
