"""llm.py against the scripted server of the tests, which runs in a process of its own.

    python bench/llm_server.py --faults 0.05              # 2,500 questions, a fault in 5% of the requests: each answered once?
    python bench/llm_server.py --delay 0.1 --rounds 5     # throughput at 32 connections against the server alone, in turns

"Alone" is 32 threads with plain http.client connections that send the same prompts and throw the answers away;
"openai client" is the client that llm.py uses with nothing around it. The time of llm.py is that of the whole command,
its start included.
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

sys.path.insert(0, str(Path(__file__).parent.parent))
import llm
import test_all as tests

FAULTS = ["rate limit", "overloaded", "bad gateway", "silent", "broken JSON", "error as 200", "web page", "empty", "reset",
          "cut off"]


def serve(delay, rate, results, commands):
    rng, given = random.Random(0), Counter()

    def fault(number):
        kind = rng.choice(FAULTS) if rng.random() < rate else None
        given[kind] += 1
        return kind

    with tests.scripted_server(tests.right_with_probability_06, fault, delay) as server:
        results.put(server.url)
        commands.get()
        results.put((given, [len(answers) for answers in server.answers.values()]))


@contextlib.contextmanager
def server_process(delay, rate=0.0):
    """Yields (url, finish); finish() ends the server and returns (faults given, prompts answered)."""
    results, commands = multiprocessing.Queue(), multiprocessing.Queue()
    process = multiprocessing.Process(target=serve, args=(delay, rate, results, commands))
    process.start()
    try:
        yield results.get(), lambda: commands.put(None) or results.get()
    finally:
        process.terminate()
        process.join()


def seconds_alone(url, bodies, connections=32):
    todo, lock, host = list(bodies), threading.Lock(), url.split("/")[2]

    def work():
        connection = http.client.HTTPConnection(host)
        while True:
            with lock:
                if not todo:
                    return
                body = todo.pop()
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            connection.getresponse().read()

    threads, start = [threading.Thread(target=work) for _ in range(connections)], time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def seconds_client(url, bodies, connections=32):
    import openai
    todo = iter(bodies)

    async def work(client):
        for body in todo:
            await client.chat.completions.create(**json.loads(body))

    async def everything():
        async with openai.AsyncOpenAI(api_key="none", base_url=url) as client:
            await asyncio.gather(*(work(client) for _ in range(connections)))

    start = time.perf_counter()
    asyncio.run(everything())
    return time.perf_counter() - start


def run(url, n, path, *flags):
    """(seconds, stdout) of llm.py with five times n questions."""
    start = time.perf_counter()
    with tests.environment(url):
        process = subprocess.run([sys.executable, llm.__file__, "--model", "scripted", "--n", str(n), "--D", "5", "--out",
                                  str(path), "--concurrency", "32", *flags], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return time.perf_counter() - start, process.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=float, default=0.0, help="share of requests (default: %(default)s)")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds the server thinks (default: %(default)s)")
    parser.add_argument("--n", type=int, default=500, help="per formulation, of which 5 (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server_process(args.delay, args.faults) as (url, finish):
        if args.faults:
            path = Path(folder, "answers.jsonl")
            seconds, out = run(url, args.n, path, "--timeout", "0.5")
            questions = tests.attempts_in(path)
            given, answered = finish()
            times = dict(Counter(answered))
            print(out)
            print(f"{seconds:.1f} s; the server got {given.total()} requests and gave faults to "
                  f"{given.total() - given[None]}: {({k: v for k, v in given.items() if k})}")
            print(f"settled questions in the file: {len(questions)}; prompts by how often they were answered: {times}")
            return
        bodies = [json.dumps({"model": "scripted", "messages": [
            {"role": "user", "content": llm.make_question(f, 5 if f == "equations" else None, 0, i)[0]}]})
            for i in range(args.n) for f in llm.FORMULATIONS]
        alone, client, ours = [], [], []
        for turn in range(args.rounds):
            alone.append(len(bodies) / seconds_alone(url, bodies))
            client.append(len(bodies) / seconds_client(url, bodies))
            ours.append(len(bodies) / run(url, args.n, Path(folder, str(turn)))[0])
    for who, rates in (("server alone", alone), ("openai client", client), ("llm.py", ours)):
        print(f"{who:>13}: {statistics.median(rates):.0f} questions/s, median of {[round(rate) for rate in rates]}")
    print(f"server alone / llm.py: {statistics.median(alone) / statistics.median(ours):.2f}")


if __name__ == "__main__":
    main()
