"""Measure a related system from the slides on mechanisms in transformers (Alberto Bietti), write
its rows, print its tables and save its figure.

    python -m extras.mechanisms recall                             # into out/mechanisms
    python -m extras.mechanisms recall --out results/mechanisms    # draw the committed rows again
"""

import importlib
from pathlib import Path

from analyze import save_figure
from data import command_line
from extras.mechanisms import NAMES, read_results
from train import read_file, write_file


def measure(tasks, path):
    """Measure the rows of these TASKS that a file does not have, and add each to it."""
    rows = read_file(path, [])
    for function, seeds, settings, _ in tasks:
        for arguments in settings:
            wanted = dict(function=function.__name__) | arguments
            if not any(wanted.items() <= row.items() for row in rows):
                print(f"{function.__name__} {arguments}", flush=True)
                values = [function(seed, **arguments) for seed in range(seeds)]
                rows.append(wanted | dict(values=values))
                write_file(path, rows)


def main():
    p = command_line("python -m extras.mechanisms", __doc__)
    p.add_argument("name", choices=NAMES, help="the system")
    p.add_argument("--out", type=Path, default="out/mechanisms", help="folder; its rows stay")
    args = p.parse_args()

    module = importlib.import_module(f"extras.mechanisms.{args.name}")
    path = args.out / f"{args.name}.jsonl"
    measure(module.TASKS, path)
    results = read_results(path)
    for function, _, _, text in module.TASKS:
        if text:
            print(text(results[function.__name__]), end="\n\n")
    save_figure(module.draw(results), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
