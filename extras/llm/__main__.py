"""Benchmark language models on the retrieval problem in words (Section 4, Appendix A).

    python -m extras.llm --show equations                 # print one question and its answer
    python -m extras.llm --model gpt-4o-mini              # ask all questions, or continue a stopped run
    python -m extras.llm --plot out/llm_*/answers.jsonl   # draw Figure 2 from the answers of some models

The model is asked through any OpenAI-compatible server. Set OPENAI_API_KEY to use OpenAI, or
OPENAI_BASE_URL to use another server (and OPENAI_API_KEY too if that server wants a key).
"""

import asyncio
import gzip
import json
import os
import time
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import openai

from analyze import save_figure
from data import UserError, command_line, program
from extras.llm.questions import FORMULATIONS, INSTALL, make_question
from extras.studies.stats import print_progress, wilson
from train import alone_in


NAMES = list(FORMULATIONS)
REQUESTS = 8  # the number of requests at the same time
RETRIES = 6  # per request; the client's default of 2 is too few when a server limits the rate


def read_answers(path):
    """Read {(formulation, D, index): [attempt, ...]} from a file with one attempt per line. A last
    line that a kill has cut short is left out. Raises UserError if the file is damaged."""
    answers = defaultdict(list)
    try:
        text = (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8").read()
        for line in text[: text.rfind("\n") + 1].splitlines():
            attempt = json.loads(line)
            answers[attempt["formulation"], attempt["D"], attempt["index"]].append(attempt)
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged, or no answers file ({type(error).__name__})") from None
    return answers


def finished(attempts):
    last = attempts and attempts[-1]
    return last and (last["acceptable"] or len(attempts) == last["settings"].get("attempts", 10))


async def ask(client, settings, question):
    """Ask a question once. Returns an attempt, which is a line of the answers file. UserError if
    the server rejects the request, or still fails when the client has repeated it."""
    formulation, D, index = question
    prompt, correct, acceptable = make_question(formulation, D, settings["seed"], index)

    # OpenAI has renamed this option, and some other servers only know its old name
    limit = "max_tokens" if settings["endpoint"] != "api.openai.com" else "max_completion_tokens"
    request = {"model": settings["model"], "messages": [{"role": "user", "content": prompt}]}
    request |= {"temperature": settings["temperature"], limit: settings["max_tokens"]}
    try:
        reply = await client.chat.completions.create(**request)
        answer = reply.choices[0].message.content or ""  # None if it is all reasoning
    except (openai.OpenAIError, AttributeError, LookupError, TypeError, ValueError) as error:
        # the server may repeat the key; repr() makes one line without control codes
        text = repr(str(error).replace(client.api_key, "***")[:300])
        hint = "check OPENAI_BASE_URL (it often ends in /v1), OPENAI_API_KEY and --model"
        raise UserError(f"{settings['endpoint']} sent no chat completion: {text}; {hint}") from None

    # ignore a <think> block, case, quotes, bold marks, and a full stop
    word = answer.rpartition("</think>")[2].strip(" \t\r\n.\"'*`").casefold()
    attempt = {"formulation": formulation, "D": D, "index": index, "settings": settings}
    attempt |= {"answer": answer, "expected": correct, "correct": word == correct.casefold()}
    return attempt | {"acceptable": word in [other.casefold() for other in acceptable]}


async def benchmark(args):
    """Ask every question until it is finished, append the attempts to a file, print the scores."""
    try:
        no_key = "no key" if os.environ.get("OPENAI_BASE_URL") else None
        key = os.environ.get("OPENAI_API_KEY") or no_key
        client = openai.AsyncOpenAI(api_key=key, max_retries=RETRIES)
    except Exception:  # its text may repeat the address, which may hold a password
        server = "OPENAI_BASE_URL to the address of a server, such as http://localhost:11434/v1"
        local = (
            f"{INSTALL}, then python -m extras.bench.language choices --model SmolLM2-135M-Instruct"
        )
        text = f"set OPENAI_API_KEY to use OpenAI, or {server}; or, without an account, {local}"
        raise UserError(text) from None
    if not args.model:
        raise UserError("name a model with --model, such as --model gpt-4o-mini")

    settings = {"model": args.model, "endpoint": client.base_url.netloc.decode()}
    settings |= {key: getattr(args, key) for key in "seed temperature max_tokens attempts".split()}
    path = args.out / f"llm_{args.model.replace('/', '-')}" / "answers.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(path.parent), open(path, "a", encoding="utf-8") as file:
        answers = read_answers(path)
        for old in [attempts[0]["settings"] for attempts in answers.values()]:
            if old != settings:
                raise UserError(f"{path} has other settings, {old}: use another --out")

        # remove a last line that a kill has cut short
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

        # the formulations take turns, so that a stopped run has a share of each
        kinds = [("equations", D) for D in sorted({*args.D})]
        kinds += [(formulation, None) for formulation in NAMES[1:]]
        questions = [(*kind, index) for index in range(args.n) for kind in kinds]
        left = [question for question in questions if not finished(answers[question])]
        slots, done, start = asyncio.Semaphore(REQUESTS), 0, time.time()

        async def finish(question):
            nonlocal done
            async with slots:
                while not finished(answers[question]):
                    answers[question].append(await ask(client, settings, question))
                    file.write(json.dumps(answers[question][-1]) + "\n")
                    file.flush()
                done += 1
                print_progress("question", done, len(left), start)

        await asyncio.gather(*map(finish, left[:1]))  # alone, since the key may be wrong
        await asyncio.gather(*map(finish, left[1:]))
    print_scores(path)


def print_scores(path):
    """Print the scores in an answers file. Returns the name of the model and
    {(formulation, D): (accuracy, low, high, never_settled)}, with a Wilson 95% interval.

    Only finished questions count. A question that never settled counts as wrong."""
    last, scores = defaultdict(list), {}
    for question, attempts in read_answers(path).items():
        if finished(attempts):
            last[question[:2]].append(attempts[-1])
    if not last:
        raise UserError(f"{path} has no finished question")
    print(f"{path}: {attempts[0]['settings']}")
    print("formulation   D      n     accuracy     95% from           to  never settled")
    for formulation, D in sorted(last, key=lambda key: (NAMES.index(key[0]), key[1] or 0)):
        answers = last[formulation, D]
        n, correct = len(answers), sum(answer["correct"] for answer in answers)
        never_settled = sum(not answer["acceptable"] for answer in answers)
        scores[formulation, D] = (correct / n, *wilson(correct, n), never_settled / n)
        shares = "".join(f"{share:>13.1%}" for share in scores[formulation, D])
        print(f"{formulation:<12}{D or '':>3}{n:>7}{shares}")
    return attempts[0]["settings"]["model"], scores


def draw_figure2(paths, folder):
    """Draw Figure 2 from answers files: accuracy by D for the equations (left) and for all
    formulations (right), with Wilson 95% intervals, random guessing, and what never settled."""
    figure, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(10, 5.2), layout="constrained")
    for i, path in enumerate(paths):
        model, scores = print_scores(path)
        side = 0.4 * ((i + 0.5) / len(paths) - 0.5)  # models stand side by side
        by_D = {D: y for (_, D), y in scores.items() if D}
        by_name = {NAMES.index(name): y for (name, D), y in scores.items() if D in (None, 5)}
        for axes, points, style in (left, by_D, "o-"), (right, by_name, "o"):
            x = np.array([*points]) + side
            accuracy, low, high, never = 100 * np.reshape([*points.values()], (-1, 4)).T
            error = np.abs([low - accuracy, high - accuracy])
            axes.errorbar(x, accuracy, error, fmt=style, color=f"C{i}", capsize=3, label=model)
            axes.plot(x, never, "x", color=f"C{i}", label=f"{model}: never settled")
    left.axhline(25, color="black", ls="--", lw=1, label="random guessing: 1/4, relatives 1/16")
    right.hlines([25, 6.25], [-0.5, 3.5], [3.5, 4.5], color="black", ls="--", lw=1)
    left.set(title="F1 equations", xlabel="D (equations per chain)", ylim=(-4, 104))
    left.set_ylabel("accuracy (%), Wilson 95% intervals")
    right.set(title="All formulations (equations at D = 5)", xticks=range(5), xticklabels=NAMES)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    folder.mkdir(parents=True, exist_ok=True)
    save_figure(figure, folder / "figure2.png")
    print(folder / "figure2.png")


def main():
    p = command_line("extras.llm", __doc__)
    task = p.add_mutually_exclusive_group()
    task.add_argument("--show", choices=FORMULATIONS, help="print one question")
    task.add_argument("--model", help="ask the model of this name")
    task.add_argument("--plot", nargs="+", type=Path, metavar="FILE", help="draw answers files")
    for flag, value, text in (
        ("--n", 500, "number of questions per formulation and D"),
        ("--seed", 0, "seed of the questions"),
        ("--temperature", 1.0, "sampling temperature"),
        ("--attempts", 10, "a question without an acceptable answer after so many never settled"),
        ("--max-tokens", 4096, "largest number of tokens in an answer, reasoning included"),
        ("--out", Path("out"), "folder for llm_MODEL/answers.jsonl and figure2.png"),
    ):
        p.add_argument(flag, default=value, type=type(value), help=f"{text} (default: {value})")
    text = "equations per chain; --show takes the first (default: 5 1 2 3 4 7 10)"
    p.add_argument("--D", nargs="+", default=[5, 1, 2, 3, 4, 7, 10], type=int, help=text)
    args = p.parse_args()
    if min(args.n, args.attempts, args.max_tokens, *args.D) < 1 or not args.temperature >= 0:
        p.error("--n, --attempts, --max-tokens, --D must be at least 1, --temperature at least 0")
    with program("extras.llm"):
        if args.show:
            prompt, correct, acceptable = make_question(args.show, args.D[0], args.seed, 0)
            print(f"{prompt}\nCorrect: {correct}\nAcceptable: {', '.join(acceptable)}")
        elif args.plot:
            draw_figure2(args.plot, args.out)
        else:
            asyncio.run(benchmark(args))


if __name__ == "__main__":
    main()
