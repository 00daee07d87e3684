"""Places that say nothing: one step of retrieval among G distractors, symbols that no chain has.

    --task random20    # 20 distractors; the pairs stand anywhere among them, each pair whole
    --task fixed20     # the same tokens; the pairs stand at the same places in every sequence

In both the pairs of a sequence are shuffled over their places, and the queries come last. Runs are
measured by extras.studies.depth: what is left of their answers when the pairs move.
"""

import functools

import analyze
import data
import train
from data import Block, Task, UserError, held_out, random_bits

import torch


# ---- the tasks


@functools.lru_cache
def places(kind, G, N, D):
    """Return the task before its tokens are moved: the pairs, the distractors, the queries."""
    if D != 1:
        raise UserError(f"--task {kind}{G} has one step: set --D 1")
    x = torch.arange(2 * N + G)
    chains, none = x[: 2 * N].view(N, 2), torch.empty(N, 0, dtype=torch.long)
    blocks = [Block(["1a", "1b"], chains), Block([], x[2 * N :, None], none)]
    names = [f"D{i + 1}" for i in range(G)]
    return Task(f"{kind}{G} D=1", N, 2, [*blocks, Block(["q"], chains[:, :1])], names)


# of two chains, a pair may begin at 7, 9, 11 or 23 places
TASKS = {}
for G in (4, 6, 8, 20):
    for kind in ("random", "fixed"):
        TASKS[f"{kind}{G}"] = functools.partial(places, kind, G)
data.TASKS |= TASKS
NEAR, FAR = "fixed20", "random20"
make_chains = data.make_batch


def make_batch(seed, index, N=4, D=3, K=4, targets=None, rotary="input", task="chain"):
    """data.make_batch, which moves the tokens before the queries in these tasks."""
    batch = make_chains(seed, index, N, D, K, targets, rotary, task)
    if task not in TASKS:
        return batch

    # tokens are sorted by a key, those of a pair by the same one: random, or such that pair n comes
    # after (n + 1/2) G/N distractors
    B, T = batch.symbols.shape
    G = T - 3 * N
    if task.startswith("random"):
        keys = random_bits(~seed, index, N + G)  # ~seed is no seed of sequences
    else:
        keys = torch.cat([(torch.arange(N) + 0.5) * G / N, torch.arange(G) + 0.5]).expand(B, -1)
    keys = torch.cat([keys[:, :N].repeat_interleave(2, 1), keys[:, N:]], 1).to(index.device)
    order = keys.argsort(dim=1, stable=True)  # (B, 2N + G)
    queries = torch.arange(2 * N + G, T, device=index.device).expand(B, -1)
    order = torch.cat([order, queries], 1)  # (B, T)

    # symbols move, the numbers of the positions stay
    sequence = torch.arange(B, device=index.device)[:, None]
    inputs = torch.cat([batch.inputs[sequence, order, :K], batch.inputs[:, :, K:]], 2)
    positions = order.argsort(1)[sequence[:, :, None], batch.positions]
    return data.Batch(inputs, batch.targets, positions, batch.symbols[sequence, order])


data.make_batch = make_batch


# ---- what is left when the pairs move


@torch.no_grad()
def losses_by_place(model, flags, task, n=4096):
    """Return (loss, {place: loss}): the loss of x_1 of a model on n held-out sequences of a task,
    in all and of the queries whose own 1b stands at a place."""
    batch = train.sequences(flags.replace(task=task), held_out("circuits", n))
    with train.precision(flags):
        answers = model(batch.inputs).float()
    errors = (answers - batch.targets).square().mean(-1)  # (n, N), in the order of the queries
    order = batch.positions[:, :, 0].argsort(1)
    own = batch.positions[:, :, 2].gather(1, order)
    by_place = {place: errors[own == place].mean().item() for place in own.unique().tolist()}
    return errors.mean().item(), by_place


def transfer(run):
    """Return what a run answers when the pairs move, a dict. moved: its loss on the other of the
    two tasks; by_place: its loss at random places, of the queries whose own 1b stands at place 1,
    2, ...; of a run of fixed places at_trained and elsewhere: the highest loss at one of these, and
    the lowest at any other place."""
    model, flags = train.load(run)
    kind, G = flags.task.rstrip("0123456789"), flags.problem.T - 3 * flags.N
    found = {name: losses_by_place(model, flags, f"{name}{G}") for name in ("fixed", "random")}
    loss, by_place = found["random"]
    row = dict(by_place=[round(by_place[place], 4) for place in sorted(by_place)])
    if kind == "random":
        loss, _ = found["fixed"]
    row["moved"] = round(loss, 4)
    if kind == "fixed":
        _, trained = found["fixed"]
        at = [loss for place, loss in by_place.items() if place in trained]
        elsewhere = [loss for place, loss in by_place.items() if place not in trained]
        row |= dict(at_trained=round(max(at), 4), elsewhere=round(min(elsewhere), 4))
    return row


def draw_transfer(rows, path):
    """Draw the loss at random places by the place of the own 1b, a line for each model of two
    chains and 20 distractors."""
    series = [  # layers, task of the training, colour, words
        (1, NEAR, "tab:red", "one layer, trained at two fixed places"),
        (1, FAR, "tab:orange", "one layer, trained at random places"),
        (2, NEAR, "tab:purple", "two layers, trained at two fixed places"),
        (2, FAR, "tab:blue", "two layers, trained at random places"),
    ]
    figure, [panel] = analyze.panels(1, 1, 7, 2.6)
    for layers, task, color, words in series:
        shape = dict(layers=layers, heads=8, N=2, other=f"--task {task}")
        found = [row for row in rows if shape.items() <= row.items()]
        for number, row in enumerate(found):
            label = f"{words}, n = {len(found)}" if number == 0 else None
            tokens = range(1, len(row["by_place"]) + 1)
            panel.plot(tokens, row["by_place"], ".-", color=color, lw=1, alpha=0.7, label=label)
    panel.set(xlabel="place of the own 1b (token)", ylabel="loss of $x_1$ at random places")
    panel.set_title("Two pairs anywhere among 20 distractors, eight heads", fontsize="medium")
    panel.axhline(1, color="0.6", lw=1, ls=":", label="knows nothing")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    analyze.save_figure(figure, path)
