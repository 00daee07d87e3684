"""What weight decay leaves of a circuit: the paper's own test against the e-folds of decay.

    python -m studies.cleaning results/runs/cleaning/*_s? results/runs/literal/no_aid_s?

The test: all heads held to the circuit, tokens without a path attend to nothing. It is read from
circuit.json or, where weights are gone and no certificate of today vouches for a circuit, from
zero_rows.jsonl, rows of {step, paths, mse}.
"""

import statistics

from parts import config
from parts.circuit import read_report

import matplotlib.pyplot as plt

from studies import by_kind, command, kind_of, markdown, name_of, steps_text
from train import schedule


SUFFICIENT = 0.05  # the paper's: what a circuit stays below


def folds_of(flags, steps):
    """e-folds of weight decay in so many steps: weights that nothing needs shrink by exp(-this)."""
    return flags.weight_decay * sum(flags.lr * schedule(step, flags) for step in range(steps))


def facts(folder):
    """What is known of a run, a dict; zero_rows: [(e-folds, loss of the test), ...] by step."""
    flags, log = config.read_flags(folder), config.read_log(folder)
    report, file = read_report(folder), folder / "zero_rows.jsonl"
    losses = {}
    if "paper" in report:
        losses[log[-1]["step"]] = report["paper"]["held"]["mse"]
    elif file.exists():
        losses = {row["step"]: row["mse"] for row in config.read_json(file, lines=True)}
    return dict(
        run=folder,
        flags=flags,
        kind=kind_of(flags),
        log=log,
        setting=f"{flags.optimizer}, --rotary {flags.rotary}, width {flags.width}",
        folds=folds_of(flags, log[-1]["step"]),
        solved=all(log[-1][name] < 0.5 for name in flags.target_names),
        mse=log[-1].get("confirmed", log[-1]["val"]),
        zero_rows=[(folds_of(flags, step), loss) for step, loss in sorted(losses.items())],
    )


# ---- tables


def between(values):
    """0.005 to 0.029: the lowest and the highest."""
    ends = sorted({f"{min(values):.3f}", f"{max(values):.3f}"}) if values else []
    return " to ".join(ends)


def folds_table(folders):
    """A row per kind: how many learn, and how their circuits do in the test."""
    rows, groups = [], by_kind([facts(folder) for folder in folders])
    for group in sorted(groups.values(), key=lambda one: (one[0]["setting"], one[0]["folds"])):
        ends = [fact["mse"] for fact in group if fact["solved"]]
        last = sorted(fact["zero_rows"][-1][1] for fact in group if fact["zero_rows"])
        passed = f"{sum(loss < SUFFICIENT for loss in last)} of {len(last)}" if last else ""
        told, end = between(last), between(ends)
        folds = f"{statistics.median(fact['folds'] for fact in group):.2g}"
        learned = f"{sum(fact['solved'] for fact in group)} of {len(group)}"
        rows.append([group[0]["setting"], folds, learned, end, passed, told])
    heads = "setting", "e-folds", "learn all", "their MSE", "pass the test", "its MSE"
    return markdown(heads, *rows)


def stability_table(folders):
    """A row per run: how often it was solved, and what became of it."""
    rows = []
    for folder in folders:
        log = config.read_log(folder)
        learned, losses = (
            config.crossings(log, config.read_flags(folder)),
            [row["val"] for row in log],
        )
        whole = None not in learned.values()
        since = max(learned.values()) if whole else log[-1]["step"]
        after = [row["val"] for row in log if row["step"] > since]
        lost = sum(a < 0.5 <= b for a, b in zip(after, after[1:], strict=False))
        solved = f"{sum(loss < 0.01 for loss in losses)} of {len(log)}"
        found = [steps_text(learned.values()), solved]
        found += [lost, f"{max(after):.2f}"] if whole else ["", ""]
        rows.append([name_of(folder), log[-1]["step"], *found, f"{losses[-1]:.3f}"])
    heads = "run", "steps", "learned at step", "evaluations below 0.01"
    return markdown([*heads, "times lost", "highest since learned", "at the end"], *rows)


# ---- the figure


def draw(folders, out):
    """cleaning.png: the test against e-folds, a mark per run, a line through one run's steps."""
    every = [fact for fact in map(facts, folders) if fact["zero_rows"] and fact["folds"]]
    if not every:
        return
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for number, setting in enumerate(sorted({fact["setting"] for fact in every})):
        group = [fact for fact in every if fact["setting"] == setting]
        style = dict(marker="os^Dv"[number % 5], color=f"C{number}", mec="white", lw=0.8, ms=8)
        for fact in group:
            axes.plot(*zip(*fact["zero_rows"], strict=True), alpha=0.8, **style)
        axes.plot([], [], label=f"{setting} ({len(group)} runs)", **style)
    axes.axhline(SUFFICIENT, color="k", ls="--", lw=0.8, label="0.05, what a circuit stays below")
    axes.set(xscale="log", yscale="log", ylabel="MSE, tokens without a path attend to nothing")
    axes.set_xlabel("e-folds of weight decay (rate x decay, summed over the steps)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title("What weight decay leaves: the paper's test (line: one run, several steps)")
    axes.grid(lw=0.3, which="both")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    config.save_figure(figure, out / "cleaning.png")
    yield out / "cleaning.png"


def tables(folders):
    return f"{folds_table(folders)}\n\n{stability_table(folders)}"


def main():
    command(__file__, __doc__, tables, draw)


if __name__ == "__main__":
    main()
