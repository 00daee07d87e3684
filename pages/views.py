"""The views of a page of explore.py, as charts of Altair with shared parameters: which sequence,
checkpoint, layer, head, token and path. Their data come as rows by name; nothing is measured here.

    specification = draw_run(story, narrow=False)    # Vega-Lite, a dict, without the rows
"""

import textwrap
from typing import NamedTuple

from parts import runs

import altair as alt
from matplotlib.colors import to_hex

from analyze import DASHED_BELOW, USEFUL
from data import Task


RED, BLUE, ORANGE, GRAY = (to_hex(color) for color in (USEFUL, "tab:blue", "tab:orange", "gray"))
INK = "currentColor"  # of the page: dark on light, or light on dark
# One per chain: the colour-blind can tell them, and black letters can be read on each
CHAINS = ["#8FD0F5", "#E69F00", "#00875F", "#D55EA0", "#F0E442", "#BBBBBB"]

LINES = dict(labelColor=INK, titleColor=INK, tickColor=GRAY, domainColor=GRAY, gridColor="#8884")
THEME = dict(  # Vega-Lite's config
    background="transparent",
    view=dict(stroke=None),
    axis=LINES,
    legend=dict(labelColor=INK, titleColor=INK),
    title=dict(color=INK, subtitleColor=INK, anchor="start", fontSize=14),
)
NOTHING = alt.Data(values=[{}])  # for marks that show no data but what is chosen
BOX = dict(x2="x1:Q", y2="y1:Q")  # a rectangle or an arrow from x0, y0 to x1, y1
UNIT = alt.Scale(domain=[0, 1], clamp=True)


class Story(NamedTuple):
    """What the views need to know of a run, beside the rows."""

    task: Task
    flags: dict
    symbols: list  # x_1, x_2, ..., those that were asked for
    titles: list  # of the paths of its circuit
    layers: list  # those with paths, from 0
    names: list  # of the tokens, of each sequence
    steps: list  # the training steps to choose from, one if only the end is known
    sequences: int  # over which attention is the mean
    shown: list  # for each of these, which of the sets of maps is shown
    map_steps: list  # after which step each of these sets was measured
    missing: dict  # {view: why it cannot be drawn}


# ---- what can be chosen: each by a slider or a list, most also by pointing at a mark


LAYER, HEAD, TOKEN = "at_layer.layer[0]", "at_head.head[0]", "at_token.token[0]"
OF_STEP = "' after ' + map_steps[shown[moment]] + ' steps'"
IN_HEAD = f"datum.sequence == example && datum.layer == {LAYER} && datum.head == {HEAD}"
OF_PATH = "datum.path == at_path.path[0]"


def pointing(story):
    """The selections of Vega-Lite: where marks of these names are
    pointed at, the value of a field is chosen. First shown: the last query in the last path."""
    last_layer = (story.layers or range(story.flags.layers))[-1] + 1
    arrow, over = "@arrows_marks:click", "@cells_marks:pointerover, @tiles_marks:pointerover"
    either, T = f"{arrow}, @information_marks:click", story.task.T
    numbers = dict(layer=(1, story.flags.layers, last_layer, either, "information"))
    numbers["head"] = 1, story.flags.heads, 1, arrow, None
    numbers["token"] = 0, T - 1, T - 1, over, "cells"
    binds = {name: slider(name, *ends[:2]) for name, ends in numbers.items()}
    chosen = {name: (value, on, mark) for name, (*_, value, on, mark) in numbers.items()}
    if story.titles:
        binds["path"] = alt.binding_select(options=story.titles, name="path", element="#path")
        chosen["path"] = story.titles[-1], arrow, None

    selections = []
    views = dict(cells="map", information="information")  # drawn unless they are missing
    for name, (value, on, mark) in chosen.items():
        marks = ["tiles"] + ["arrows"] * bool(story.titles)
        marks += [mark] * (mark is not None and views[mark] not in story.missing)
        select = alt.PointSelectionConfig(type="point", fields=[name], on=on, clear=False)
        more = dict(bind={name: binds[name]}) if binds[name] else {}
        more |= dict(name=f"at_{name}", value=[{name: value}], select=select, views=marks)
        selections.append(alt.TopLevelSelectionParameter(**more))
    return selections


def slider(label, first, last):
    """A slider over whole numbers, in the element of its name; None if there is but one."""
    where = dict(name=label, element=f"#{label}")
    return alt.binding_range(min=first, max=last, step=1, **where) if last > first else None


def variables(story, lines):
    """What only a slider changes, then what nobody changes: names of tokens, the place of each."""
    last, chosen = len(story.steps) - 1, []
    for name, value, bind in (
        ("example", 1, slider("sequence", 1, len(story.names))),
        ("moment", last, slider("checkpoint", 0, last)),
    ):
        more = dict(bind=bind) if bind else {}
        chosen.append(alt.VariableParameter(name=name, value=value, **more))

    # the role of a token is the same in every sequence; each block may have a line of its own
    task, known = story.task, dict(roles=[], line=[], place=[])
    for number, block in enumerate(task.blocks):
        own = [task.role_at(number, place).name for place in range(block.size)] * block.slots
        start = 0 if lines > 1 else block.start
        known["roles"] += own
        known["line"] += [number if lines > 1 else 0] * len(own)
        known["place"] += range(start, start + len(own))
    known |= dict(names=story.names, steps=story.steps, shown=story.shown)
    known |= dict(map_steps=story.map_steps)
    known = [alt.VariableParameter(name=name, value=value) for name, value in known.items()]
    return [*chosen, *known]


# ---- what the views have in common


def rows_of(name):
    return alt.Chart(alt.NamedData(name))


def who(token):
    """An expression: the name of a token and its role."""
    return f"names[example - 1][{token}] + ' (' + roles[{token}] + ')'"


def heading(text, width=0, below=""):
    """A title, an expression if it begins with =, and below it smaller lines of text."""
    text = alt.ExprRef(text[1:]) if text[0] == "=" else text
    lines = textwrap.wrap(below, width // 6) if below else []
    return alt.Title(text=text, **(dict(subtitle=lines) if lines else {}))


def note(why, title, width):
    """In place of a view that cannot be drawn."""
    lines = textwrap.wrap(why, width // 7)
    style = dict(align="left", baseline="top", lineBreak="\n", fontStyle="italic", color=INK)
    mark = alt.Chart(NOTHING).mark_text(text="\n".join(lines), **style)
    mark = mark.encode(x=alt.value(0), y=alt.value(0))
    return mark.properties(width=width, height=16 * len(lines), title=heading(title))


def beside(stack, *charts, spacing=20):
    """Charts side by side (alt.hconcat) or below each other, colours and brightness their own."""
    own = dict(scale=dict(color="independent", opacity="independent"))
    return stack(*charts, spacing=spacing, resolve=own)


def axisless(channel, field, first, last, **more):
    scale = alt.Scale(domain=[first, last], nice=False, zero=False, **more)
    return channel(f"{field}:Q", scale=scale, axis=None)


def symbol_colors(symbols, last):
    """One colour for x_1, x_2, ... to x_last, as in every figure."""
    colors = [to_hex(runs.symbol_color(int(name[2:]), last)) for name in symbols]
    legend = alt.Legend(orient="top", title=None, symbolStrokeWidth=4, symbolType="stroke")
    return alt.Color("symbol:N", scale=alt.Scale(domain=symbols, range=colors), legend=legend)


def chain_colors(N):
    colors = [CHAINS[n % len(CHAINS)] for n in range(N)]
    scale = alt.Scale(domain=list(range(1, N + 1)), range=colors)
    return alt.Color("chain:N", scale=scale, legend=None)


# ---- a sequence, and the attention of one head to it


def cells(T):
    """The attention map that is chosen: a row for each two tokens with any attention."""
    chart = rows_of("maps").transform_filter(f"{IN_HEAD} && datum.shown == shown[moment]")
    chart = chart.transform_calculate(cell=f"sequence({T * T})").transform_flatten(["map", "cell"])
    chart = chart.transform_filter("datum.map > 0")
    parts = dict(token=f"floor(datum.cell / {T})", other=f"datum.cell % {T}")
    return chart.transform_calculate(attention="datum.map / 100", **parts)


def draw_tokens(story, width, lines):
    """The tokens of a sequence, above each how much the chosen token attends to it, below how much
    it attends to the chosen one. A line (one, or one for each block) is 100 high."""
    task = story.task
    count = max(block.slots * block.size for block in task.blocks) if lines > 1 else task.T

    def at(chart, token, top, bottom):
        """Where the tile of a token is, between two heights of its line."""
        ends = dict(x0=f"place[{token}] + 0.06", x1=f"place[{token}] + 0.94")
        ends |= dict(middle=f"place[{token}] + 0.5")
        ends |= dict(y0=f"100 * line[{token}] + {top}", y1=f"100 * line[{token}] + {bottom}")
        y = axisless(alt.Y, "y0", 0, 100 * lines, reverse=True)
        return chart.transform_calculate(**ends).encode(x=axisless(alt.X, "x0", 0, count), y=y)

    # bars of attention, framed where the circuit has a path
    layers = []
    for own, other, foot, length in (("token", "other", 36, -34), ("other", "token", 78, 21)):
        of_token, ends = f"datum.{own} == {TOKEN}", f"{foot} + {length} * datum.attention"
        if "map" not in story.missing:
            bars = at(cells(task.T).transform_filter(of_token), f"datum.{other}", foot, ends)
            layers.append(bars.mark_rect(color=BLUE).encode(**BOX))
        if story.titles:
            frames = rows_of("arrows").transform_filter(f"{IN_HEAD} && {of_token}")
            frames = at(frames, f"datum.{other}", foot, foot + length)
            frames = frames.mark_rect(filled=False, stroke=RED, strokeWidth=1.5)
            layers.append(frames.encode(**BOX))

    # tiles with letter and role
    here = rows_of("tokens").transform_filter("datum.sequence == example")
    here = here.transform_calculate(who=who("datum.token"))
    tile = at(here, "datum.token", 38, 64).mark_rect(stroke=INK, cursor="pointer")
    border = alt.condition(f"datum.token == {TOKEN}", alt.value(3), alt.value(0))
    tip = [alt.Tooltip("who:N", title="token"), alt.Tooltip("chain:N")]
    tile = tile.encode(color=chain_colors(task.N), strokeWidth=border, tooltip=tip, **BOX)
    layers.append(tile.properties(name="tiles"))
    for field, height, style in (
        ("name", 51, dict(color="black", fontWeight="bold", fontSize=11)),
        ("role", 71, dict(color=INK, fontSize=9)),
    ):
        text = at(here, "datum.token", height, height).mark_text(**style)
        layers.append(text.encode(x=axisless(alt.X, "middle", 0, count), text=f"{field}:N"))
    title = heading(
        f"={who(TOKEN)} + ' in layer ' + {LAYER} + ', head ' + {HEAD}",
        width,
        "above: how much it attends to each token; below: how much "
        "each attends to it; framed: where the circuit has a path",
    )
    height = (100 if lines > 1 else 130) * lines
    return alt.layer(*layers, width=width, height=height, title=title)


def draw_map(story, width):
    """The attention of the chosen head: a row for each attending token."""
    if "map" in story.missing:
        return note(story.missing["map"], "Attention map", width)
    task, T, edge = story.task, story.task.T, 2.2  # names of tokens stand in two rows and columns
    across = axisless(alt.X, "x0", -edge, T)
    down = axisless(alt.Y, "y0", -edge, T, reverse=True)

    def box(chart, x0, y0, x1, y1):
        ends = dict(x0=x0, y0=y0, x1=x1, y1=y1)
        return chart.transform_calculate(**ends).encode(x=across, y=down)

    # the names of the tokens on two sides
    here = rows_of("tokens").transform_filter("datum.sequence == example")
    this, after, size = "datum.token", "datum.token + 1", min(11, 0.85 * width / (T + edge))
    left = box(here, f"{-edge}", this, "-0.2", after)
    top = box(here, this, f"{-edge}", after, "-0.2")
    layers = [side.mark_rect().encode(color=chain_colors(task.N), **BOX) for side in (left, top)]
    for x, y, angle in (("-1.2", f"{this} + 0.5", 0), (f"{this} + 0.5", "-1.2", 270)):
        text = box(here, x, y, x, y).mark_text(fontSize=size, angle=angle, color="black")
        layers.append(text.encode(text="name:N"))

    # the map, and the borders of the blocks
    field = cells(T).transform_calculate(**{"from": who(this), "to": who("datum.other")})
    field = box(field, "datum.other", this, "datum.other + 1", after).mark_rect(color=BLUE)
    strength = alt.Opacity("attention:Q", scale=alt.Scale(domain=[0, 1], range=[0, 1]), legend=None)
    tip = [alt.Tooltip("from:N", title="token"), alt.Tooltip("to:N", title="attends to")]
    tip.append(alt.Tooltip("attention:Q", format=".2f"))
    field = field.encode(opacity=strength, tooltip=tip, **BOX)
    layers.append(field.properties(name="cells"))
    borders = alt.Chart(alt.Data(values=[dict(x0=b.start, y0=b.start) for b in task.blocks[1:]]))
    borders = borders.mark_rule(color=GRAY, strokeWidth=0.7)
    layers += [borders.encode(x=across), borders.encode(y=down)]

    # frames: the row and the column of the chosen token, and the circuit
    for ends in (("0", TOKEN, f"{T}", f"{TOKEN} + 1"), (TOKEN, "0", f"{TOKEN} + 1", f"{T}")):
        frame = box(alt.Chart(NOTHING), *ends).mark_rect(filled=False, stroke=INK, strokeWidth=1)
        layers.append(frame.encode(**BOX))
    if story.titles:
        frames = rows_of("arrows").transform_filter(IN_HEAD)
        frames = box(frames, "datum.other", this, "datum.other + 1", after)
        frames = frames.mark_rect(filled=False, stroke=RED, strokeWidth=1.5)
        layers.append(frames.encode(**BOX))
    title = heading(
        f"='Attention of layer ' + {LAYER} + ', head ' + {HEAD} + {OF_STEP}",
        width,
        "a row for each attending token, the attended ones across; the "
        "bluer, the more attention; red: where the circuit has a path",
    )
    return alt.layer(*layers, width=width, height=width, title=title)


# ---- the circuit


WITHOUT = {  # what is known of the removal of a path: {column of its row: in words}
    "held": "error without it, all else held",
    "alive": "taken from the model, error rises by",
    "destroyed": "taken from all heads, it destroys",
    "predicted": "the flow predicts",
}


def place_arrows(task, paths):
    """[{x0, y0, x1, y1}, ...] of the arrow of each path: the roles across in the order of reading,
    the layers that have paths upward."""
    layers, places = sorted({path.layer for path in paths}), []
    across = {role: x for x, role in enumerate(task.in_reading_order)}
    for number, path in enumerate(paths):
        same = [other for other in paths[:number] if other._replace(head=path.head) == path]
        aside, below = 0.12 * len(same), layers.index(path.layer)  # the same in another head
        start, end = across[path.target] + aside, across[path.source] + aside
        places.append(dict(x0=start, y0=below, x1=end, y1=below + 1))
    return places


def named_axis(channel, field, names):
    """0, 1, 2, ... with names."""
    style = dict(grid=False, ticks=False, domain=False, title=None, labelOverlap=False)
    label = f"{names}[datum.value]".replace("'", '"')
    axis = alt.Axis(values=list(range(len(names))), labelExpr=label, **style)
    scale = alt.Scale(domain=[-0.4, len(names) - 0.6], nice=False)
    return channel(f"{field}:Q", scale=scale, axis=axis)


def draw_circuit(story, width, height):
    """An arrow for each path, from where information is taken to where it goes."""
    if "circuit" in story.missing:
        return note(story.missing["circuit"], "The circuit", width)

    # the roles across, the layers upward
    roles = [story.task.roles[number] for number in story.task.in_reading_order]
    names = [[chr(ord("A") + role.symbol), role.name] for role in roles]
    levels = ["input", *(f"layer {layer + 1}" for layer in story.layers)]
    axes = dict(x=named_axis(alt.X, "x0", names), y=named_axis(alt.Y, "y0", levels))
    dots = [dict(x0=x, y0=y) for x in range(len(names)) for y in range(len(levels))]
    dots = alt.Chart(alt.Data(values=dots)).mark_point(color=GRAY, size=30, opacity=0.6)
    layers = [dots.encode(**axes)]

    # the arrows: their head turned as they are, 0 is upward, their number beside them
    right, up = width / (len(names) - 0.2), height / (len(levels) - 0.2)
    arrows = rows_of("paths").transform_calculate(
        attention="datum.attentions[moment]",
        angle=f"atan2((datum.x1 - datum.x0) * {right}, {up}) * 180 / PI",
        xt="datum.x0 + 0.6 * (datum.x1 - datum.x0)",
        yt="datum.y0 + 0.6",
    )
    bright = alt.Scale(domain=[0, 1], range=[0.15, 1])
    bright = alt.Opacity("attention:Q", scale=bright, legend=None)
    faint, solid = f"datum.attention < {DASHED_BELOW}", alt.value([1, 0])
    of_role = f"datum.source == roles[{TOKEN}] || datum.target == roles[{TOKEN}]"
    thick = alt.condition(of_role, alt.value(4), alt.value(1.5))
    picked = alt.condition(OF_PATH, alt.value(0.4), alt.value(0))
    halo = arrows.mark_rule(color=ORANGE, strokeWidth=13, strokeCap="round")
    layers.append(halo.encode(strokeOpacity=picked, **axes, **BOX))
    seen = arrows.mark_rule(color=RED).encode(opacity=bright, strokeWidth=thick, **axes, **BOX)
    layers.append(seen.encode(strokeDash=alt.condition(faint, alt.value([4, 4]), solid)))
    points = arrows.mark_point(shape="triangle", filled=True, color=RED, size=110)
    turned = alt.Angle("angle:Q", scale=None)
    layers.append(points.encode(x="x1:Q", y="y1:Q", opacity=bright, angle=turned))
    number = alt.Text("attention:Q", format=".2f")
    numbers = arrows.mark_text(color=INK, dy=-9, dx=-9, fontWeight="bold")
    layers.append(numbers.encode(x="xt:Q", y="yt:Q", text=number))

    # what can be hit is wider than what is seen
    tip = [alt.Tooltip("path:N"), alt.Tooltip("attention:Q", format=".2f")]
    tip += [alt.Tooltip(f"{field}:N", title=title) for field, title in WITHOUT.items()]
    hit = arrows.mark_rule(strokeWidth=18, color=RED, strokeOpacity=0, cursor="pointer")
    layers.append(hit.encode(tooltip=tip, **axes, **BOX).properties(name="arrows"))
    title = heading(
        "='The circuit, mean attention after ' + steps[moment] + ' steps'",
        width,
        f"over {story.sequences} sequences; roles across as they are read, layers upward; thick: "
        "the role of the chosen token; tap an arrow to choose it and its layer",
    )
    return alt.layer(*layers, width=width, height=height, title=title)


def draw_removal(story, width):
    """Of the chosen path: its numbers, and by how much the error of each symbol rises without."""
    said = "datum.path + '\\nattention: ' + format(datum.attentions[moment], '.2f')"
    for field, title in WITHOUT.items():
        said += f" + '\\n{title}: ' + datum.{field}"
    lines = rows_of("paths").transform_filter(OF_PATH).transform_calculate(said=said)
    text = dict(align="left", baseline="top", lineBreak="\n", color=INK, fontSize=12)
    lines = lines.mark_text(**text).encode(x=alt.value(0), y=alt.value(0), text="said:N")
    lines = lines.properties(width=width, height=90, title=heading("The chosen path"))

    x = alt.X("rise:Q", title="taken from the model: rise of each symbol's error", scale=UNIT)
    tip = ["symbol:N", alt.Tooltip("rise:Q", format=".3f")]
    bars = rows_of("removals").transform_filter(OF_PATH).mark_bar(stroke=GRAY, strokeWidth=1)
    y = alt.Y("symbol:N", title=None, scale=alt.Scale(domain=story.symbols))
    color = symbol_colors(story.symbols, story.flags.D)
    color.legend = None
    bars = bars.encode(x=x, y=y, color=color, tooltip=tip)
    return beside(alt.vconcat, lines, bars.properties(width=width - 30), spacing=4)


# ---- over training


def haloed(chart, color, **channels):
    """Lines with gray ones behind them: the darkest are seen on dark, the brightest on white."""
    behind = chart.mark_line(strokeWidth=4.5, opacity=0.55, color=GRAY)
    front = chart.mark_line(strokeWidth=2).encode(color=color, **channels)
    return behind.encode(detail="symbol:N", **channels), front


def draw_history(story, width, plateaus):
    """Of the chosen path: its attention, and what its removal destroys; below, the losses."""
    scale = alt.Scale(domain=[0, max(1, story.steps[-1])], nice=False)
    x = alt.X("step:Q", title="training step", scale=scale)
    now = alt.Chart(NOTHING).transform_calculate(step="steps[moment]")
    now = now.mark_rule(color=RED, strokeWidth=1.5).encode(x=x)
    colors = symbol_colors(story.symbols, story.flags.D)
    shape, panels = dict(width=width, height=95), []
    if "history" in story.missing:
        panels.append(note(story.missing["history"], "The chosen path over training", width))
    else:
        # its attention
        of_path = rows_of("history").transform_filter(OF_PATH)
        mean, low, hits = (alt.Y(f"{field}:Q", scale=UNIT) for field in ("mean", "low", "hits"))
        band = of_path.mark_area(color=BLUE, opacity=0.25).encode(x=x, y=low, y2="high:Q")
        line = of_path.mark_line(color=BLUE).encode(x=x, y=mean.title("attention"))
        share = of_path.mark_line(color=ORANGE, strokeWidth=1.2).encode(x=x, y=hits)
        title = heading(
            "='Over training: ' + at_path.path[0]",
            width,
            "blue: mean attention, 10% to 90% of the sequences; orange: "
            "for which share of tokens it is the largest; red: checkpoint",
        )
        panels.append(alt.layer(line, band, share, now).properties(title=title, **shape))

        # what its removal destroys
        y = alt.Y("rise:Q", title="rise without it", scale=UNIT)
        rises = haloed(rows_of("rises").transform_filter(OF_PATH), colors, x=x, y=y)
        panels.append(alt.layer(*rises, now).properties(**shape))

    # the losses
    y = alt.Y("loss:Q", title="error (MSE)", scale=alt.Scale(domain=[0, 1.2], clamp=True))
    tip = ["symbol:N", "step:Q", alt.Tooltip("loss:Q", format=".4f")]
    points = rows_of("losses").mark_point(opacity=0, size=60).encode(x=x, y=y, tooltip=tip)
    title = heading("The error of each symbol", width, "; ".join(plateaus))
    losses = alt.layer(*haloed(rows_of("losses"), colors, x=x, y=y), points, now)
    return beside(alt.vconcat, *panels, losses.properties(title=title, **shape))


# ---- what can be read where


def draw_information(story, width, height):
    """For each role a column per symbol, layers upward: how well it can be read there."""
    task, tops, title = story.task, story.flags.layers + 1, "What can be read where"
    if "information" in story.missing:
        return note(story.missing["information"], title, width)

    # the letters of the symbols below, the layers on the left, red where they have paths
    step, K = task.symbols + 0.4, range(task.symbols)  # a role is so wide
    columns = [round(role * step + k + 0.5, 1) for role in range(len(task.roles)) for k in K]
    letters = [chr(ord("A") + k) for k in K] * len(task.roles)
    plain = dict(grid=False, ticks=False, domain=False, labelOverlap=False, labelFontSize=9)
    label = f"{letters}[indexof({columns}, datum.value)]".replace("'", '"')
    axis = alt.Axis(values=columns, labelExpr=label, title=None, **plain)
    end = alt.Scale(domain=[0, step * len(task.roles)], nice=False)
    x = alt.X("x0:Q", scale=end, axis=axis)
    useful = f"indexof({[layer + 1 for layer in story.layers]}, datum.value - 0.5) >= 0"
    plain["labelColor"] = alt.condition(useful, alt.value(RED), alt.value(INK))
    label = "datum.value == 0.5 ? 'input' : datum.value - 0.5"
    middles = [level + 0.5 for level in range(tops)]
    axis = alt.Axis(values=middles, labelExpr=label, title="layer", **plain)
    y = alt.Y("y0:Q", scale=alt.Scale(domain=[0, tops], nice=False), axis=axis)

    # the map
    rows = rows_of("information").transform_filter("datum.shown == shown[moment]")
    place = f"datum.role * {step} + datum.symbol"
    rows = rows.transform_calculate(x0=place, x1=f"{place} + 1", y0="datum.level")
    rows = rows.transform_calculate(y1="datum.level + 1")
    scale = alt.Scale(scheme="viridis", domain=[0, 1])
    legend = alt.Legend(title="R² on held-out sequences", orient="bottom", gradientLength=150)
    words = dict(at="at role", of="symbol", level="after layer", R2="R²")
    tip = [alt.Tooltip(f"{field}:N", title=title) for field, title in words.items()]
    field = rows.mark_rect(cursor="pointer").encode(x=x, y=y, tooltip=tip, **BOX)
    field = field.encode(color=alt.Color("R2:Q", scale=scale, legend=legend))

    # the names of the roles, and the chosen layer
    names = [dict(x0=(n + 0.5) * step - 0.2, name=name) for n, name in enumerate(task.names)]
    names = alt.Chart(alt.Data(values=names)).mark_text(color=INK, dy=-8, fontWeight="bold")
    names = names.encode(x=x, y=alt.value(0), text="name:N")
    ends = dict(x0="0", x1=f"{step * len(task.roles) - 0.4}", y0=LAYER, y1=f"{LAYER} + 1")
    frame = alt.Chart(NOTHING).transform_calculate(**ends).encode(x=x, y=y, **BOX)
    frame = frame.mark_rect(filled=False, stroke=ORANGE, strokeWidth=2.5)
    title = heading(
        f"='{title}' + {OF_STEP}",
        width,
        "at each role (above) of each symbol of its chain (below), by least "
        "squares; red: layers with a path; framed: the chosen one, tap another",
    )
    title.offset = 18
    layers = field.properties(name="information"), frame, names
    return alt.layer(*layers, width=width, height=height, title=title)


# ---- all of them


def name_marks(part):
    """Altair adds numbers to the names of charts; selections need the names that were given."""
    for inner in part if isinstance(part, list) else part.values():
        if isinstance(inner, (dict, list)):
            name_marks(inner)
    if "mark" in part and "name" in part:
        part["name"] = part["name"].split("_")[0]


def draw_run(story, narrow, plateaus=()):
    """Vega-Lite of all views of a run, a dict without the rows: one below the other where it is
    narrow, else in two columns."""
    width, lines = (290, len(story.task.blocks)) if narrow else (470, 1)
    circuit = [draw_circuit(story, width, 60 * len(story.layers) + 60)]
    if story.titles:
        circuit.append(draw_removal(story, width))
    left = [draw_map(story, width), draw_history(story, width, plateaus)]
    read = draw_information(story, width, 14 * story.flags.layers + 30)
    tokens = draw_tokens(story, width if narrow else 2 * width + 110, lines)
    if narrow:
        chart = beside(alt.vconcat, tokens, left[0], *circuit, left[1], read)
    else:
        sides = [beside(alt.vconcat, *side) for side in (left, [*circuit, read])]
        chart = beside(alt.vconcat, tokens, beside(alt.hconcat, *sides, spacing=60))
    drawn = chart.to_dict() | dict(config=THEME)
    name_marks(drawn)
    params = [*variables(story, lines), *pointing(story)]
    return drawn | dict(params=[param.to_dict() for param in params])
