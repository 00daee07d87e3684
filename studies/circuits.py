"""The certificates of ablate.py in many runs: which hold, and which question fails.

    python -m studies.circuits results/[ABCD] results/runs/rope/*

Runs without a circuit.json are left out.
"""

from parts import config
from parts.circuit import read_report
from parts.theory import least_layers

import torch

from studies import by_kind, command, kind_of, markdown, name_of, share


def facts(folders):
    """[dict, ...] of the runs that have a circuit.json: its report, and what kind of run it is."""
    found = []
    for folder in folders:
        if report := read_report(folder):
            flags = config.read_flags(folder)
            if "paths" in report:
                report |= derived(report, flags)
            found.append(dict(run=folder, flags=flags, kind=kind_of(flags), report=report))
    return found


def derived(report, flags):
    """What follows from a report, a dict."""
    learned = torch.tensor(report["intact"]["partial"]) < flags.problem.lost
    ends = [row["source"] + row["target"] for row in report["paths"]]
    mechanisms = [row["mechanism"] for row in report["heads"]]
    return least_possible(flags.problem, flags.causal, learned) | dict(
        relays=sum("+" in names or "-" in names for names in ends),
        heads_by_position=mechanisms.count("position"),
    )


def least_possible(task, causal, learned):
    """The fewest paths and layers of a circuit that reaches the learned symbols, (symbols-1,) bool,
    a dict: every role must be reached in the blocks that supply one of them."""
    supplies, own = {}, [role for role in task.roles[1:] if role.symbol >= 0]
    for role in own:
        supplies[role.block] = max(role.symbol, supplies.get(role.block, 0))
    needed = [role for role in own if learned[supplies[role.block] - 1]]
    layers = torch.tensor(least_layers(task, causal))[learned].tolist()
    return dict(least_paths=len(needed), least_layers=max(layers, default=0))


def carried_share(report):
    """Of the paths the smallest share that the targets bring: what replacing their values costs, of
    that and of replacing all others."""
    costs = [(row["carried"]["mse"], max(0, row["others"]["mse"])) for row in report["paths"]]
    return min(ours / (ours + others) for ours, others in costs)


COLUMNS = {  # what is told of a circuit that was found
    "paths/least in layers/least": lambda found: (
        "{n}/{least_paths} in {layers_with_paths}/{least_layers}".format(
            n=len(found["paths"]), **found
        )
    ),
    "relays": lambda found: found["relays"],
    "rows without a path": lambda found: found["fill"],
    "heads by position (literal: 0)": lambda found: found["heads_by_position"],
    "held (MSE)": lambda found: f"{found['sufficient']['mse']:.3f}",
    "other heads cost": lambda found: f"{found['complete']['together']['mse']:.3f}",
    "least carried": lambda found: f"{carried_share(found):.2f}",
    "least needed": lambda found: f"{min(row['everywhere']['mse'] for row in found['paths']):.3f}",
}
PAPERS = {  # the paper's own test of it
    "held, zero rows (below 0.05)": lambda test: f"{test['held']['mse']:.3f}",
    "first useful head uniform (0.05 to 0.1)": lambda test: f"{test['first_uniform']['mse']:.3f}",
    "removals, lowest (0.17)": lambda test: (
        f"{min(test['removed']):.3f}" if test["removed"] else ""
    ),
    "at 0.05 or more": lambda test: f"{test['at_threshold']} of {len(test['removed'])}",
    "at 0.17 or more": lambda test: f"{test['at_papers_least']} of {len(test['removed'])}",
}


def certificates(folders, *columns):
    """A row per run: the verdict and what was measured, of COLUMNS these or all."""
    rows, columns = [], columns or COLUMNS
    for fact in facts(folders):
        report = fact["report"]
        told = [COLUMNS[name](report) if "paths" in report else "" for name in columns]
        rows.append([name_of(fact["run"]), report["verdict"].partition(";")[0], *told])
    return markdown(["run", "verdict", *columns], *rows)


def papers_test(folders):
    """A row per run with a circuit: steps 5 and 6 of Appendix E."""
    rows = []
    for fact in facts(folders):
        if "paths" in fact["report"]:
            told = [tell(fact["report"]["paper"]) for tell in PAPERS.values()]
            rows.append([name_of(fact["run"]), *told])
    return markdown(["run", *PAPERS], *rows)


def counts(folders):
    """A row per kind of run: of how many solved models the circuit is certified, and is literal."""
    rows, every = [], facts(folders)
    solved = [one for one in every if not one["report"]["verdict"].startswith("not searched")]
    for kind, group in by_kind(solved).items():
        certified = [fact["report"]["certified"] for fact in group]
        literal = [fact["report"]["certified"] and fact["report"]["literal"] for fact in group]
        rows.append([kind, share(certified), share(literal)])
    return markdown(["kind", "certified", "and literal"], *rows)


def tables(folders):
    return "\n\n".join(table(folders) for table in (certificates, papers_test, counts))


def main():
    command(__file__, __doc__, tables)


if __name__ == "__main__":
    main()
