"""Train with the attention frozen to a circuit (Section 5): what its paths let a depth learn.

    python -m extras.studies.frozen minimal --layers 3 --heads 1 --D 8 --out out/frozen_L3

config.json of the run then has "circuit": "minimal" beside the flags.
"""

import train
from ablate import frozen_heads
from data import command_line, program
from extras.studies.theory import frozen_paths


if __name__ == "__main__":
    with program("python -m extras.studies.frozen"):
        p = command_line("python -m extras.studies.frozen", __doc__)
        p.add_argument("circuit", help="minimal; all flags of train.py follow it")
        args, rest = p.parse_known_args()
        flags = train.parse_flags(rest)
        paths = frozen_paths(flags, args.circuit)

        def intervene(step, positions):
            return frozen_heads(paths, flags.problem, positions)

        train.run_once(flags, intervene=intervene)
        file = flags.out / "config.json"
        train.write_file(file, train.read_file(file) | dict(circuit=args.circuit))
        print(train.summary(flags.out))
