"""Train with one read ablated in all heads until a step, and as ever from there on: does x_1 wait
for the read, or can it do without an early start (Section 9.1)?

    python -m extras.studies.late "1b -> 1a" 200 --layers 12 --heads 1 --D 3 --out out/late

The reader attends as if the token that it reads were not there. config.json of the run then has
"late": ["1b -> 1a", 200] beside the flags.
"""

import json
from unittest import mock

import torch

import train
from ablate import mask_of, path_from
from data import UserError, command_line, number, program


def run_once(flags, read, until):
    """Train a run, or continue it, like train.run_once, without this read until a step."""
    try:
        reader, read_token = read.split(" -> ")
        path = path_from(dict(layer=0, head=0, reader=reader, read=read_token), flags.problem)
    except (ValueError, AttributeError):
        raise UserError(f"{read} is no read: write two roles, as in 1b -> 1a") from None
    layers, stopped = range(flags.layers), []
    steps = iter(range(1, until + 1))

    def predict(model, flags, index):
        batch = train.sequences(flags, index.to(flags.device))
        allowed = ~mask_of([path], flags.problem, batch.positions)

        def write(pattern, values):
            pattern = pattern * allowed
            return pattern / pattern.sum(-1, keepdim=True) @ values

        if torch.is_grad_enabled() and next(steps) == until:
            stopped.append(True)
        heads = {(layer, head): write for layer in layers for head in range(flags.heads)}
        with train.precision(flags):
            return model(batch.inputs, heads), batch.targets

    if not (flags.out / "state.pt").exists():
        with mock.patch.object(train, "predict", predict):
            train.run_once(flags, stopped)
    flags.resume = True
    train.run_once(flags)
    file = flags.out / "config.json"
    saved = json.loads(file.read_text(encoding="utf-8")) | dict(late=[read, until])
    train.write_text(file, json.dumps(saved, indent=1) + "\n")


def main():
    with program("python -m extras.studies.late"):
        p = command_line("python -m extras.studies.late", __doc__)
        p.add_argument("read", help='two roles, say "1b -> 1a"; all flags of train.py follow')
        p.add_argument("until", type=number(int, 1), help="the step from which on it is free")
        args, rest = p.parse_known_args()
        flags = train.parse_flags(rest)
        run_once(flags, args.read, args.until)
        print(train.summary(flags.out))


if __name__ == "__main__":
    main()
