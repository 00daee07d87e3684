"""llm.py against the scripted server of the tests, which runs in a process of its own.

    python bench/llm_server.py --faults 0.05            # a fault in 5% of the requests
    python bench/llm_server.py --delay 0.1 --rounds 5   # questions per second, 32 connections

With --faults: is each of the 2,500 questions answered once? Without: "server alone" is 32 threads
with plain http.client connections that send the same prompts and throw the answers away; "openai
client" is the client that llm.py uses with nothing around it; the time of llm.py is that of the
whole command, its start included. The three take turns.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from llm import __main__ as llm
from tests import scripted_server as scripted


HERE = Path(__file__).resolve().parents[1]


FAULTS = ["rate limit", "overloaded", "bad gateway", "silent", "broken JSON", "error as 200"]
FAULTS += ["web page", "empty", "endless tokens", "reset", "cut off"]
CONNECTIONS = 32


# ---- the server


def serve(delay, rate, results, commands):
    """In a process of its own: put the url; at a command, put what was given and answered."""
    rng, given = random.Random(0), Counter()

    def fault(number):
        kind = rng.choice(FAULTS) if rng.random() < rate else None
        given[kind] += 1
        return kind

    with scripted.scripted_server(scripted.right_with_probability_06, fault, delay) as server:
        results.put(server.url)
        commands.get()
        results.put((given, [len(answers) for answers in server.answers.values()]))


@contextlib.contextmanager
def server_process(delay, rate=0.0):
    """Yields (url, finish); finish() ends the server and returns (faults given, times that each
    prompt was answered)."""
    results, commands = multiprocessing.Queue(), multiprocessing.Queue()
    process = multiprocessing.Process(target=serve, args=(delay, rate, results, commands))
    process.start()
    try:
        yield results.get(), lambda: commands.put(None) or results.get()
    finally:
        process.terminate()
        process.join()


# ---- those who ask


def seconds_alone(url, bodies):
    todo, lock, host = list(bodies), threading.Lock(), url.split("/")[2]

    def work():
        connection = http.client.HTTPConnection(host)
        while True:
            with lock:
                if not todo:
                    return
                body = todo.pop()
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            connection.getresponse().read()

    threads, start = (
        [threading.Thread(target=work) for _ in range(CONNECTIONS)],
        time.perf_counter(),
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def seconds_client(url, bodies):
    import openai

    todo = iter(bodies)

    async def work(client):
        for body in todo:
            await client.chat.completions.create(**json.loads(body))

    async def everything():
        async with openai.AsyncOpenAI(api_key="none", base_url=url) as client:
            await asyncio.gather(*(work(client) for _ in range(CONNECTIONS)))

    start = time.perf_counter()
    asyncio.run(everything())
    return time.perf_counter() - start


def run(url, n, path, *flags):
    """(seconds, stdout) of llm.py with five times n questions."""
    settings = "--model scripted --D 5 --concurrency".split()
    command = [sys.executable, llm.__file__, *settings, str(CONNECTIONS)]
    command += ["--n", str(n), "--out", str(path), *flags]
    start = time.perf_counter()
    with scripted.environment(url):
        process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return time.perf_counter() - start, process.stdout


# ---- what is measured


def print_faults(url, finish, n, folder):
    path = Path(folder, "answers.jsonl")
    seconds, out = run(url, n, path, "--timeout", "0.5")
    given, answered = finish()
    kinds = {kind: count for kind, count in given.items() if kind}
    print(out[out.index("formulation") :])
    print(f"{seconds:.1f} s; {given.total()} requests, {sum(kinds.values())} faults: {kinds}")
    print(f"settled questions in the file: {len(scripted.attempts_in(path))}")
    print(f"prompts by how often they were answered: {dict(Counter(answered))}")


def print_rates(url, n, rounds, folder):
    bodies = []
    for index in range(n):
        for formulation in llm.FORMULATIONS:
            D = 5 if formulation == "equations" else None
            prompt = llm.make_question(formulation, D, 0, index)[0]
            messages = [{"role": "user", "content": prompt}]
            bodies.append(json.dumps({"model": "scripted", "messages": messages}))
    seconds = {"server alone": [], "openai client": [], "llm.py": []}
    for turn in range(rounds):
        seconds["server alone"].append(seconds_alone(url, bodies))
        seconds["openai client"].append(seconds_client(url, bodies))
        seconds["llm.py"].append(run(url, n, Path(folder, str(turn)))[0])
    for who, times in seconds.items():
        rates = [round(len(bodies) / time) for time in times]
        print(f"{who:>13}: {statistics.median(rates):.0f} questions/s, median of {rates}")
    ratio = statistics.median(seconds["llm.py"]) / statistics.median(seconds["server alone"])
    print(f"server alone / llm.py: {ratio:.2f}")


def main():
    layout = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=layout)
    p.error = lambda message: p.exit(2, f"llm_server.py: {message}\n")

    def flag(name, default, help):
        help = f"{help} (default: {default})"
        p.add_argument(f"--{name}", default=default, type=type(default), help=help)

    flag("faults", 0.0, "share of the requests that meet one")
    flag("delay", 0.0, "seconds the server thinks")
    flag("n", 500, "questions per formulation, of which there are 5")
    flag("rounds", 5, "turns of the three")
    args = p.parse_args()
    if not (0 <= args.faults < 1 and args.delay >= 0 and min(args.n, args.rounds) >= 1):
        p.error("--faults must be in [0, 1), --delay at least 0, --n and --rounds at least 1")
    with (
        tempfile.TemporaryDirectory() as folder,
        server_process(args.delay, args.faults) as (url, finish),
    ):
        if args.faults:
            print_faults(url, finish, args.n, folder)
        else:
            print_rates(url, args.n, args.rounds, folder)


if __name__ == "__main__":
    main()
