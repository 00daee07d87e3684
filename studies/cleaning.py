"""What weight decay removes from a circuit: the paper's own test against the e-folds of decay.

    python -m studies.cleaning results/runs/cleaning/*_s? results/runs/literal/no_aid_s?

The test freezes all attention to the circuit, where tokens without a path attend to nothing. Its
loss is read from circuit.json or, of runs whose weights are gone, from zero_rows.jsonl, rows of
{step, paths, mse}.
"""

import statistics

from parts import config
from parts.circuit import read_report

from studies import command, config_of, group_by_config, markdown, name_of, steps_text
from train import schedule


PASSED = 0.05  # the paper: a circuit stays below


def e_folds(flags, steps):
    """Return the e-folds of weight decay in so many steps: a weight that nothing needs shrinks by
    exp(-e-folds)."""
    return flags.weight_decay * sum(flags.lr * schedule(step, flags) for step in range(steps))


def load_row(folder):
    """Return what is compared of a run, a dict; test: the loss of its last test, or None."""
    flags, last = config.read_flags(folder), config.read_log(folder)[-1]
    report, file = read_report(folder), folder / "zero_rows.jsonl"
    test = config.read_json(file, lines=True)[-1]["mse"] if file.exists() else None
    return dict(
        flags=flags,
        config=config_of(flags),
        setting=f"{flags.optimizer}, --rotary {flags.rotary}, width {flags.width}",
        e_folds=e_folds(flags, last["step"]),
        solved=all(last[name] < flags.problem.learned for name in flags.target_names),
        mse=last.get("confirmed", last["val"]),
        test=report["paper"]["held"]["mse"] if "paper" in report else test,
    )


def lowest_to_highest(values):
    """Return "0.005 to 0.029"."""
    ends = sorted({f"{min(values):.3f}", f"{max(values):.3f}"}) if values else []
    return " to ".join(ends)


def folds_table(folders):
    """Return a row per config: how many runs learn, and how many circuits pass the test."""
    lines, groups = [], group_by_config(map(load_row, folders))
    for group in sorted(groups.values(), key=lambda rows: (rows[0]["setting"], rows[0]["e_folds"])):
        solved = [row["mse"] for row in group if row["solved"]]
        tests = [row["test"] for row in group if row["test"] is not None]
        passed = f"{sum(loss < PASSED for loss in tests)} of {len(tests)}" if tests else ""
        folds = f"{statistics.median(row['e_folds'] for row in group):.2g}"
        line = [group[0]["setting"], folds, f"{len(solved)} of {len(group)}"]
        lines.append([*line, lowest_to_highest(solved), passed, lowest_to_highest(tests)])
    heads = "setting", "e-folds", "learn all", "their MSE", "pass the test", "its MSE"
    return markdown(heads, *lines)


def stability_table(folders):
    """Return a row per run: when it learned, how often it was solved, how often it lost that."""
    lines = []
    for folder in folders:
        flags, log = config.read_flags(folder), config.read_log(folder)
        learned = [*config.crossings(log, flags).values()]
        solved = sum(row["val"] < 0.01 for row in log)
        line = [name_of(folder), log[-1]["step"], steps_text(learned), f"{solved} of {len(log)}"]
        if None in learned:
            line += ["", ""]
        else:
            later = [row["val"] for row in log if row["step"] > max(learned)]
            lost = sum(a < 0.5 <= b for a, b in zip(later, later[1:], strict=False))
            line += [lost, f"{max(later):.2f}"]
        lines.append([*line, f"{log[-1]['val']:.3f}"])
    heads = "run", "steps", "learned at step", "evaluations below 0.01"
    return markdown([*heads, "times lost", "highest since learned", "at the end"], *lines)


def tables(folders):
    return f"{folds_table(folders)}\n\n{stability_table(folders)}"


if __name__ == "__main__":
    command(__file__, __doc__, tables)
