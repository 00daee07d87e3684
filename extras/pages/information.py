"""A map of the information in the residual stream: information_map.png in the run directory.

    python -m extras.pages.information results/A

It shows how well each symbol can be read, by least squares, from the residual stream at each role
after each layer: an empirical Lemma 2.
"""

import pathlib

import analyze
import train
from analyze import CIRCUIT, add_title, panels, read_run
from data import command_line, held_out, program

import torch


@torch.no_grad()
def residual_streams(model, inputs):
    """Return [(B, T, width), ...], the residual stream before the first and after each layer."""
    streams, hooks = [], []

    def append(module, arguments, output):
        streams.append(output[0] if isinstance(output, tuple) else output)

    try:
        for module in dict.fromkeys((model.embed, *model.blocks)):  # layers may share weights
            hooks.append(module.register_forward_hook(append))
        model(inputs, return_patterns=True)  # with it, the last layer computes all tokens too
    finally:
        for hook in hooks:
            hook.remove()
    return streams


def information(model, task, batch, K):
    """Return R^2 of reading x_k from the residual stream at a role, (layers+1, roles, symbols),
    before the first and after each layer: least squares, fitted on the first half of the sequences
    and tested on the second."""

    def at_role(values, role):  # (B, T, size) -> (B*N, size)
        tokens = batch.positions[:, :, role, None].expand(-1, -1, values.shape[-1])
        return values.gather(1, tokens).flatten(0, 1)

    # the labels: every symbol of each chain, read at a role that shows it
    shown = [*task.roles.values()]
    labels = [at_role(batch.inputs[..., :K], shown.index(k)) for k in range(task.symbols)]
    fit_labels, test_labels = torch.cat(labels, -1).double().chunk(2)

    scores = []
    for stream in residual_streams(model, batch.inputs):
        for role in range(len(task.roles)):
            features = at_role(stream, role).double()
            ones = torch.ones(len(features), 1)
            fit, test = torch.cat([features, ones], -1).chunk(2)
            weights = torch.linalg.lstsq(fit, fit_labels, driver="gelsy").solution
            errors = (test @ weights - test_labels).square().mean(0)
            scores.append((1 - errors / test_labels.var(0)).view(-1, K).mean(1))
    return torch.stack(scores).view(-1, len(task.roles), task.symbols).float()


def draw_information_map(run, n=512):
    """A panel for each role, with the layers upward and the symbols across."""
    batch = train.sequences(run.flags, held_out("information", 2 * n))
    scores = information(run.model, run.task, batch, run.flags.K)
    levels, names = len(scores), run.task.names
    figure, grid = panels(len(names), len(names), 1.5, 0.32 * levels + 1, sharey=True)
    for number, (axes, name) in enumerate(zip(grid, names, strict=True)):
        style = dict(origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=1)
        image = axes.imshow(scores[:, number].numpy(), **style)
        axes.set_xticks(range(run.task.symbols), [f"$x_{{{k}}}$" for k in range(run.task.symbols)])
        axes.set_title(name)

    # the layers, red where one of their heads is in the circuit
    grid[0].set_yticks(range(levels), ["input", *(f"after L{k}" for k in range(levels - 1))])
    for path in run.paths:
        grid[0].get_yticklabels()[path.layer + 1].set_color(CIRCUIT)
    figure.colorbar(image, ax=grid, label="held-out $R^2$", shrink=0.8)
    figure.supxlabel("symbol that is read", fontsize=10)
    caption = "symbols read from the residual stream at each role by least squares\n"
    caption += f"(fitted on {n} sequences, tested on {n} others)"
    add_title(figure, run, caption + "; red: layers of the circuit" * bool(run.paths))
    return figure


def main():
    with program("extras.pages.information"):
        p = command_line("extras.pages.information", __doc__)
        p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
        folder = p.parse_args().run
        analyze.save_figure(draw_information_map(read_run(folder)), folder / "information_map.png")
        print(folder / "information_map.png")


if __name__ == "__main__":
    main()
