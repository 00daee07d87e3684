"""Benchmark language models on the retrieval problem in words (Section 4, Appendix A).

    python -m extras.llm --show equations                 # print one question and its answer
    python -m extras.llm --model gpt-4o-mini              # ask all questions, or continue a run
    python -m extras.llm --plot out/llm_*/answers.jsonl   # draw Figure 2, or of out/weights.jsonl

The model is asked through any OpenAI-compatible server. Set OPENAI_API_KEY to use OpenAI, or
OPENAI_BASE_URL to use another server (and OPENAI_API_KEY too if that server wants a key).
"""

import asyncio
import gzip
import json
import math
import os
from collections import Counter, defaultdict
from pathlib import Path

from analyze import panels, save_figure
from data import command_line, progress
from extras.llm import package
from extras.llm.questions import FORMULATIONS, make_question
from train import read_file

import numpy as np


NAMES = list(FORMULATIONS)
REQUESTS = 8  # the number of requests at the same time
RETRIES = 6  # per request; the client's default of 2 is too few when a server limits the rate


# ---- asking


def read_answers(path):
    """Read {(formulation, D, index): [attempt, ...]} from a file with one attempt per line. A last
    line that a kill has cut short is left out."""
    answers = defaultdict(list)
    text = (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8").read()
    for attempt in map(json.loads, text[: text.rfind("\n") + 1].splitlines()):
        answers[attempt["formulation"], attempt["D"], attempt["index"]].append(attempt)
    return answers


def outcome(attempts):
    """Return "right", "wrong" or "never settled", and None for a question that goes on."""
    if not attempts:
        return None
    last = attempts[-1]
    if last["acceptable"]:
        return "right" if last["correct"] else "wrong"
    return "never settled" if len(attempts) >= last["settings"]["attempts"] else None


async def ask(client, settings, question):
    """Ask a question once. Returns an attempt, which is a line of the answers file. Raises what the
    client raises, RuntimeError if the server says that it failed."""
    formulation, D, index = question
    prompt, correct, acceptable = make_question(formulation, D, settings["seed"], index)

    # OpenAI has renamed this option, and some other servers only know its old name
    limit = "max_tokens" if settings["endpoint"] != "api.openai.com" else "max_completion_tokens"
    sent = await client.chat.completions.create(
        model=settings["model"],
        messages=[{"role": "user", "content": prompt}],
        temperature=settings["temperature"],
        extra_body={limit: settings["max_tokens"]},
    )
    choice = sent.choices[0]
    if choice.finish_reason == "error":  # as some servers say it, with status 200
        raise RuntimeError(f"{settings['endpoint']} failed to complete: {sent}")
    answer = choice.message.content or ""  # None if it is all reasoning

    # ignore a <think> block, case, quotes, bold marks, and a full stop
    word = answer.rpartition("</think>")[2].strip(" \t\r\n.\"'*`").casefold()
    return {
        "formulation": formulation,
        "D": D,
        "index": index,
        "settings": settings,
        "answer": answer,
        "expected": correct,
        "correct": word == correct.casefold(),
        "acceptable": word in [other.casefold() for other in acceptable],
    }


async def benchmark(args):
    """Ask every question until it has an outcome, append the attempts to a file, print counts."""
    key = os.environ.get("OPENAI_API_KEY") or "no key"  # of a server that wants none
    client = package("openai").AsyncOpenAI(api_key=key, max_retries=RETRIES)
    settings = {"model": args.model, "endpoint": client.base_url.netloc.decode()}
    names = "seed", "temperature", "max_tokens", "attempts"
    settings |= {name: getattr(args, name) for name in names}

    path = args.out / f"llm_{args.model.replace('/', '-')}" / "answers.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    answers = read_answers(path)
    for attempts in answers.values():
        if (other := attempts[0]["settings"]) != settings:
            raise FileExistsError(f"{path} has other settings, {other}: choose another --out")
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # without the line that was cut short

    # the formulations take turns, so that a stopped run has a share of each
    kinds = [("equations", D) for D in sorted({*args.D})] + [(name, None) for name in NAMES[1:]]
    questions = [(*kind, index) for index in range(args.n) for kind in kinds]
    left = [question for question in questions if not outcome(answers[question])]
    slots = asyncio.Semaphore(REQUESTS)

    async def finish(question):
        async with slots:
            while not outcome(answers[question]):
                attempt = await ask(client, settings, question)
                answers[question].append(attempt)
                file.write(json.dumps(attempt) + "\n")
                file.flush()

    with open(path, "a", encoding="utf-8") as file:
        tasks = map(asyncio.create_task, map(finish, left))  # they start in this order
        for finished in progress("question", [*asyncio.as_completed(tasks)]):
            await finished
    print(path, json.dumps(settings))
    for (formulation, D), count in count_outcomes(path)[1].items():
        print(formulation, D or "", dict(sorted(count.items())))


# ---- counts and Figure 2


def count_outcomes(path):
    """Return the settings of an answers file, and a Counter of outcomes per (formulation, D)."""
    answers, counts = read_answers(path), defaultdict(Counter)
    for formulation, D, index in sorted(answers, key=lambda key: (NAMES.index(key[0]), key[1:])):
        attempts = answers[formulation, D, index]
        if ended := outcome(attempts):
            counts[formulation, D][ended] += 1
    return attempts[0]["settings"], counts


def wilson(successes, n, z=1.959964):
    """Return Wilson's 95% interval (low, high) of the share behind `successes` of n."""
    middle = successes + z * z / 2
    half = z * math.sqrt(successes * (n - successes) / n + z * z / 4)
    return max(0.0, (middle - half) / (n + z * z)), min(1.0, (middle + half) / (n + z * z))


def accuracies(path):
    """Return {model: {(formulation, D): (right, n)}}, n being the questions with an acceptable
    answer: those that settled in an answers file, and all in weights.jsonl, whose answers are the
    likeliest acceptable ones."""
    if path.name != "weights.jsonl":
        settings, counts = count_outcomes(path)
        points = {kind: (count["right"], count["wrong"]) for kind, count in counts.items()}
        return {settings["model"]: {kind: (r, r + w) for kind, (r, w) in points.items() if r + w}}
    models = defaultdict(dict)
    for row in read_file(path):
        if row["what"] == "choices":
            models[row["model"]][row["formulation"], row["D"]] = row["correct"], row["n"]
    return models


def draw_figure2(paths):
    """Draw Figure 2 from answers files, or weights.jsonl: accuracy by D for the equations (left)
    and for all formulations (right)."""
    figure, (left, right) = panels(2, 2, 5, 3.4, sharey=True)
    models = [item for path in paths for item in accuracies(path).items()]
    width = 0.8 / len(models)  # they stand side by side
    for i, (model, points) in enumerate(models):
        label = f"{model} (n = {max((n for _, n in points.values()), default=0)})"
        by_D = {D: points[name, D] for name, D in points if D}
        by_name = {NAMES.index(name): points[name, D] for name, D in points if D in (None, 5)}
        for panel, chosen, line in (left, by_D, "-"), (right, by_name, ""):
            x = np.array([*chosen]) + width * (i + 0.5) - 0.4
            share = np.array([100 * right / n for right, n in chosen.values()])
            intervals = 100 * np.array([wilson(*point) for point in chosen.values()]).reshape(-1, 2)
            style = dict(color=f"C{i}", marker="o", ls=line, capsize=3, label=label)
            panel.errorbar(x, share, np.abs(intervals.T - share), **style)
    left.axhline(25, color="black", ls="--", lw=1, label="random guess: 1/4, relatives 1/16")
    right.hlines([25, 6.25], [-0.5, 3.5], [3.5, 4.5], color="black", ls="--", lw=1)
    left.set(title="F1 equations", xlabel="D (equations per chain)", ylim=(-4, 104))
    left.set_ylabel("right (% of acceptable answers)")
    right.set(title="All formulations (equations at D = 5)", xticks=range(5), xticklabels=NAMES)
    figure.suptitle("95% Wilson intervals. The paper asked 500 questions each, and other models.")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def main():
    p = command_line("python -m extras.llm", __doc__)
    task = p.add_mutually_exclusive_group(required=True)
    task.add_argument("--show", choices=FORMULATIONS, help="print one question")
    task.add_argument("--model", help="ask the model of this name")
    task.add_argument("--plot", nargs="+", type=Path, metavar="FILE", help="draw answers files")
    add = p.add_argument
    add("--n", default=500, type=int, help="number of questions per formulation and D")
    add("--D", nargs="+", default=[5, 1, 2, 3, 4, 7, 10], type=int, help="equations per chain")
    add("--seed", default=0, type=int, help="seed of the questions")
    add("--temperature", default=1.0, type=float, help="sampling temperature")
    add("--attempts", default=10, type=int, help="answers to wait for an acceptable one")
    add("--max-tokens", default=4096, type=int, help="tokens in an answer, reasoning included")
    add("--out", default=Path("out"), type=Path, help="for llm_MODEL/ and figure2.png")
    args = p.parse_args()
    if min(args.n, args.attempts, args.max_tokens, *args.D) < 1:
        p.error("--n, --attempts, --max-tokens and --D must be positive")
    if args.show:
        prompt, correct, acceptable = make_question(args.show, args.D[0], args.seed, 0)
        print(f"{prompt}\nCorrect: {correct}\nAcceptable: {', '.join(acceptable)}")
    elif args.plot:
        save_figure(draw_figure2(args.plot), args.out / "figure2.png")
        print(args.out / "figure2.png")
    elif {"OPENAI_API_KEY", "OPENAI_BASE_URL"} & {*os.environ}:
        asyncio.run(benchmark(args))
    else:
        p.error("--model needs OPENAI_API_KEY or OPENAI_BASE_URL; extras.llm.weights needs none")


if __name__ == "__main__":
    main()
