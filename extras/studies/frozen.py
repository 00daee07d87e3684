"""Train with the attention frozen to a circuit (Section 5): what a depth can learn if its
heads read along the fewest paths from the first step on.

    python -m extras.studies.frozen minimal --layers 3 --heads 1 --D 8 --out out/frozen_L3

config.json of the run then has "circuit": "minimal" beside the flags.
"""

import json
from unittest import mock

import train
from ablate import frozen_heads
from data import command_line, program
from extras.studies.theory import frozen_paths


def run_with(flags, heads_of, note, stopped=()):
    """Train a run, or continue it, like train.run_once, with the head functions heads_of(positions
    (B, N, roles)) in every prediction; note: what config.json says of them, a dict."""

    def predict(model, flags, index):
        batch = train.sequences(flags, index.to(flags.device))
        with train.precision(flags):
            return model(batch.inputs, heads_of(batch.positions)), batch.targets

    with mock.patch.object(train, "predict", predict):
        ended = train.run_once(flags, stopped)
    file = flags.out / "config.json"
    saved = json.loads(file.read_text(encoding="utf-8")) | note
    train.write_text(file, json.dumps(saved, indent=1) + "\n")
    return ended


def run_once(flags, circuit, stopped=()):
    """Train a run, or continue it, like train.run_once, with this circuit."""
    paths = frozen_paths(flags, circuit)

    def heads_of(positions):
        return frozen_heads(paths, flags.problem, positions)

    return run_with(flags, heads_of, dict(circuit=circuit), stopped)


if __name__ == "__main__":
    with program("python -m extras.studies.frozen"):
        p = command_line("python -m extras.studies.frozen", __doc__)
        p.add_argument("circuit", help="minimal; all flags of train.py follow it")
        args, rest = p.parse_known_args()
        flags = train.parse_flags(rest)
        run_once(flags, args.circuit)
        print(train.summary(flags.out))
