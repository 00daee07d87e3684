"""A circuit as a diagram (Figure 5, and Figure 7, left), for analyze.py and emergence.py."""

from matplotlib.patches import FancyArrowPatch


USEFUL = "tab:red"  # the colour of what is useful, in every figure
DASHED_BELOW = 0.1  # a path with less mean attention is dashed


def path_title(path, task, heads):
    """layer 7: q -> 1b, with an arrow; the head too, if there are several."""
    names, head = task.names, f" head {path.head + 1}" * (heads > 1)
    source, target = names[path.source], names[path.target]
    return f"layer {path.layer + 1}{head}: {source} \N{RIGHTWARDS ARROW} {target}"


def diagram_size(task, paths):
    """(width, height) in inches of the diagram of these paths, with room for a title."""
    layers = len({path.layer for path in paths})
    return max(8, 1.3 * len(task.roles) + 1), (1.3 if layers < 7 else 0.9) * layers + 1.6


def faint_note(paths):
    """Two lines for the title that say what dashed arrows are, if there are any."""
    share = f"dashed: less than {DASHED_BELOW} in this head;\nother heads or relays do the rest"
    return f"\n{share}" if min(paths.values()) < DASHED_BELOW else ""


def draw_diagram(axes, task, paths, label, color):
    """The roles of a chain across in the order in which they are read, the layers that have paths
    upward, an arrow per path from where information is taken to where it goes.

    paths: {Path: mean attention}; label, color: of the arrow of a path, functions. Returns {path:
    (arrow, its text)}."""
    layers = sorted({path.layer for path in paths})
    across = {role: x for x, role in enumerate(task.in_reading_order)}
    draw_roles(axes, task, layers)

    drawn = {}
    for path, attention in paths.items():
        # from the target, below, to the source; straight, unless another head of the layer has it
        below, start, to = layers.index(path.layer), across[path.target], across[path.source]
        same_path = [other for other in drawn if other._replace(head=path.head) == path]
        bend = f"arc3,rad={0.15 * len(same_path)}"
        line = "-" if attention >= DASHED_BELOW else (0, (4, 4))
        style = dict(color=color(path), ls=line, connectionstyle=bend, shrinkA=5, shrinkB=5)
        ends = (start, below), (to, below + 1)
        arrow = FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=14, **style)
        axes.add_patch(arrow)

        # its text upon it, lower where another arrow ends in the same place
        end = path.layer, path.source
        same_end = [other for other in drawn if (other.layer, other.source) == end]
        up = 0.62 - 0.2 * (len(same_end) % 3)
        box = dict(boxstyle="round,pad=0.1", fc="white", ec="none", alpha=0.85)
        style = dict(fontsize=9, ha="center", va="center", bbox=box)
        drawn[path] = arrow, axes.text(start + up * (to - start), below + up, label(path), **style)
    return drawn


def draw_roles(axes, task, layers):
    """A line for each role, with a dot at the input and after each of the layers."""
    heights, names = range(len(layers) + 1), []
    for x, role in enumerate(task.roles[number] for number in task.in_reading_order):
        axes.plot([x, x], [0, len(layers)], color="lightgray", lw=1, zorder=0)
        axes.plot([x] * len(heights), heights, "o", color="white", markeredgecolor="gray", ms=7)
        names.append(f"{chr(ord('A') + role.symbol)} = $x_{{{role.symbol}}}$\n{role.name}")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(heights, ["input", *(f"after layer {layer + 1}" for layer in layers)])
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(-0.35, len(layers) + 0.3))
    axes.set_xlabel("symbol and role, in the order of reading")
    axes.spines[:].set_visible(False)
