"""Train from the weights of another run, which has the same shape.

    python -m extras.studies.start out/9_places --task random8 --layers 1 ... --out out/11_places

config.json of the run then has "init": "9_places" beside the flags. To continue after a stop, add
--resume.
"""

from pathlib import Path

import train
from data import command_line


def main():
    p = command_line("python -m extras.studies.start", __doc__)
    p.add_argument("init", type=Path, help="a run directory; all flags of train.py follow it")
    args, rest = p.parse_known_args()
    flags = train.parse_flags(rest)

    # these two functions of train.py, for the rest of this process
    model = train.build(flags)
    model.load_state_dict(train.read_file(args.init / "model.pt"))
    provenance = train.provenance_of(flags) | dict(init=args.init.name)
    train.build = lambda flags: model
    train.provenance_of = lambda flags: provenance
    train.run_once(flags)


if __name__ == "__main__":
    main()
