"""What grows first, the reads of an induction head or the knowledge of x_1 (Section 9.1)? And does
x_1 wait for a read that was kept from growing?

    python -m extras.studies.onset out/main/s* out/late/* --out results/figures

The first runs were trained with --save-every 2, the other ones by late.py. In the checkpoints up to
the step at which x_1 is learned, on held-out sequences: by how much more a reader attends to its
own chain than to the mean of the others, in each head and for each kind of read; and by how much
nearer the prediction of x_1 is to the own x_1. A model that does not tell chains apart has 0. The
onset of either is the first step from which on it stays more than three standard errors above its
value in the untrained model.

onset.jsonl has a row for each run, which replaces the one of the same name: run, rotary, seed,
hardware, dtype, git, late (the read and the step until which it was ablated, or None), learned (the
step at which the loss of x_1 passes below 0.5), onsets {"q -> 1b": step, ..., "x_1": step} and
slots {"q -> 1b": [attention of the head that reads so most, by the slot of the own chain]}, None
without checkpoints; masked, of those of late.py that end before they are free: the loss of x_1 at
their end, as trained and with the read.
"""

import statistics

import analyze
import train
from ablate import Path, attention_on, marks_of
from data import held_out, progress
from extras import studies
from extras.studies.late import heads_without
from extras.studies.order import HEADS, kinds_of_read
from extras.studies.rows import RESULTS, committed

import torch


N_SEQUENCES = 1024
FOLDER = RESULTS / "figures"  # of the committed onset.jsonl
SHOWN = *HEADS, "3b -> 3a"  # in the table: those of an induction head, and a control
NEAR = 80  # steps before x_1 is learned from which on each checkpoint is measured, not each tenth


@torch.no_grad()
def excesses(model, flags):
    """Return {"q -> 1b": (sequences, heads), ..., "x_1": (sequences, 1)}, and the loss of x_1."""
    found, losses, task = {}, [], flags.problem
    for index in held_out("emergence", N_SEQUENCES).split(128):
        batch = train.sequences(flags, index)
        with train.precision(flags):
            predictions, patterns = model(batch.inputs, return_patterns=True)
        patterns = torch.cat([layer.float() for layer in patterns], 1).transpose(0, 1)
        for kind in kinds_of_read(flags):
            reader, read = (marks_of(end, task, batch.positions) for end in kind.split(" -> "))
            given = reader @ patterns @ read.mT  # (heads, B, N, N) from chain to chain
            found.setdefault(kind, []).append(own_above_others(given).T)

        # the error of each query's x_1 to the x_1 of each chain, (B, N, N)
        x1, targets = predictions.float()[..., : flags.K], batch.targets[..., : flags.K]
        errors = (x1[:, :, None] - targets[:, None]).square().mean(-1)
        found.setdefault("x_1", []).append(-own_above_others(errors)[:, None])
        losses.append(errors.diagonal(dim1=1, dim2=2).mean().item())
    return {kind: torch.cat(parts) for kind, parts in found.items()}, statistics.mean(losses)


def own_above_others(values):
    """Return by how much those on the diagonal of values (..., N, N) are above the others."""
    N = values.shape[-1]
    own = values.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (own - (values.sum((-2, -1)) - own) / (N - 1)) / N


@torch.no_grad()
def by_slot(model, flags, kind, head):
    """Return the mean attention along a kind of read of one head, by the slot of what is read."""
    task, batch = flags.problem, train.sequences(flags, held_out("emergence", 128))
    with train.precision(flags):
        _, patterns = model(batch.inputs, return_patterns=True)
    reader, read = kind.split(" -> ")
    path = Path(*divmod(head, flags.heads), reader, read)
    given = attention_on(patterns[path.layer][:, path.head], path, task, batch.positions)
    slots = marks_of(read, task, batch.positions).argmax(-1).argsort(1).argsort(1)
    return [round(given[slots == slot].mean().item(), 3) for slot in range(flags.N)]


def measure_onsets(folder, learned):
    """Return onsets and slots of the run in a folder, until about step `learned`."""
    steps, means, above, untrained = [], {}, {}, None
    numbered = enumerate(train.checkpoints_of(folder))
    files = [file for n, file in numbered if n % 10 == 0 or int(file.stem) > learned - NEAR]
    for file in progress(f"{folder}: checkpoint", files):
        model, flags = train.load(folder, f"ckpt/{file.name}")
        found, loss = excesses(model, flags)
        untrained = untrained or found
        steps.append(int(file.stem))
        for kind, excess in found.items():
            change = excess - untrained[kind]
            error = change.std(0) / N_SEQUENCES**0.5
            above.setdefault(kind, []).append(change.mean(0) > 3 * error)  # (heads,)
            means.setdefault(kind, []).append(excess.mean(0))
        if loss < flags.problem.learned_below:
            break

    # the first step from which on a head stays above, the earliest of all heads
    onsets, slots = {}, {}
    for kind, rows in above.items():
        stays = torch.stack(rows).flip(0).int().cummin(0).values.sum(0).max().item()
        onsets[kind] = steps[-stays] if stays else None
    for kind in HEADS:
        slots[kind] = by_slot(model, flags, kind, means[kind][-1].argmax().item())
    return dict(onsets=onsets, slots=slots)


def measure(row):
    """Return the row of onset.jsonl of a run."""
    config, learned = row["config"], row["learned"]["x_1"]
    names = "rotary", "seed", "hardware", "dtype", "git"
    run = dict(run=row["name"]) | {name: config[name] for name in names}
    run |= dict(late=config.get("late"), learned=learned, onsets=None, slots=None)
    if train.checkpoints_of(row["folder"]):
        run |= measure_onsets(row["folder"], learned)
    if run["late"] and row["steps"] < run["late"][1]:
        (model, flags), read = train.load(row["folder"]), run["late"][0]
        ablated = dict(intervene=lambda _, positions: heads_without(read, flags, positions))
        without = train.evaluate(model, flags, "emergence", N_SEQUENCES, **ablated)
        as_ever = train.evaluate(model, flags, "emergence", N_SEQUENCES)
        run |= dict(masked=[round(losses[0], 4) for losses in (without, as_ever)])
    return run


# ---- the tables and the figure


def load_onsets(rotary="input", folder=FOLDER):
    """Return the rows of the onset.jsonl in a folder, by seed."""
    rows = train.read_file(folder / "onset.jsonl")
    return sorted((row for row in rows if row["rotary"] == rotary), key=lambda row: row["seed"])


def with_onsets(rotary="input", folder=FOLDER):
    return [row for row in load_onsets(rotary, folder) if row["onsets"]]


def onset_table(folder=FOLDER):
    """Return a row per kind of read in SHOWN: its onset, and by how much x_1 comes later."""
    lines = []
    for title, rotary in ("main command", "input"), ("RoPE", "qk"):
        rows = with_onsets(rotary, folder)
        for kind in (*SHOWN, "x_1"):
            found = [row["onsets"] for row in rows if row["onsets"][kind] is not None]
            line = [title, kind, studies.spread([onsets[kind] for onsets in found])]
            leads = [onsets["x_1"] - onsets[kind] for onsets in found]
            never = len(rows) - len(found)
            before = f"{sum(lead > 0 for lead in leads)} of {len(rows)}"
            before += f" ({never} never)" * bool(never)
            lines.append([*line, "", ""] if kind == "x_1" else [*line, before, signed(leads)])
    head = "runs", "", "onset (step)", "before x_1", "by (steps)"
    return studies.markdown(head, *lines)


def signed(steps):
    """Return "+39 (-3 to +112)", the median and the range."""
    return f"{round(statistics.median(steps)):+} ({min(steps):+.0f} to {max(steps):+.0f})"


def slots_table():
    """Return the attention to the own 1b by its slot, of the head that reads so most."""
    lines = []
    for title, rotary in ("main command", "input"), ("RoPE", "qk"):
        rows = with_onsets(rotary)
        slots = zip(*(row["slots"]["q -> 1b"] for row in rows), strict=True)
        spreads = [studies.spread(values, "{:.2f}") for values in slots]
        lines.append([f"{title} (n = {len(rows)})", *spreads])
    head = "the own 1b stands", "first", "second", "third", "last"
    return studies.markdown(head, *lines)


def plain_steps(folder=FOLDER):
    """Return {seed: [step, ...]}, at which x_1 is learned in all plain runs of the main command."""
    found = {}
    for row in load_onsets(folder=folder):
        if not row["late"]:
            found.setdefault(row["seed"], []).append(row["learned"])
    for row in committed("default/*", "onset/*"):
        found.setdefault(row["flags"].seed, []).append(row["learned"]["x_1"])
    return found


def repeats():
    """Return by how many steps repeats of one seed differ at most, and how many seeds have any."""
    apart = [max(steps) - min(steps) for steps in plain_steps().values() if len(steps) > 1]
    return max(apart), len(apart)


def late_rows(folder=FOLDER):
    """Return {("1b -> 1a", 200): [row, ...], ...} of the runs with a read ablated until a step; in
    each `later`, by how many steps x_1 is later than in the median plain run of the seed."""
    ever, found = plain_steps(folder), {}
    for row in load_onsets(folder=folder):
        if row["late"]:
            row["later"] = row["learned"] - statistics.median(ever[row["seed"]])
            found.setdefault(tuple(row["late"]), []).append(row)
    return dict(sorted(found.items()))


def late_table():
    """Return a row per ablation: what it does, beside repeats."""
    widest, lines = repeats()[0], []
    for (read, until), rows in late_rows().items():
        later = [row["later"] for row in rows]
        beyond = f"{sum(steps > widest for steps in later)} of {len(rows)}"
        before = f"{sum(row['learned'] <= until for row in rows)} of {len(rows)}"
        lines.append((read, until, signed(later), beyond, before))
    head = "ablated in all heads", "until step", "x_1 later by (steps)"
    return studies.markdown((*head, "by more than repeats differ", "before it is free"), *lines)


def late_claim():
    """Return how far repeats are apart, and what else a reader of the table must know."""
    widest, seeds = repeats()
    begins = {row["seed"]: row["onsets"][HEADS[1]] for row in with_onsets()}
    after, masked = [], []
    for (read, until), rows in late_rows().items():
        masked += [row["masked"] for row in rows if "masked" in row]
        if read == HEADS[1]:
            after += [row for row in rows if begins.get(row["seed"], 0) > until]
    after_seeds, steps = {row["seed"] for row in after}, [row["later"] for row in after]
    masked, as_ever = zip(*masked, strict=True)
    return f"""\
Repeats of a plain run learn x_1 at most {widest:.0f} steps apart ({seeds} seeds). In {len(after)}
runs without 1b -> 1a ({len(after_seeds)} seeds) the read begins only after the ablation in the
plain run, and x_1 is later by {signed(steps)}. The ablation gives something away: a reader that
cannot see one of four tokens may tell which one is missing. In those without q -> 1b that ended
before it is free (n = {len(masked)}), x_1 costs {studies.span(masked)}, and with it
{studies.span(as_ever)}."""


def draw_onsets(folder):
    """Draw the onset.jsonl in a folder, into it: the onsets of each seed; and by how much later x_1
    is learned if a read is ablated at the start."""
    rows, found = with_onsets(folder=folder), late_rows(folder)
    figure, (left, right) = analyze.panels(2, 2, 5, 3.4)
    marks = dict.fromkeys(HEADS) | {"x_1": "the knowledge of $x_1$"}
    for (kind, name), color in zip(marks.items(), ("tab:red", "tab:blue", "black"), strict=True):
        points = [(row["onsets"][kind], row["seed"]) for row in rows if row["onsets"][kind]]
        left.plot(*zip(*points, strict=True), "o", color=color, alpha=0.7, label=name or kind)
    seeds, learned = zip(*((row["seed"], row["learned"]) for row in rows), strict=True)
    left.plot(learned, seeds, "k|", ms=11, label="$x_1$ below 0.5")
    near = [step - NEAR for step in learned]
    label = "a checkpoint every 2 steps, before it every 20"
    left.hlines(seeds, near, learned, color="0.8", lw=5, zorder=0, label=label)
    left.set(xlabel="training step", ylabel="seed", yticks=seeds)
    left.set_title(f"onsets, main command (n = {len(rows)} runs)", fontsize="medium")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize="small")

    # right: a line per ablation, and what repeats of one seed differ by
    widest, seeds = repeats()
    label = f"apart at most: repeats of one seed (n = {seeds} seeds)"
    right.axvspan(-widest, widest, color="0.9", label=label)
    for place, group in enumerate(found.values()):
        right.plot([row["later"] for row in group], [place] * len(group), "o", alpha=0.7)
    names = [f"{read} until {until} (n = {len(found[read, until])})" for read, until in found]
    right.set(yticks=range(len(found)), ylim=(-0.7, len(found) - 0.3))
    right.set_xlabel("$x_1$ learned later by (training steps)")
    right.set_yticklabels(names, fontsize="small")
    right.axvline(0, color="gray", lw=0.8)
    right.set_title("one read ablated in all heads at the start", fontsize="medium")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize="small")
    analyze.save_figure(figure, folder / "onset.png")


def draw(rows, out):
    """Measure run directories into onset.jsonl, and draw it; return its tables as text."""
    file = out / "onset.jsonl"
    measured = studies.rows_by(file, "run")
    measured |= {row["name"]: measure(row) for row in rows if row["folder"]}
    train.write_file(file, [*measured.values()])
    draw_onsets(out)
    return f"{onset_table(out)}\n\n{out / 'onset.png'}"


if __name__ == "__main__":
    studies.command(__file__, __doc__, lambda rows: f"{len(rows)} runs", draw)
