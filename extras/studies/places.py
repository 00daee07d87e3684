"""Tasks of the studies: places that say nothing about the step, or about the pair.

    --task shuffled    # the retrieval problem with the pairs of all steps shuffled together
    --task random20    # one step, 20 distractors, symbols that no chain has; the pairs stand
                       # anywhere among them, each pair whole
    --task fixed20     # the same tokens; the pairs stand at the same places in every sequence

In the last two the pairs of a sequence are shuffled over their places, and the queries come last.
Runs are measured by extras.studies.depth: what is left of their answers when the pairs move.
"""

import functools

import analyze
import data
import train
from data import Block, Task, UserError, held_out, random_bits

import torch


@functools.lru_cache
def shuffled(N, D):
    """Return the retrieval problem with the pairs of all steps in one block."""
    x = torch.arange(N * (D + 1)).view(N, D + 1)
    pairs = torch.stack([x[:, :-1], x[:, 1:]], 2).flatten(0, 1)  # slot n * D + k - 1: step k of n
    roles = [f"{k}{end}" for k in range(1, D + 1) for end in "ab"]
    blocks = [Block(roles, pairs, torch.arange(N * D).view(N, D)), Block(["q"], x[:, :1])]
    return Task(f"shuffled D={D}", N, D + 1, blocks)


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
data.TASKS |= TASKS | dict(shuffled=shuffled)
NEAR, FAR = "fixed20", "random20"
make_chains = data.make_batch


def make_batch(seed, index, N=4, D=3, K=4, ks=None, rotary="input", task="chain"):
    """data.make_batch, which moves the tokens before the queries in these tasks."""
    batch = make_chains(seed, index, N, D, K, ks, rotary, task)
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


def loss_of_average(row):
    """Return the loss, on a row's validation sequences, of answering the average of all pairs."""
    task, index = row["other"].removeprefix("--task "), held_out("validation", 1024)
    batch = make_batch(row["seed"], index, row["N"], 1, task=task)
    average = batch.inputs[:, : -row["N"], :4].mean(1, keepdim=True)
    return (average - batch.targets).square().mean().item()


def transfer(run):
    """Return what a run answers when the pairs move, a dict. moved: its loss on the other of the
    two tasks; by_place: its loss at random places, of the queries whose own 1b stands at place 1,
    2, ...; of a run of fixed places at_trained and elsewhere: the highest loss at one of these, and
    the lowest at any other place."""
    model, flags = train.load(run)
    kind, G = flags.task.rstrip("0123456789"), flags.problem.T - 3 * flags.N
    loss, by_place = losses_by_place(model, flags, f"random{G}")
    fixed, trained = losses_by_place(model, flags, f"fixed{G}")
    row = dict(by_place=[round(by_place[place], 4) for place in sorted(by_place)])
    row["moved"] = round(fixed if kind == "random" else loss, 4)
    if kind == "fixed":
        at = [loss for place, loss in by_place.items() if place in trained]
        elsewhere = [loss for place, loss in by_place.items() if place not in trained]
        row |= dict(at_trained=round(max(at), 4), elsewhere=round(min(elsewhere), 4))
    return row


def draw_transfer(rows, path):
    """Draw the loss at random places by the place of the own 1b, of N = 2 and 20 distractors."""
    figure, [panel] = analyze.panels(1, 1, 7, 2.6)
    colors = iter(("tab:red", "tab:orange", "tab:purple", "tab:blue"))
    for layers, words in (1, "one layer"), (2, "two layers"):
        for task, where in (NEAR, "two fixed"), (FAR, "random"):
            shape = dict(layers=layers, heads=8, N=2, other=f"--task {task}")
            losses = [row["by_place"] for row in rows if shape.items() <= row.items()]
            label, color = f"{words}, trained at {where} places, n = {len(losses)}", next(colors)
            for line in losses:
                tokens = range(1, len(line) + 1)
                panel.plot(tokens, line, ".-", color=color, lw=1, alpha=0.7, label=label)
                label = None  # once in the legend
    panel.set(xlabel="place of the own 1b (token)", ylabel="loss of $x_1$ at random places")
    panel.set_title("Two pairs anywhere among 20 distractors, eight heads", fontsize="medium")
    panel.axhline(1, color="0.6", lw=1, ls=":", label="knows nothing")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    analyze.save_figure(figure, path)
