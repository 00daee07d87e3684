"""In which order a run learned its symbols and formed its paths (Sections 7.2 and 9).

Of one run; compare.py counts over many. A path emerges when its mean attention passes 0.5.
"""

import math

from parts.circuit import to_the_token_before
from parts.emergence import emergence_steps, removal_rises


SPARED = 0.05  # a head whose removal raises no error by more can be spared


# ---- the induction head of a task


def beside_query_symbol(task):
    """{role: the role beside it that holds the symbol of the query}; of a chain {1b: 1a}."""
    asked, beside = task.roles[0].symbol, {}
    keys = [number for number, role in enumerate(task.roles) if number and role.symbol == asked]
    for key in keys:
        for number, role in enumerate(task.roles):
            if number != key and role.block == task.roles[key].block:
                beside[number] = key
    return beside


def induction_names(task):
    """Of the two paths of an induction head: ("q -> 1b", "1b -> 1a")."""
    names, beside = task.names, beside_query_symbol(task)
    upper = [f"{names[0]} -> {names[role]}" for role in beside]
    lower = [f"{names[role]} -> {names[key]}" for role, key in beside.items()]
    return " or ".join(upper), " or ".join(lower)


def induction_head(when, task):
    """[upper path, lower path] of the induction head that emerged first, None for what did not; the
    lower one is in a layer below. when: {path: step}, first step first."""
    beside = beside_query_symbol(task)
    for upper in when:
        if upper.source == 0 and upper.target in beside:
            ends = upper.target, beside[upper.target]
            lower = [path for path in when if path[2:] == ends and path.layer < upper.layer]
            return [upper, lower[0] if lower else None]
    return [None, None]


# ---- paths


def previous_token_first(when, learned, task):
    """Whether, of the paths that emerged until the last symbol was learned, those in the first
    layer attend to the previous token; None if that is not known."""
    if None in learned.values():
        return None
    in_time = [path for path in when if when[path] <= max(learned.values())]
    if not in_time:
        return None
    first_layer = min(path.layer for path in in_time)
    return all(to_the_token_before(path, task) for path in in_time if path.layer == first_layer)


def later_symbol_lost(emergence, path, task):
    """Whether a symbol after the first is lost without the path at the last checkpoint; None if
    there is only one."""
    removed = removal_rises(emergence, [emergence.paths[path].without])
    rises = [of_symbol[0][-1] for of_symbol in removed.values()]
    return max(rises[1:]) > task.destroyed if rises[1:] else None


def what_heads_did(emergence, circuit_heads, task):
    """Of all heads, whether in the circuit or not: whether those without which x_1 was first lost
    are in it, and whether none that a symbol once needed can be spared at the end; {} if heads were
    not removed. circuit_heads: {(layer, head), ...}."""
    if not emergence.heads:
        return {}
    needed_at, spared, lost = {}, [], task.destroyed
    rises = removal_rises(emergence, list(emergence.heads.values()))
    of_heads = zip(*rises.values(), strict=True)  # for each head a curve per symbol
    for head, own in zip(emergence.heads, of_heads, strict=True):
        needed_at[head] = next((i for i, rise in enumerate(own[0]) if rise > lost), None)
        needed = max(map(max, own)) > lost
        if needed and max(curve[-1] for curve in own) < SPARED:
            spared.append(head)
    when = [i for i in needed_at.values() if i is not None]
    first = {head for head, i in needed_at.items() if when and i == min(when)}
    return dict(first_heads_stay=first <= circuit_heads, no_head_died=not spared)


def what_came_first(emergence, learned, task):
    """What the order says in which paths emerged, a dict without what does not apply."""
    # the paths that emerged, the first one first, and those of them between slots
    when = {path: step for path, step in emergence_steps(emergence).items() if step is not None}
    when = {path: when[path] for path in sorted(when, key=when.get)}
    blocks = [role.block for role in task.roles]
    across = [path for path in when if blocks[path.source] != blocks[path.target]]
    found = dict(previous_token_first=previous_token_first(when, learned, task))
    if not across:
        return found

    # the induction head, and the first path between slots that belongs to none
    (upper, lower), beside = induction_head(when, task), beside_query_symbol(task)
    others = [path for path in across if path.source != 0 or path.target not in beside]
    following = others[0] if others else None
    until = when.get(following, math.inf)
    comes_first = upper == across[0] and when.get(lower, math.inf) < until
    told = [lower, upper, following] if upper == across[0] else across[:1]
    found["first_paths"] = {path: when[path] for path in told if path}
    found["induction_head_first"] = comes_first
    if lower:
        found |= dict(upper_step=when[upper], lower_step=when[lower])

    # what can only be said of an induction head that came first
    if comes_first:
        found["lower_before_upper"] = when[lower] < when[upper]
        found["later_symbol_lost"] = later_symbol_lost(emergence, upper, task)
        if following:
            complete = max(when[lower], when[upper])
            between = any(complete <= step <= until for step in emergence.steps)
            found["checkpoint_between"] = between
    return found
