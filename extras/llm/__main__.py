"""Benchmark language models on the retrieval problem in words (Section 4, Appendix A).

    python -m extras.llm --show equations                 # print one question and its answer
    python -m extras.llm --model gpt-4o-mini              # ask all questions, or continue a run
    python -m extras.llm --plot out/llm_*/answers.jsonl   # draw Figure 2 for some models

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
from data import UserError, command_line, program, progress
from extras.llm.questions import FORMULATIONS, make_question

import numpy as np
import openai


NAMES = list(FORMULATIONS)
REQUESTS = 8  # the number of requests at the same time
RETRIES = 6  # per request; the client's default of 2 is too few when a server limits the rate
REFUSALS = openai.BadRequestError, openai.UnprocessableEntityError  # 400 and 422
FAILURES = "never settled", "truncated", "refused"


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


def outcome(attempts):
    """Return how a question ended, "right", "wrong" or one of FAILURES; None if it goes on."""
    last = attempts[-1] if attempts else {"acceptable": False, "settings": {}}
    if last["acceptable"]:
        return "right" if last["correct"] else "wrong"
    if "refused" in last:
        return "refused"
    if len(attempts) >= last["settings"].get("attempts", 10):
        return "truncated" if last.get("finish") == "length" else "never settled"


async def ask(client, settings, question):
    """Ask a question once. Returns an attempt, which is a line of the answers file. UserError if
    the server sends no completion, or still fails when the client has repeated the request."""
    formulation, D, index = question
    prompt, correct, acceptable = make_question(formulation, D, settings["seed"], index)
    attempt = {"formulation": formulation, "D": D, "index": index, "settings": settings}
    attempt |= {"answer": "", "expected": correct, "correct": False, "acceptable": False}

    # OpenAI has renamed this option, and some other servers only know its old name
    limit = "max_tokens" if settings["endpoint"] != "api.openai.com" else "max_completion_tokens"
    body = {"model": settings["model"], "messages": [{"role": "user", "content": prompt}]}
    body |= {"temperature": settings["temperature"], limit: settings["max_tokens"]}
    body |= settings.get("extra", {})
    body = {field: value for field, value in body.items() if value is not None}
    sent = ""
    try:
        sent = await client.post("/chat/completions", body=body, cast_to=str)
        choice = json.loads(sent)["choices"][0]
        answer = choice["message"].get("content") or ""  # null if it is all reasoning
        if isinstance(answer, list):
            answer = "".join(part.get("text", "") for part in answer)

        # ignore a <think> block, case, quotes, bold marks, and a full stop
        word = answer.rpartition("</think>")[2].strip(" \t\r\n.\"'*`").casefold()
        attempt |= {"answer": answer, "finish": choice.get("finish_reason")}
        attempt["correct"] = word == correct.casefold()
    except Exception as error:  # a server can send anything
        # it may repeat the key; ascii() makes one line without control codes
        words = ascii((sent or str(error)).replace(client.api_key, "***")[:300])
        if isinstance(error, REFUSALS):
            return attempt | {"refused": words}
        text = f"{settings['endpoint']} sent no chat completion: {words}; check OPENAI_BASE_URL "
        raise UserError(f"{text}(often /v1 at its end), OPENAI_API_KEY and --model") from None
    return attempt | {"acceptable": word in [other.casefold() for other in acceptable]}


async def benchmark(args):
    """Ask every question until it has an outcome, append the attempts to a file, print counts."""
    try:
        key = os.environ.get("OPENAI_API_KEY") or os.environ.get("OPENAI_BASE_URL") and "no key"
        client = openai.AsyncOpenAI(api_key=key, max_retries=RETRIES)
    except Exception:  # its text may repeat the address, which may hold a password
        text = "set OPENAI_API_KEY to use OpenAI, or OPENAI_BASE_URL to the address of a server, "
        text += "such as http://localhost:11434/v1; extras/llm/README.md has two models without one"
        raise UserError(text) from None

    settings = {"model": args.model, "endpoint": client.base_url.netloc.decode()}
    settings |= {key: getattr(args, key) for key in "seed temperature max_tokens attempts".split()}
    settings |= {"extra": args.extra} if args.extra else {}
    path = args.out / f"llm_{args.model.replace('/', '-')}" / "answers.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    answers = read_answers(path)
    for old in [attempts[0]["settings"] for attempts in answers.values()]:
        if old != settings:
            raise UserError(f"{path} has other settings, {old}: use another --out")
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # where a kill has cut the last line

    # the formulations take turns, so that a stopped run has a share of each
    kinds = [("equations", D) for D in sorted({*args.D})] + [(name, None) for name in NAMES[1:]]
    questions = [(*kind, index) for index in range(args.n) for kind in kinds]
    left = [question for question in questions if not outcome(answers[question])]
    slots = asyncio.Semaphore(REQUESTS)

    async def finish(question):
        async with slots:
            while not outcome(answers[question]):
                attempt = await ask(client, settings, question)
                if path.stat().st_size != file.tell():
                    raise UserError(f"{path} is in use by another process")
                answers[question].append(attempt)
                file.write(json.dumps(attempt) + "\n")
                file.flush()

    with open(path, "a", encoding="utf-8") as file:
        await asyncio.gather(*map(finish, left[:REQUESTS]))  # a key or a field may be wrong
        if all(outcome(attempts) in ("refused", None) for attempts in answers.values()):
            file.truncate(0)
            text = f"the server refuses all questions so far: {answers[left[0]][0]['refused']}"
            raise UserError(f"{text}; --extra changes or removes fields of the request")
        for finished in progress("question", [*asyncio.as_completed(map(finish, left))]):
            await finished
    print_counts(path)


def count_outcomes(path):
    """Return the settings of an answers file, and a Counter of outcomes per (formulation, D)."""
    counts = defaultdict(Counter)
    for (*kind, _), attempts in read_answers(path).items():
        if ended := outcome(attempts):
            counts[tuple(kind)][ended] += 1
    if not counts:
        raise UserError(f"{path} has no finished question")
    kinds = sorted(counts, key=lambda kind: (NAMES.index(kind[0]), kind[1] or 0))
    return attempts[0]["settings"], {kind: counts[kind] for kind in kinds}


def wilson(successes, n, z=1.959964):
    """Return Wilson's 95% interval (low, high) of the share behind `successes` of n."""
    middle = successes + z * z / 2
    half = z * math.sqrt(successes * (n - successes) / n + z * z / 4)
    return max(0.0, (middle - half) / (n + z * z)), min(1.0, (middle + half) / (n + z * z))


def print_counts(path):
    """Print, with a Wilson interval of what is right of all questions, and return the counts."""
    settings, counts = count_outcomes(path)
    print(f"{path}: {json.dumps(settings)}")
    print("formulation   D      n  right  95% from     to", *FAILURES, sep="  ")
    for (formulation, D), count in counts.items():
        n, right = count.total(), count["right"]
        low, high = wilson(right, n)
        text = f"{formulation:<12}{D or '':>3}{n:>7}{right:>7}{low:>10.1%}{high:>7.1%}"
        print(text, *(f"{count[name]:>{len(name)}}" for name in FAILURES), sep="  ")
    return settings, counts


def draw_figure2(paths, folder):
    """Draw Figure 2 from answers files: accuracy by D for the equations (left) and for all
    formulations (right), and below them the share of questions without an acceptable answer."""
    shape = dict(sharex="col", sharey="row", height_ratios=(3, 2))
    figure, (left, right, below, names) = panels(4, 2, 5, 3, **shape)
    width, sizes = 0.8 / len(paths), set()  # models stand side by side
    for i, path in enumerate(paths):
        settings, counts = print_counts(path)
        sizes |= {count.total() for count in counts.values()}
        by_D = {D: count for (_, D), count in counts.items() if D}
        by_name = {NAMES.index(name): counts[name, D] for name, D in counts if D in (None, 5)}
        for above, bars, points, line in (left, below, by_D, "-"), (right, names, by_name, ""):
            x = np.array([*points]) + width * (i + 0.5) - 0.4
            rows = [(count["right"], count.total()) for count in points.values()]
            share = np.array([100 * number / n for number, n in rows])
            error = np.abs(100 * np.reshape([wilson(*row) for row in rows], (-1, 2)).T - share)
            style = dict(color=f"C{i}", marker="o", ls=line, capsize=3, label=settings["model"])
            above.errorbar(x, share, error, **style)
            bottom = 0 * share
            for name, hatch in zip(FAILURES, ("", "///", "..."), strict=True):
                failed = [100 * count[name] / count.total() for count in points.values()]
                bars.bar(x, failed, width, bottom, color=f"C{i}", ec="white", hatch=hatch)
                bottom += failed
    left.axhline(25, color="black", ls="--", lw=1, label="random guessing: 1/4, relatives 1/16")
    right.hlines([25, 6.25], [-0.5, 3.5], [3.5, 4.5], color="black", ls="--", lw=1)
    left.set(title="F1 equations", ylabel="right (% of all questions)", ylim=(-4, 104))
    right.set_title("All formulations (equations at D = 5)")
    below.set(xlabel="D (equations per chain)", ylabel="no acceptable answer (%)", ylim=(0, 104))
    names.set(xlabel="formulation", xticks=range(5), xticklabels=NAMES)
    n = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
    text = f"n = {n} questions per point, with 95% Wilson intervals\n"
    figure.suptitle(text + "bars: plain, never settled; hatched, truncated; dotted, refused")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_figure(figure, folder / "figure2.png")
    print(folder / "figure2.png")


def main():
    name = "python -m extras.llm"
    with program(name):
        p = command_line(name, __doc__)
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
        add("--extra", default={}, type=json.loads, help="JSON: fields to add; null removes one")
        args = p.parse_args()
        if min(args.n, args.attempts, args.max_tokens, *args.D) < 1 or not args.temperature >= 0:
            p.error("--n, --attempts, --max-tokens, --D must be positive, --temperature at least 0")
        if not isinstance(args.extra, dict):
            p.error("--extra must be a JSON object")
        if args.show:
            prompt, correct, acceptable = make_question(args.show, args.D[0], args.seed, 0)
            print(f"{prompt}\nCorrect: {correct}\nAcceptable: {', '.join(acceptable)}")
        elif args.plot:
            draw_figure2(args.plot, args.out)
        else:
            asyncio.run(benchmark(args))


if __name__ == "__main__":
    main()
