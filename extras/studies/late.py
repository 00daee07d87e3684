"""Train with one read ablated in all heads until a step, and as ever from there on: does x_1 wait
for the read, or can it do without an early start (Section 9.1)?

    python -m extras.studies.late "1b -> 1a" 200 --layers 12 --heads 1 --D 3 --out out/late

1b -> 1a-2, a control, reads the token two before 1a, the 1a of the pair that stands before it. The
reader attends as if what it reads were not there; one that could see nothing else writes nothing.
This is no clean ablation: the reader may tell from the other tokens which one is missing
(results/emergence.md). config.json then has "late": ["1b -> 1a", 200] beside the flags.
"""

import re

import train
from ablate import Path, mask_of
from data import UserError, command_line, number, program
from extras.studies.frozen import run_with


def heads_without(read, flags, positions):
    """Return {(layer, head): f} of all heads, whose readers cannot see what they read; read: two
    tokens, "1b -> 1a"; positions (B, N, roles)."""
    reader, token = read.split(" -> ")
    seen = ~mask_of([Path(0, 0, reader, token)], flags.problem, positions)

    def write(pattern, values):
        pattern = pattern * seen
        return pattern / pattern.sum(-1, keepdim=True).clamp(min=1e-37) @ values

    return {(layer, head): write for layer in range(flags.layers) for head in range(flags.heads)}


def run_once(flags, read, until):
    """Train a run, or continue it, like train.run_once, without this read until a step."""

    def intervene(step, positions):
        return heads_without(read, flags, positions) if step < until else None

    run_with(flags, intervene, late=[read, until])


def main():
    with program("python -m extras.studies.late"):
        p = command_line("python -m extras.studies.late", __doc__)
        p.add_argument("read", help='two tokens, say "1b -> 1a"; all flags of train.py follow')
        p.add_argument("until", type=number(int, 1), help="the step from which on it is free")
        args, rest = p.parse_known_args()
        flags = train.parse_flags(rest)
        end = rf"({'|'.join(flags.problem.names)})([+-]\d+)?"
        if not re.fullmatch(f"{end} -> {end}", args.read):
            raise UserError(f"{args.read} is no read: write two tokens, 1b -> 1a or 1b -> 1a-2")
        run_once(flags, args.read, args.until)
        print(train.summary(flags.out))


if __name__ == "__main__":
    main()
