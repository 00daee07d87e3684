"""The circuits that ablate.py found in many runs: which are validated, and what the report says.

    python -m extras.studies.circuits results/[ABCD] results/runs/rope/*

Runs without a circuit.json are left out. Of runs whose weights are there and whose circuit is not
faithful, free_heads.jsonl tells which head would have to read more, and where.
"""

import torch

import train
from ablate import PatchedModel, by_head, paths_in, read_report
from data import held_out
from extras.studies import command, config_of, group_by_config, markdown, name_of, share
from extras.studies.theory import least_layers


def load_reports(folders):
    """Return [dict, ...], a row for each run that has a circuit.json."""
    rows = []
    for run in folders:
        if report := read_report(run):
            flags = train.read_flags(run)
            rows.append(dict(run=run, flags=flags, config=config_of(flags), report=report))
    return rows


def searched(row):
    """Return whether the model was solved, so that a circuit was looked for."""
    return bool(row["report"]["paths"])


def worst_symbol(losses):
    """Return "x_2 0.034 [0.032, 0.036]" from {symbol: [mean, low, high]}."""
    name = max(losses, key=lambda name: losses[name][0])
    return "{} {:.3f} [{:.3f}, {:.3f}]".format(name, *losses[name])


def size(row):
    """Return "9/6 in 5/3": the paths and layers of a circuit, each with the fewest possible."""
    task, paths = row["flags"].problem, row["report"]["paths"]
    roles = sum(role.symbol >= 0 for role in task.roles[1:])  # each must be reached by a path
    layers = max(least_layers(task, row["flags"].causal))
    return f"{len(paths)}/{roles} in {len({path['layer'] for path in paths})}/{layers}"


def intermediate(row):
    """Return the number of paths that begin or end at an intermediate token."""
    names = [path["reader"] + path["read"] for path in row["report"]["paths"]]
    return sum("+" in name or "-" in name for name in names)


def stand_ins(row):
    return sum(path["stand_in"] is not None for path in row["report"]["paths"])


def least_necessary(row):
    """Return the least that the full model loses of a symbol if a path is ablated."""
    paths = row["report"]["paths"]
    return f"{min(max(path['necessary'].values())[0] for path in paths):.3f}"


def difference(row):
    return "{mean:.2f} (at most {largest:.2f})".format(**row["report"]["complete"])


COLUMNS = {
    "paths/least in layers/least": size,
    "by intermediate tokens": intermediate,
    "full model, worst symbol": lambda row: worst_symbol(row["report"]["full_model"]),
    "circuit, worst symbol": lambda row: worst_symbol(row["report"]["faithful"]),
    "stand-ins": stand_ins,
    "least necessary": least_necessary,
    "other sets faithful": lambda row: "{faithful} of {subsets}".format(**row["report"]["null"]),
    "differs without two paths by": difference,
    "found from five other samples": lambda row: row["report"]["stability"]["always"],
    "own token needed in": lambda row: " ".join(row["report"]["itself"]) or "none",
}


def circuits_table(folders, *columns):
    """Return a row per run: the verdict, and these or all of COLUMNS."""
    lines, columns = [], columns or COLUMNS
    for row in load_reports(folders):
        cells = [COLUMNS[name](row) if searched(row) else "" for name in columns]
        lines.append([name_of(row["run"]), row["report"]["verdict"], *cells])
    return markdown(["run", "verdict", *columns], *lines)


def papers_table(folders):
    """Return a row per run: steps 5 and 6 of Appendix E."""
    lines = []
    for row in filter(searched, load_reports(folders)):
        test = row["report"]["paper"]
        removed = [f"{loss:.2f}" for loss in test["removed"]]
        ends = " to ".join(dict.fromkeys([*removed[:1], *removed[-1:]]))
        high = f"{sum(loss >= 0.17 for loss in test['removed'])} of {len(removed)}"
        cells = f"{test['held']:.3f}", f"{test['first_uniform']:.3f}", ends, high, test["passed"]
        lines.append([name_of(row["run"]), *cells])
    first = "first useful head uniform (paper: 0.05 to 0.1)"
    head = "hard attention (paper: below 0.05)", first, "after a removal (paper: 0.17 to 0.89)"
    return markdown(["run", *head, "0.17 or more", "passed"], *lines)


def counts_table(folders):
    """Return a row per config: how many of the solved models have a validated circuit."""
    lines = []
    for name, group in group_by_config(filter(searched, load_reports(folders))).items():
        validated = share([row["report"]["validated"] for row in group])
        paths = sorted(len(row["report"]["paths"]) for row in group)
        lines.append([name, validated, " ".join(map(str, paths))])
    return markdown(["config", "validated", "paths"], *lines)


def free_heads(run, n=256):
    """Return the highest loss of a symbol in the circuit of a run, and {head: the same if that head
    reads all that it reads in the full model}, on n sequences. For the best of these heads, also
    the loss if it does so at the queries alone, and how much each query attends to other queries
    there."""
    model, flags = train.load(run)
    paths = by_head(paths_in(read_report(run), flags.problem))
    patched = PatchedModel(model, flags, train.sequences(flags, held_out("validate", n)))
    ablated = {head: patched.ablate(head, paths.get(head, ())) for head in patched.heads}

    def worst(changed):
        return patched.losses(ablated | changed).mean(0).max().item()

    losses = {head: worst({head: torch.matmul}) for head in patched.heads}
    best = min(losses, key=losses.get)

    def at_queries(pattern, values):
        earlier = ablated[best](pattern, values)[:, : -flags.N]
        return torch.cat([earlier, pattern[:, -flags.N :] @ values], 1)

    among = patched.attention()[best][:, -flags.N :, -flags.N :]  # the queries are the last tokens
    return dict(
        run=name_of(run),
        sequences=n,
        circuit=worst({}),
        free={"L{}H{}".format(*head): loss for head, loss in losses.items()},
        at_queries=worst({best: at_queries}),
        other_queries=(among.sum() - among.diagonal(dim1=1, dim2=2).sum()).item() / (n * flags.N),
    )


def draw(folders, out):
    """Write free_heads.jsonl."""
    rows = []
    for row in load_reports(folders):
        if "not faithful" in row["report"]["verdict"] and (row["run"] / "model.pt").exists():
            rows.append(free_heads(row["run"]))
    train.write_rows(out / "free_heads.jsonl", rows)
    return out / "free_heads.jsonl"


def tables(folders):
    """Return all tables as text."""
    return "\n\n".join(table(folders) for table in (circuits_table, papers_table, counts_table))


if __name__ == "__main__":
    command(__file__, __doc__, tables, draw)
