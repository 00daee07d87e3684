"""How threads should wait beside processes that keep the cores busy.

    python -m bench.machine       # 7 minutes on 2 cores

Two threads that wait for each other can wait by turning in a circle. That is fastest on a quiet
machine; on a busy one they turn in the time that the other would need. GOMP_SPINCOUNT says how
often they turn before they sleep; parts/__init__.py chooses it. All settings take turns, and the
median counts.
"""

import itertools
import os
import statistics
import subprocess
import sys
import time


SETTINGS = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "all cores, 300000 turns (GCC's default)": {"GOMP_SPINCOUNT": "300000"},
    "all cores, 10000 turns (ours, quiet)": {"GOMP_SPINCOUNT": "10000"},
    "all cores, 1000 turns": {"GOMP_SPINCOUNT": "1000"},
    "all cores, no turn (ours, busy)": {"GOMP_SPINCOUNT": "0"},
}
BUSY, ROUNDS, SECONDS = [0, 1, 3], 7, 3
BURN = [sys.executable, "-c", "while True: pass"]


def main_command():
    """A function that trains the model of the main command on the batch of a step."""
    import train

    flags = train.parse_flags("--layers 12 --heads 1 --D 3".split())
    train.keep_freed_memory()
    model = train.runs.build(flags)
    trained_by = train.OPTIMIZERS[flags.optimizer](model, flags)

    def step(number):
        index = train.batch_index(flags.seed, number, flags.batch, flags.examples)
        predictions, targets = train.predict(model, flags, index)
        train.partial_losses(predictions, targets, flags.K).mean().backward()
        for optimizer in trained_by:
            optimizer.step()
            optimizer.zero_grad()

    return step


def serve():
    """A child: for every line on stdin train for SECONDS, and print the steps per second."""
    step = main_command()
    step(0)
    print("ready", flush=True)
    for _ in sys.stdin:
        started, steps = time.perf_counter(), 0
        while time.perf_counter() - started < SECONDS:
            step(steps)
            steps += 1
        print(steps / (time.perf_counter() - started), flush=True)


def ask(child):
    child.stdin.write("go\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def measure_neighbours():
    """{(setting, busy processes): [steps per second, ...]}"""
    # one process per setting; all but one sleep
    children = {}
    for name, setting in SETTINGS.items():
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        command = [sys.executable, "-m", "bench.machine", "child"]
        children[name] = subprocess.Popen(command, **pipes, env=os.environ | setting)
        children[name].stdout.readline()

    # in turns
    rates = {}
    for busy in BUSY:
        burners = [subprocess.Popen(BURN) for _ in range(busy)]
        for _, name in itertools.product(range(ROUNDS), SETTINGS):
            rates.setdefault((name, busy), []).append(ask(children[name]))
        for burner in burners:
            burner.kill()
    for child in children.values():
        child.stdin.close()
    return rates


def main():
    rates = measure_neighbours()

    # the table of steps per second
    titles = ["steps/s, median (lowest to highest)", *(f"beside {busy}" for busy in BUSY)]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for name in SETTINGS:
        cells = []
        for busy in BUSY:
            measured = rates[name, busy]
            median = statistics.median(measured)
            cells.append(f"{median:.2f} ({min(measured):.2f} to {max(measured):.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    serve() if sys.argv[1:] else main()
