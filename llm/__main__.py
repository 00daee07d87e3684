"""How well language models solve the retrieval problem put in words (Section 4, Appendix A).

    python llm.py --show equations                 # a question, its correct and acceptable answers
    python llm.py --model gpt-4o-mini --n 500      # ask all five formulations; once more to go on
    python llm.py --plot out/llm_*/answers.jsonl   # Figure 2 from the answers of some models

Any OpenAI-compatible endpoint will do: OPENAI_API_KEY and OPENAI_BASE_URL are read from the
environment. LLM.md says more.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import math
import os
import re
import sys
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from parts.intervals import wilson

from filelock import FileLock, Timeout

from llm.questions import FORMULATIONS, make_question


# ---- the answers file: one line per attempt, each with the settings of its run

FIELDS = {"answer", "served", "tokens_in", "tokens_out", "correct", "acceptable", "settings"}


def read_answers(path):
    """{question: [attempt, ...]}, question = (formulation, D, index), less a last line that a kill
    has cut off. ValueError, one line, if the file is something else."""
    try:
        data, answers = path.read_bytes(), defaultdict(list)
    except OSError as error:
        what = f"{path} cannot be read ({error.strerror})"
        raise ValueError(f"{what}: name an answers file") from None
    try:
        for line in data.split(b"\n")[:-1]:
            attempt = json.loads(line)
            answers[attempt["formulation"], attempt["D"], attempt["index"]].append(attempt)
            if attempt["formulation"] not in FORMULATIONS or not attempt.keys() >= FIELDS:
                raise ValueError("no attempt")
    except (LookupError, RecursionError, TypeError, ValueError):
        answers.clear()
    if data and not answers:
        raise ValueError(f"{path} is not an answers file: name another one")
    return answers


@contextlib.contextmanager
def open_answers(path, settings):
    """Yields the file, open for appending, and what read_answers finds in it. ValueError, one
    line, if another process has it open or if its settings are others."""
    # one process at a time; the system lets go of the lock of one that is killed
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path.resolve()}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        what = f"another llm.py writes to {path}"
        raise ValueError(f"{what}: wait until it ends, or choose another --out") from None
    with lock:
        # what it holds already
        path.touch()
        answers = read_answers(path)
        for key, value in settings.items():
            for attempts in answers.values():
                held = without_login(str(attempts[0]["settings"][key]))
                if held != without_login(str(value)):
                    what = f"{path} holds answers to {key} {held}, not {value}"
                    raise ValueError(f"{what}: choose another --out")

        # the next line must not go on where one was cut off
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        with open(path, "a") as file:
            yield file, answers


def settled(attempts):
    """Whether a question needs no further attempt: the last one was acceptable, or there were
    --attempts of them."""
    last = attempts[-1] if attempts else None
    return bool(last and (last["acceptable"] or len(attempts) >= last["settings"]["attempts"]))


# ---- asking


def printable(text):
    """One line without the control codes that a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def without_login(url):
    """https://host/v1 of https://user:password@host/v1."""
    return re.sub("//.*@", "//", url)


def connect(timeout, retries):
    """(client, endpoint, hide) from OPENAI_API_KEY and OPENAI_BASE_URL. A password in the address
    goes into a header and not into endpoint; hide(text) blots out what is secret. ValueError, one
    line with nothing secret in it, if they cannot be used."""
    import openai

    # the key
    key, url = (os.environ.get(f"OPENAI_{x}", "").strip() for x in ("API_KEY", "BASE_URL"))
    if not key and not url:
        hint = "OPENAI_BASE_URL for a server of your own (http://localhost:11434/v1 is Ollama)"
        raise ValueError(f"set OPENAI_API_KEY, or {hint}")
    if not (key.isascii() and key.isprintable()):
        raise ValueError("OPENAI_API_KEY holds a character that no key has: copy it once more")

    # the address: the client itself would take port 65537 for port 1
    url = url or "https://api.openai.com/v1"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        usable = usable and url.count("@") == parts.netloc.count("@") < 2
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        hint = "http://localhost:8000/v1; within a password, / is %2F, @ is %40, # is %23, ? is %3F"
        raise ValueError(f"OPENAI_BASE_URL is no address of a server; one is {hint}")

    # what a server may repeat in an error; a key of a few letters only stands for one
    login = unquote(parts.netloc.rpartition("@")[0])  # "user:password", or ""
    basic = base64.b64encode(login.encode()).decode()
    secrets = filter(None, [key if len(key) > 7 else "", basic, login, login.partition(":")[2]])
    secrets = [form for secret in secrets for form in (secret, json.dumps(secret)[1:-1])]

    def hide(text):
        for secret in secrets:
            text = text.replace(secret, "***")
        return text

    # the client
    try:
        client = openai.AsyncOpenAI(
            api_key=key or "no-key",
            base_url=without_login(url),
            default_headers={"Authorization": f"Basic {basic}"} if login else None,
            timeout=timeout,
            max_retries=retries,
        )
    except Exception as error:  # its text may hold the password of a proxy
        what = f"the client does not start ({type(error).__name__})"
        raise ValueError(f"{what}: mend OPENAI_BASE_URL or the proxy variables") from None
    return client, without_login(url), hide


def read_reply(body):
    """What we keep of a chat completion (JSON text); None if it is something else."""
    try:
        reply = json.loads(body)
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        answer = choice["message"].get("content") or ""  # null: all tokens went into reasoning
        return {
            "answer": answer.strip(),
            "finish": choice.get("finish_reason"),
            "served": str(reply.get("model")),
            "tokens_in": int(usage.get("prompt_tokens") or 0),
            "tokens_out": int(usage.get("completion_tokens") or 0),
        }
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None


async def complete(client, hide, model, options, prompt):
    """One reply to the prompt, see read_reply. An option that the server rejects is taken out of
    `options` for good.

    The client itself asks again after a rate limit (heeding Retry-After), 5xx, time-out or lost
    connection. Raises ConnectionError, one line, after --retries faults or where asking again is
    no use."""
    import openai

    broken = 0
    while True:
        sent, message = dict(options), {"role": "user", "content": prompt}
        try:
            create = client.chat.completions.with_raw_response.create
            raw = await create(model=model, messages=[message], **sent)
        except openai.APIStatusError as error:
            # go on without what it rejects, or end
            status, said = error.status_code, error.message
            if said == f"Error code: {status}":  # for the client, what is not OpenAI's form is none
                said += f" - {error.response.text}"
            rejected = [option for option in sent if option in said]
            said = printable(hide(said))[:300]
            if status not in (400, 422) or not rejected:
                doubt = f" (does it have a model {model}?)" if status >= 500 else ""
                raise ConnectionError(f"{client.base_url} says {said}{doubt}") from None
            for option in rejected:
                options.pop(option, None)
            if "max_tokens" in rejected:  # OpenAI's newer models have another word for it
                options["max_completion_tokens"] = sent["max_tokens"]
            print(f"going on with {options or 'no options'}: {said}", flush=True)
        except Exception as error:  # its text may hold the key in disguise, its name says enough
            what = f"no reply from {client.base_url} ({type(error.__cause__ or error).__name__})"
            hint = "is it the right OPENAI_BASE_URL, does the server run, does it need --timeout?"
            raise ConnectionError(f"{what}: {hint}") from None
        else:
            if reply := read_reply(raw.http_response.text):
                return reply | {"options": sent}
            broken += 1  # status 200, but broken JSON or no completion
            if broken > client.max_retries:
                said = printable(hide(raw.http_response.text))[:300]
                raise ConnectionError(f"{broken} replies in a row were no chat completion: {said}")


def judge(answer, correct, acceptable):
    """What is said counts, without a <think> block and blanks, quotes, bold marks or a full stop
    around it."""
    said = answer.rpartition("</think>")[2].strip(" \t\r\n.\"'*`").casefold()
    return {
        "expected": correct,
        "correct": said == correct.casefold(),
        "acceptable": said in [other.casefold() for other in acceptable],
    }


async def benchmark(client, hide, settings, questions, concurrency, file, answers):
    """Settle all questions (formulation, D, index) that are not settled yet; raises the
    ConnectionError of complete."""
    todo = [question for question in questions if not settled(answers[question])]
    before = len(questions) - len(todo)
    print(f"{len(questions)} questions, {before} of them answered before", flush=True)
    options = {option: settings[option] for option in ("temperature", "max_tokens")}
    done, start, note = 0, time.monotonic(), ""

    async def settle(client, question):
        prompt, *solution = make_question(*question[:2], settings["seed"], question[2])
        attempts = answers[question]
        while not settled(attempts):  # the paper: until it is acceptable; here with a cap
            reply = await complete(client, hide, settings["model"], options, prompt)
            verdict = judge(reply["answer"], *solution)
            reply |= {key: hide(value) for key, value in reply.items() if isinstance(value, str)}
            names = dict(zip(("formulation", "D", "index"), question, strict=True))
            attempt = names | {"attempt": len(attempts) + 1} | reply | verdict
            attempts.append(attempt | {"settings": settings})
            file.write(json.dumps(attempts[-1]) + "\n")
            file.flush()

    async def work(client, share):
        nonlocal done, note
        for question in share:
            await settle(client, question)
            done += 1
            if done % math.ceil(len(todo) / 100) == 0 or done == len(todo):
                left = (time.monotonic() - start) / done * (len(todo) - done) / 60
                print(f"{done}/{len(todo)} questions, {left:.1f} min left, {spent(answers)}")
                if not note and (note := sampling_note(answers)):
                    print(note)
                sys.stdout.flush()

    async with client:
        # the first one alone and with little patience: a wrong address, key or model shows at once
        await work(client.with_options(max_retries=min(2, client.max_retries)), todo[:1])
        others = iter(todo[1:])
        await asyncio.gather(*(work(client, others) for _ in range(concurrency)))


# ---- scores and Figure 2


def spent(answers):
    attempts = [attempt for attempts in answers.values() for attempt in attempts]
    empty = sum(not attempt["answer"] for attempt in attempts)
    sent, got = (sum(attempt[f"tokens_{way}"] for attempt in attempts) for way in ("in", "out"))
    count = f"{len(attempts)} attempts ({empty} of them empty)"
    return f"{count}, {sent} tokens in, {got} tokens out"


def sampling_note(answers):
    """One line if sampling again gives the same again (of 5 or more, 9 in 10), else ""."""
    pairs = [pair for attempts in answers.values() for pair in pairwise(attempts)]
    again = [old["answer"] == new["answer"] for old, new in pairs if new["answer"]]
    if len(again) < 5 or sum(again) < 0.9 * len(again):
        return ""
    what = f"{sum(again)} of {len(again)} further attempts gave the same answer once more"
    return f"{what}: sampling again does nothing. Does the server heed --temperature?"


def scores(answers):
    """{(formulation, D): counts} over the settled questions, in the paper's order.

    counts: n, correct (at the last attempt, the paper's protocol; an unresolved question is not
    correct), first (correct at the first attempt), attempts, unresolved."""
    rows = defaultdict(Counter)
    for (formulation, D, _), attempts in answers.items():
        if settled(attempts):
            first, last = attempts[0], attempts[-1]
            counts = {"n": 1, "correct": last["correct"], "first": first["correct"]}
            counts |= {"attempts": len(attempts), "unresolved": not last["acceptable"]}
            rows[formulation, D].update(counts)
    order = list(FORMULATIONS)
    return dict(sorted(rows.items(), key=lambda row: (order.index(row[0][0]), row[0][1] or 0)))


def print_scores(answers):
    print("formulation   D      n  accuracy  95% interval     first answer  attempts  unresolved")
    for (formulation, D), row in scores(answers).items():
        n, (low, high) = row["n"], wilson(row["correct"], row["n"])
        accuracy = f"{row['correct'] / n:>10.1%}  {low:6.1%} - {high:6.1%}"
        more = f"{row['first'] / n:>15.1%}{row['attempts'] / n:>10.2f}{row['unresolved']:>12}"
        print(f"{formulation:<12}{D or '':>3}{n:>7}{accuracy}{more}")
    print("\n".join(filter(None, [spent(answers), sampling_note(answers)])))


def figure2(models, path):
    """Figure 2: accuracy by D on equations (left), all formulations (right), 95% intervals.

    models: [(label, scores)]. Dashed: guessing among the acceptable answers."""
    import matplotlib

    matplotlib.use("Agg")
    from parts.runs import write_file

    import matplotlib.pyplot as plt
    import numpy as np

    def percent(rows):  # heights (R,), and how far the intervals reach below and above them (2, R)
        heights = np.array([row["correct"] / row["n"] for row in rows])
        ends = np.array([wilson(row["correct"], row["n"]) for row in rows]).reshape(-1, 2).T
        return 100 * heights, 100 * abs(ends - heights)

    # one line and one set of bars per model
    plt.style.use("tableau-colorblind10")
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), sharey=True, layout="constrained")
    bars = [(name, 5 if name == "equations" else None) for name in FORMULATIONS]
    width = 0.8 / len(models)
    for i, (label, rows) in enumerate(models):
        steps = [D for formulation, D in rows if formulation == "equations"]
        heights, reach = percent([rows["equations", D] for D in steps])
        xs = [D + 0.1 * (i - (len(models) - 1) / 2) for D in steps]  # side by side
        left.errorbar(xs, heights, reach, color=f"C{i}", marker="o", capsize=3, label=label)
        places = np.array([x for x, bar in enumerate(bars) if bar in rows])
        heights, reach = percent([rows[bars[x]] for x in places])
        xs = places - 0.4 + (i + 0.5) * width
        right.bar(xs, heights, 0.9 * width, yerr=reach, color=f"C{i}", capsize=3)

    # guessing
    left.axhline(25, color="black", ls="--", lw=1)
    for x, chance in enumerate([25, 25, 25, 25, 6.25]):
        right.plot([x - 0.45, x + 0.45], [chance, chance], "k--", lw=1)
    right.plot([], "k--", lw=1, label="random guessing: 1/4, relatives 1/16")
    label = "guessing among the person's own 4 relatives: 1/4"
    right.plot([3.55, 4.45], [25, 25], "k:", lw=1, label=label)

    # words
    left.set(title="F1 equations", xlabel="D (equations per chain)", ylim=(0, 104))
    left.set_ylabel("accuracy (%), Wilson 95% interval")
    ticks = sorted({D for _, rows in models for _, D in rows if D}) or [5]
    left.set(xticks=ticks, xlim=(ticks[0] - 0.6, ticks[-1] + 0.6))
    right.set_title("All five formulations (equations at D = 5)")
    right.set_xticks(range(5), list(FORMULATIONS))
    legend = figure.legend(loc="outside lower center", ncols=2, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in the name of a model is a $
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix[1:] or "png"
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=130, format=kind))
    plt.close(figure)


# ---- the command line


def parse_args():
    layout = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=layout)
    p.error = lambda message: p.exit(2, f"llm.py: {message}\n")

    def flag(name, default, help):
        help = f"{help} (default: {default})"
        p.add_argument(f"--{name}", default=default, type=type(default), help=help)

    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--show", choices=FORMULATIONS, help="print one question")
    what.add_argument("--model", help="benchmark the model of this name")
    what.add_argument("--plot", nargs="+", type=Path, metavar="FILE", help="draw answers files")
    steps = "equations per chain, for that formulation alone (default: 1 2 3 4 5 7 10; to show: 5)"
    p.add_argument("--D", nargs="+", type=int, help=steps)
    flag("n", 500, "questions per formulation and D")
    flag("seed", 0, "of the questions")
    flag("temperature", 1.0, "of sampling")
    flag("max-tokens", 4096, "of one answer, reasoning included")
    flag("attempts", 10, "a question without an acceptable answer after so many is unresolved")
    flag("concurrency", 8, "questions asked at a time")
    flag("timeout", 120.0, "seconds of silence before a request counts as lost")
    flag("retries", 8, "of one request that meets faults")
    out = "out/llm_MODEL/answers.jsonl, or out/figure2.png"
    p.add_argument("--out", type=Path, help=f"the answers, or the figure (default: {out})")
    args = p.parse_args()

    # what argparse does not check; nan fails too
    args.D = sorted(set(args.D or ([5] if args.show else [1, 2, 3, 4, 5, 7, 10])))
    sizes = [*args.D, args.n, args.concurrency]
    if min(sizes) < 1 or max(sizes) > 100_000:
        p.error("--D, --n and --concurrency must be at least 1, at most 100000")
    if min(args.max_tokens, args.attempts) < 1:
        p.error("--max-tokens and --attempts must be at least 1")
    if not (0 <= args.temperature < math.inf and args.retries >= 0):
        p.error("--temperature and --retries must be at least 0, and finite")
    if not 0 < args.timeout < math.inf:
        p.error("--timeout must be above 0, and finite")
    return args


def show(args):
    prompt, correct, acceptable = make_question(args.show, args.D[0], args.seed, 0)
    print(f"{prompt}\nCorrect: {correct}\nAcceptable: {', '.join(acceptable)}")


def plot(args):
    models, path = [], args.out or Path("out/figure2.png")
    for file in args.plot:
        answers = read_answers(file)
        rows = scores(answers)
        if not rows:  # a run that never reached its server
            print(f"{file} holds no answered question: left out")
            continue
        attempts = [attempt for attempts in answers.values() for attempt in attempts]
        scripted = any(attempt["served"].startswith("scripted") for attempt in attempts)  # a test
        label = f"{'scripted model' if scripted else 'model'}: {attempts[0]['settings']['model']}"
        n = min(row["n"] for row in rows.values())
        models.append((f"{printable(label)} (n = {n} or more per point)", rows))
        print(printable(label))
        print_scores(answers)
    if not models:
        raise ValueError("there is no answered question to plot")
    figure2(models, path)
    print(path)


def ask(args):
    client, endpoint, hide = connect(args.timeout, args.retries)
    settings = {"model": args.model, "endpoint": endpoint}  # what one answers file must not mix
    settings |= {key: vars(args)[key] for key in ("seed", "temperature", "max_tokens", "attempts")}
    name = "llm_" + re.sub("[^A-Za-z0-9._-]+", "-", args.model)
    path = args.out or Path("out", name, "answers.jsonl")
    questions = []
    for index in range(args.n):  # a stopped run has its share of every D
        questions += [("equations", D, index) for D in args.D]
        questions += [(name, None, index) for name in list(FORMULATIONS)[1:]]
    with open_answers(path, settings) as (file, answers):
        run = benchmark(client, hide, settings, questions, args.concurrency, file, answers)
        asyncio.run(run)
    print_scores(answers)
    print(f"answers: {path}")


def main():
    args = parse_args()
    try:
        return show(args) if args.show else plot(args) if args.plot else ask(args)
    except (ValueError, OSError) as error:
        print(f"llm.py: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("llm.py: stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
