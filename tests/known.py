"""Models whose only circuit is known, and models that have none: those of the other tests."""

import itertools

from tests import adversaries, planted, test_compiled


NOISES = 0, 0.1  # on the weights of compiled programs


def models():
    """Return [(family, model, flags, circuit), ...]; the circuit is empty if there is none."""
    found = []
    cases = [*itertools.product(test_compiled.CASES[:3], NOISES), (test_compiled.CASES[-1], 0)]
    for case, noise in cases:
        model = test_compiled.compiled(case, noise)
        flags = planted.settings(case[0], model.layers, model.heads)
        found.append(("Tracr", model, flags, test_compiled.paths_of(*case)))
    for D, heads, texts in planted.CIRCUITS:
        flags = planted.settings(D, 1 + max(int(text[0]) for text in texts), heads)
        model = planted.plant(flags.problem, texts, flags.layers, heads)
        found.append(("planted", model, flags, {*planted.paths_from(*texts)}))
    for model, text, _ in adversaries.ALL:
        flags = planted.settings(1, getattr(model, "layers", 2), getattr(model, "heads", 2))
        texts = text.split(", ") if text else []
        found.append(("adversaries", model, flags, {*planted.paths_from(*texts)}))
    return found
