"""Measure one of the related systems, write it as JSON, print its tables and save its figure."""

import importlib
import json
from pathlib import Path

from analyze import save_figure
from data import command_line, program
from extras import mechanisms
from train import read_file, writing


NAMES = ("memories", "recall", "bigrams", "noise", "hops")


def measure(tasks, path):
    """Write the results of these TASKS, row by row, and return them; rows in the file are kept."""
    results = read_file(path, {})
    for function, seeds, rows, _ in tasks:
        measured = results.setdefault(function.__name__, [])
        for arguments in rows:
            if not any(arguments.items() <= row.items() for row in measured):
                print(f"{function.__name__} {arguments}", flush=True)
                values = [function(seed, **arguments) for seed in range(seeds)]
                measured.append(arguments | dict(values=values))
                with writing(path):
                    path.write_text(json.dumps(results))
    return results


def main():
    program_name = "python -m extras.mechanisms"
    with program(program_name):
        p = command_line(program_name, mechanisms.__doc__.partition("\n\nA system")[0])
        p.add_argument("name", choices=NAMES, help="the system")
        p.add_argument("--out", type=Path, default="out/mechanisms", help="folder; its rows stay")
        args = p.parse_args()

        module = importlib.import_module(f"extras.mechanisms.{args.name}")
        path = args.out / f"{args.name}.json"
        results = measure(module.TASKS, path)
        for function, _, _, table in module.TASKS:
            if table:
                print(mechanisms.markdown(table(results[function.__name__])), end="\n\n")
        if hasattr(module, "draw"):
            save_figure(module.draw(results), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
