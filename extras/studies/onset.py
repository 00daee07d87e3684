"""What grows first, the reads of an induction head or the knowledge of x_1 (Section 9.1)? And does
x_1 wait for a read that was kept from growing?

    python -m extras.studies.onset out/main/s* out/late/* --out results/figures

The first runs were trained with --save-every 2. In their checkpoints up to the step at which x_1 is
learned, on held-out sequences: by how much more a reader attends to its own chain than to the mean
of the others, in each head and for each kind of read; and by how much the prediction of x_1 is
nearer to the x_1 of its own chain than to the mean of the others'. A model that does not tell
chains apart has 0. The onset of either is the first step from which on it stays more than three
standard errors above its value in the untrained model. The other runs are those of late.py.

onset.jsonl has a row for each run: run, rotary, seed, late (the read and the step until which it
was ablated, or None), learned (the step at which the loss of x_1 passes below 0.5), onsets {"q ->
1b": step, ..., "x_1": step} and slots {"q -> 1b": [attention to the own chain by its slot, when x_1
is learned, of the head that reads so most]}, None for those of late.py.
"""

import statistics

import analyze
import train
from ablate import Path, attention_on, tokens_of
from data import held_out, progress
from extras import studies
from extras.studies.order import HEADS, kinds_of_read
from extras.studies.rows import RESULTS

import matplotlib.pyplot as plt
import torch


N_SEQUENCES = 1024
FOLDER = RESULTS / "figures"  # of the committed onset.jsonl
NEAR = 80  # steps before x_1 is learned from which on each checkpoint is measured, not each tenth


# ---- measurements


@torch.no_grad()
def excesses(model, flags):
    """Return {"q -> 1b": (sequences, heads), ..., "x_1": (sequences, 1)} of a model, and the mean
    loss of x_1."""
    found, losses, task = {}, [], flags.problem
    for index in held_out("emergence", N_SEQUENCES).split(128):
        batch = train.sequences(flags, index)
        with train.precision(flags):
            predictions, patterns = model(batch.inputs, return_patterns=True)
        patterns = torch.cat([layer.float() for layer in patterns], 1).transpose(0, 1)
        for kind in kinds_of_read(flags):
            reader, read = kind.split(" -> ")
            star = Path(0, 0, reader, read + "*")
            given = attention_on(patterns, star, task, batch.positions)  # (heads, B, N, N)
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
    given = attention_on(patterns[path.layer][:, path.head], path, task, batch.positions)[..., 0]
    slots = tokens_of(read, task, batch.positions)[0].argsort(1).argsort(1)
    return [round(given[slots == slot].mean().item(), 3) for slot in range(flags.N)]


def measure_onsets(folder, learned):
    """Return onsets and slots of the run in a folder, until about step `learned`."""
    steps, means, above, untrained = [], {}, {}, None
    files = [
        file
        for number, file in enumerate(train.checkpoints_of(folder))
        if number % 10 == 0 or int(file.stem) > learned - NEAR
    ]
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
    flags, late, learned = row["flags"], row["config"].get("late"), row["learned"]["x_1"]
    run = dict(run=row["name"], rotary=flags.rotary, seed=flags.seed, late=late, learned=learned)
    none = dict(onsets=None, slots=None)
    return run | (none if late else measure_onsets(row["folder"], learned))


# ---- the table, the sentence, the figure


def load_onsets(rotary="input", folder=FOLDER):
    """Return ([rows with onsets], [rows of late.py]) of the onset.jsonl in a folder."""
    rows = train.read_file(folder / "onset.jsonl")
    rows = sorted((row for row in rows if row["rotary"] == rotary), key=lambda row: row["seed"])
    return [row for row in rows if row["onsets"]], [row for row in rows if row["late"]]


def onset_table(folder=FOLDER):
    """Return a row per kind of read that begins in more than half of the runs, of RoPE only those
    of an induction head: its onset, and in how many runs it comes before, with and after x_1."""
    lines = []
    for title, rotary in ("main", "input"), ("RoPE", "qk"):
        rows, begun = load_onsets(rotary, folder)[0], {}
        kinds = rows[0]["onsets"] if rows else []
        onsets = {kind: [row["onsets"][kind] for row in rows] for kind in kinds}
        for kind, steps in onsets.items():
            found = [step for step in steps if step is not None]
            shown = rotary == "input" or kind in (*HEADS, "x_1")
            if shown and 2 * len(found) > len(rows):
                begun[kind] = found
        for kind in sorted(begun, key=lambda kind: statistics.median(begun[kind])):
            pairs = zip(onsets[kind], onsets["x_1"], strict=True)
            signs = [(a > b) - (a < b) for a, b in pairs if a is not None]
            counts = "/".join(str(signs.count(sign)) for sign in (-1, 0, 1))
            counts = counts if kind != "x_1" else ""
            lines.append((title, kind, studies.spread(begun[kind]), counts))
    return studies.markdown(("runs", "", "onset (step)", "before/with/after x_1"), *lines)


def leads():
    """Return the sentence on how long before x_1 the reads of an induction head begin."""
    rows, texts = load_onsets()[0], []
    for kind in HEADS:
        before = [row["onsets"]["x_1"] - row["onsets"][kind] for row in rows if row["onsets"][kind]]
        count = sum(lead > 0 for lead in before)
        texts.append(f"{kind} in {count} of {len(rows)}, by {studies.spread(before)} steps")
    by_slot = zip(*(row["slots"]["q -> 1b"] for row in rows), strict=True)
    slots = [studies.spread(values, "{:.2f}") for values in by_slot]
    return f"""\
Of the main command, these begin before the knowledge of x_1: {"; ".join(texts)}
(median and range). When x_1 is learned the head with most of q -> 1b gives it, by its slot,
{", ".join(slots)} of the attention."""


def late_table(folder=FOLDER):
    """Return a row per read that was ablated until a step: by how much later x_1 is learned, of the
    seeds that were also trained as ever."""
    plain, late = load_onsets(folder=folder)
    ever, lines = {row["seed"]: row["learned"] for row in plain}, []
    for read, until in dict.fromkeys(tuple(row["late"]) for row in late):
        rows = [row for row in late if row["late"] == [read, until] and row["seed"] in ever]
        later = [row["learned"] - ever[row["seed"]] for row in rows]
        count = f"{sum(steps > 0 for steps in later)} of {len(later)}"
        lines.append((f"{read} until step {until}", studies.spread(later, "{:+.0f}"), count))
    return studies.markdown(["without", "x_1 later by (steps)", "later"], *lines)


def draw_onsets(folder):
    """Draw, a line per seed, the onset of each read of an induction head and of x_1, and when x_1
    is learned with a read ablated until a step, of the onset.jsonl in a folder, into it."""
    plain, late = load_onsets(folder=folder)
    size = dict(figsize=(9, 4.6), layout="constrained", sharex=True, sharey=True)
    figure, (left, right) = plt.subplots(1, 2, **size)
    marks = dict.fromkeys(HEADS) | {"x_1": "the knowledge of $x_1$"}
    for (kind, name), color in zip(marks.items(), ("tab:red", "tab:blue", "black"), strict=True):
        points = [(row["onsets"][kind], row["seed"]) for row in plain if row["onsets"][kind]]
        left.plot(*zip(*points, strict=True), "o", color=color, alpha=0.7, label=name or kind)
    for panel, label in (left, "$x_1$ below 0.5"), (right, None):
        learned = [row["learned"] for row in plain]
        panel.plot(learned, [row["seed"] for row in plain], "k|", ms=11, label=label)
        panel.set(xlabel="training step", yticks=[row["seed"] for row in plain])
    left.set(ylabel="seed")
    left.set_title(f"onsets (n = {len(plain)})", fontsize="medium")

    for read, mark in zip(dict.fromkeys(row["late"][0] for row in late), "so^v", strict=False):
        rows = [row for row in late if row["late"][0] == read]
        label = f"the same, without {read} until the dotted line (n = {len(rows)})"
        points = zip(*((row["learned"], row["seed"]) for row in rows), strict=True)
        right.plot(*points, mark, label=label)
    right.axvline(late[0]["late"][1], color="gray", ls=":")
    right.set_title("learned without a read at the start", fontsize="medium")
    entries = [panel.get_legend_handles_labels() for panel in (left, right)]
    below = dict(loc="outside lower center", ncols=3, fontsize="small")
    figure.legend(*(sum(parts, []) for parts in zip(*entries, strict=True)), **below)
    analyze.save_figure(figure, folder / "onset.png")


def draw(rows, out):
    """Measure runs with checkpoints, and those of late.py, into onset.jsonl, and draw it; return
    its tables as text."""
    if measured := [measure(row) for row in rows if row["folder"]]:
        train.write_file(out / "onset.jsonl", measured)
    draw_onsets(out)
    return f"{onset_table(out)}\n\n{late_table(out)}\n\n{out / 'onset.png'}"


if __name__ == "__main__":
    studies.command(__file__, __doc__, lambda rows: f"{len(rows)} runs", draw)
