"""Run a stage of this repository with the tasks of the studies, here --task shuffled:

python -m extras.studies.stage train --layers 3 --heads 4 --D 2 --task shuffled
python -m extras.studies.stage ablate out/L3_H4_shuffled_D2_s0
"""

import importlib
import sys


STAGES = "data", "train", "sweep", "ablate", "analyze"


if __name__ == "__main__":
    if not {*sys.argv[1:2]} & {*STAGES}:
        sys.exit(__doc__)
    importlib.import_module(sys.argv.pop(1)).main()
