"""How well language models solve the retrieval problem put in words (Section 4, Appendix A).

    python -m llm --show equations                 # a question, its correct and acceptable answers
    python -m llm --model gpt-4o-mini --n 500      # ask all five formulations; once more to go on
    python -m llm --plot out/llm_*/answers.jsonl   # Figure 2 from the answers of some models

Any OpenAI-compatible endpoint will do: OPENAI_API_KEY and OPENAI_BASE_URL are read from the
environment. llm/README.md says more.
"""

import argparse
import asyncio
import base64
import contextlib
import errno
import json
import math
import os
import re
import sys
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote, unquote

from parts.stats import wilson

from filelock import FileLock, Timeout

from llm.questions import FORMULATIONS, make_question


MOST = 1_000_000  # of the numbers on the command line
MOST_BYTES = 2**24  # of a reply


# ---- the answers file: one line per attempt, each with the settings of its run

SETTINGS = dict(model=str, endpoint=str, seed=int, temperature=float, max_tokens=int, attempts=int)
ATTEMPT = dict(index=int, attempt=int, answer=str, tokens_in=int, tokens_out=int)
ATTEMPT |= dict(correct=bool, acceptable=bool)


def read_answers(path):
    """{question: [attempt, ...]}, question = (formulation, D, index), less a last line that a kill
    has cut off and what may be secret in an endpoint. ValueError, one line, if the file is
    something else."""
    answers, number, first = defaultdict(list), 1, None
    try:
        *lines, rest = path.read_bytes().split(b"\n")
        if rest and not lines:
            raise ValueError("half a line")
        for line in lines:
            attempt = json.loads(line)
            settings, formulation, D = (attempt[key] for key in ("settings", "formulation", "D"))
            right = [type(settings[key]) is kind for key, kind in SETTINGS.items()]
            right += [type(attempt[key]) is kind for key, kind in ATTEMPT.items()]
            right += [D in range(1, MOST + 1) if formulation == "equations" else D is None]
            settings["endpoint"] = read_address(settings["endpoint"])[-1]
            first = first or settings
            if not all(right) or formulation not in FORMULATIONS or settings != first:
                raise ValueError("no attempt, or of another run")
            answers[formulation, D, attempt["index"]].append(attempt)
            number += 1
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name another") from None
    except (LookupError, RecursionError, TypeError, ValueError):
        what = f"{path} is not an answers file, see its line {number}: mend it, or name another"
        raise ValueError(what) from None
    return answers


@contextlib.contextmanager
def open_answers(path, settings):
    """Yields the file, open for appending, and what read_answers finds in it. ValueError, one
    line, if another process has it open or if its settings are others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{path.resolve()}.lock", timeout=0):  # a kill releases it
            path.touch()
            answers = read_answers(path)
            held = next((attempts[0]["settings"] for attempts in answers.values()), settings)
            for key, value in settings.items():
                if held[key] != value:
                    what = f"answers to {key} {held[key]}, not {value}"
                    raise ValueError(f"{path} holds {what}: choose another --out")

            # the next line must not go on where one was cut off
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            with open(path, "a") as file:
                yield file, answers
    except Timeout:
        what = f"another process writes to {path}: wait until it ends, or choose another --out"
        raise ValueError(what) from None


def settled(attempts):
    """Whether a question needs no further attempt: the last one was acceptable, or there were
    --attempts of them."""
    last = attempts[-1] if attempts else None
    return bool(last and (last["acceptable"] or len(attempts) >= last["settings"]["attempts"]))


# ---- the server


def printable(text):
    """One line without the control codes that a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def read_address(url):
    """(user:password, path, endpoint); the endpoint, which is shown and stored, is without the
    former and has *** for each part of the path that could be a secret. ValueError, one line that
    does not repeat it, if this is no address of a server."""
    server = r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::([0-9]{1,5}))?"
    found = re.fullmatch(rf"(https?://)(?:([^/?#@]*)@)?({server})((?:/[^?#@\s]*)?)", url)
    if not found or not 0 < int(found[4] or 1) < 2**16:
        hint = "http://localhost:8000/v1; within a password, / is %2F, @ is %40, # is %23, ? is %3F"
        raise ValueError(f"OPENAI_BASE_URL is no address of a server; one is {hint}")
    scheme, login, server, _, path = found.groups("")
    parts = [part if part in ("", "v1", "api", "openai") else "***" for part in path.split("/")]
    return unquote(login), path, scheme + server + "/".join(parts)


def http_client(timeout):
    """What carries the requests of the openai client: a reply has `timeout` seconds in all, its
    body is not unpacked and ends after MOST_BYTES, and no redirect is followed."""
    import openai

    class Client(openai.DefaultAsyncHttpxClient):
        async def send(self, request, **how):
            try:
                return await asyncio.wait_for(self.send_in_time(request, how), timeout)
            except asyncio.TimeoutError:
                httpx = sys.modules[type(request).__module__.partition(".")[0]]  # or httpx2
                raise httpx.ReadTimeout("", request=request) from None  # the client asks again

        async def send_in_time(self, request, how):
            reply, body = await super().send(request, **how | {"stream": True}), bytearray()
            async with contextlib.aclosing(reply):
                async for part in reply.aiter_raw():
                    body += part[: MOST_BYTES - len(body)]
                    if len(body) == MOST_BYTES:
                        break
            headers = {name: said for name, said in reply.headers.items() if "retry" in name}
            more = {"content": bytes(body), "headers": headers, "request": request}
            return type(reply)(reply.status_code, **more)

    return Client(timeout=None, follow_redirects=False, headers={"Accept-Encoding": "identity"})


def connect(timeout, retries):
    """(client, endpoint, hide) from OPENAI_API_KEY and OPENAI_BASE_URL; hide(text) blots out what
    is secret. ValueError, one line with nothing secret in it, if they cannot be used."""
    import openai

    # the key and the address
    key, url = (os.environ.get(f"OPENAI_{x}", "").strip() for x in ("API_KEY", "BASE_URL"))
    if not key and not url:
        hint = "OPENAI_BASE_URL for a server of your own (http://localhost:11434/v1 is Ollama)"
        raise ValueError(f"set OPENAI_API_KEY, or {hint}")
    if not (key.isascii() and key.isprintable()):
        raise ValueError("OPENAI_API_KEY holds a character that no key has: copy it once more")
    url = url or "https://api.openai.com/v1"
    login, path, endpoint = read_address(url)
    basic = base64.b64encode(login.encode()).decode()

    # what a server may repeat; three letters are no secret, and could be in an answer
    secrets = [key, basic, login, login.partition(":")[2], path, *path.split("/")]
    forms = {form for x in secrets for form in (x, unquote(x), quote(x), json.dumps(x)[1:-1])}
    forms = sorted((form for form in forms if len(form) > 3), key=len, reverse=True)

    def hide(text):
        for form in forms:
            text = text.replace(form, "***")
        return text

    # the client
    try:
        how = {"max_retries": retries, "http_client": http_client(timeout)}
        client = openai.AsyncOpenAI(api_key=key or "no-key", base_url=url, **how)
    except Exception as error:  # its text may hold the password of a proxy
        what = f"the client does not start ({type(error).__name__})"
        raise ValueError(f"{what}: mend OPENAI_BASE_URL or the proxy variables") from None
    return client, endpoint, hide


def read_reply(body):
    """What we keep of a chat completion (JSON, bytes); None if it is something else. A count of
    tokens that cannot be is 0."""
    try:
        reply = json.loads(body)
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        answer = choice["message"].get("content") or ""  # null: all tokens went into reasoning
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        counts = [n if type(n) is int and 0 <= n < 2**63 else 0 for n in counts]
        named = {"finish": str(choice.get("finish_reason")), "served": str(reply.get("model"))}
        return named | {"answer": answer.strip(), "tokens_in": counts[0], "tokens_out": counts[1]}
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None


async def complete(client, hide, settings, options, prompt):
    """One reply to the prompt, see read_reply; an option that the server rejects is taken out of
    `options` for good. The client itself asks again after a rate limit (heeding Retry-After), 5xx,
    time-out or lost connection. ConnectionError, one line, after --retries faults or where asking
    again is no use."""
    import openai

    model, endpoint, broken = settings["model"], settings["endpoint"], 0
    while True:
        sent, message = dict(options), {"role": "user", "content": prompt}
        try:
            create = client.chat.completions.with_raw_response.create
            body = (await create(model=model, messages=[message], **sent)).http_response.content
        except openai.APIStatusError as error:
            # go on without what it rejects, or end
            status, said = error.status_code, error.message
            if said == f"Error code: {status}":  # for the client, what is not OpenAI's form is none
                said += f" - {error.response.text}"
            rejected = [option for option in sent if option in said]
            said = printable(hide(said)[:300])
            if status not in (400, 422) or not rejected:
                hint = f"are OPENAI_BASE_URL, OPENAI_API_KEY and the model {model} right?"
                raise ConnectionError(f"{endpoint} says {said} ({hint})") from None
            for option in rejected:
                options.pop(option, None)
            if "max_tokens" in rejected:  # OpenAI's newer models have another word for it
                options["max_completion_tokens"] = sent["max_tokens"]
            print(f"going on with {options or 'no options'}: {said}")
        except Exception as error:  # its text may hold the key in disguise, its name says enough
            what = f"no reply from {endpoint} ({type(error.__cause__ or error).__name__})"
            hint = "is it the right OPENAI_BASE_URL, does the server run, does it need --timeout?"
            raise ConnectionError(f"{what}: {hint}") from None
        else:
            if reply := read_reply(body):
                return reply | {"options": sent}
            broken += 1  # status 200, but broken JSON or no completion
            if broken > client.max_retries:
                said = printable(hide(body.decode(errors="replace"))[:300])
                what = f"no chat completion, {broken} times in a row: {said}"
                raise ConnectionError(f"{endpoint} sent {what}")


def judge(answer, correct, acceptable):
    """What is said counts, without a <think> block and blanks, quotes, bold marks or a full stop
    around it."""
    said = answer.rpartition("</think>")[2].strip(" \t\r\n.\"'*`").casefold()
    known = said in [other.casefold() for other in acceptable]
    return {"expected": correct, "correct": said == correct.casefold(), "acceptable": known}


async def benchmark(client, hide, settings, questions, concurrency, file, answers):
    """Settle all questions (formulation, D, index) that are not settled yet; raises the
    ConnectionError of complete."""
    todo = [question for question in questions if not settled(answers[question])]
    print(f"{len(questions)} questions, {len(questions) - len(todo)} of them answered before")
    options = {option: settings[option] for option in ("temperature", "max_tokens")}
    done, start = 0, time.monotonic()

    async def work(client, share):
        nonlocal done
        for formulation, D, index in share:
            # the paper: until it is acceptable; here with a cap
            prompt, *solution = make_question(formulation, D, settings["seed"], index)
            attempts = answers[formulation, D, index]
            while not settled(attempts):
                reply = await complete(client, hide, settings, options, prompt)
                verdict = judge(reply["answer"], *solution)
                reply |= {key: hide(said) for key, said in reply.items() if isinstance(said, str)}
                attempt = {"formulation": formulation, "D": D, "index": index}
                attempt |= {"attempt": len(attempts) + 1} | reply | verdict
                attempts.append(attempt | {"settings": settings})
                file.write(json.dumps(attempts[-1]) + "\n")
                file.flush()

            done += 1
            if done % math.ceil(len(todo) / 100) == 0 or done == len(todo):
                left = (time.monotonic() - start) / done * (len(todo) - done) / 60
                print(f"{done}/{len(todo)} questions, {left:.1f} min left, {spent(answers)}")

    async with client:
        # the first one alone and with little patience: a wrong address, key or model shows at once
        await work(client.with_options(max_retries=min(2, client.max_retries)), todo[:1])
        others = iter(todo[1:])
        await asyncio.gather(*(work(client, others) for _ in range(concurrency)))


# ---- scores and Figure 2


def spent(answers):
    """One line. Where most attempts repeat the one before, the server ignores --temperature."""
    attempts = [attempt for attempts in answers.values() for attempt in attempts]
    pairs = [pair for attempts in answers.values() for pair in pairwise(attempts)]
    again = sum(old["answer"] == new["answer"] != "" for old, new in pairs)
    sent, got = (sum(attempt[f"tokens_{way}"] for attempt in attempts) for way in ("in", "out"))
    what = f"{sum(not attempt['answer'] for attempt in attempts)} empty, {again} as the one before"
    return f"{len(attempts)} attempts ({what}), {sent} tokens in, {got} tokens out"


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
    print(spent(answers))


def figure2(models, path):
    """Figure 2: accuracy by D on equations (left), all formulations (right), 95% intervals.

    models: [(label, scores)]. Dashed: guessing among the acceptable answers."""
    from parts.config import write_file

    from matplotlib import style
    from matplotlib.figure import Figure

    # where each point is: {(formulation, D): x}
    style.use("tableau-colorblind10")
    figure = Figure((12, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    steps = {("equations", D): D for _, rows in models for _, D in rows if D}
    names = {(name, 5 if name == "equations" else None): x for x, name in enumerate(FORMULATIONS)}
    for axes, places, look in (left, steps, "o-"), (right, names, "o"):
        for i, (label, rows) in enumerate(models):
            xs, percent, reach = [], [], []
            for place in sorted(places.keys() & rows.keys(), key=places.get):
                n, correct = rows[place]["n"], rows[place]["correct"]
                xs.append(places[place] + 0.4 * ((i + 0.5) / len(models) - 0.5))  # side by side
                percent.append(100 * correct / n)
                reach.append([abs(100 * end - percent[-1]) for end in wilson(correct, n)])
            reach = [*zip(*reach, strict=True)] or None
            axes.errorbar(xs, percent, reach, fmt=look, color=f"C{i}", capsize=3, label=label)

    # guessing
    left.axhline(25, color="black", ls="--", lw=1, label="random guessing: 1/4, relatives 1/16")
    right.hlines([25, 6.25], [-0.5, 3.5], [3.5, 4.5], color="black", ls="--", lw=1)

    # words
    ticks = sorted(steps.values()) or [5]
    left.set(title="F1 equations", xlabel="D (equations per chain)", ylim=(0, 104), xticks=ticks)
    left.set(ylabel="accuracy (%), Wilson 95% interval", xlim=(ticks[0] - 0.6, ticks[-1] + 0.6))
    right.set(title="All five formulations (equations at D = 5)", xlabel="formulation")
    right.set_xticks(range(5), list(FORMULATIONS))
    look = {"loc": "outside lower center", "ncols": 2, "frameon": False}
    for text in figure.legend(*left.get_legend_handles_labels(), **look).get_texts():
        text.set_parse_math(False)  # a $ in the name of a model is a $
    path.parent.mkdir(parents=True, exist_ok=True)
    look = {"dpi": 130, "format": path.suffix[1:] or "png"}
    write_file(path, lambda temporary: figure.savefig(temporary, **look))


# ---- the command line

FLAGS = (  # name, default, least, help
    ("n", 500, 1, "questions per formulation and D"),
    ("temperature", 1.0, 0, "of sampling"),
    ("max-tokens", 4096, 1, "of one answer, reasoning included"),
    ("attempts", 10, 1, "a question without an acceptable answer after so many is unresolved"),
    ("concurrency", 8, 1, "questions asked at a time"),
    ("timeout", 120.0, 0.001, "seconds until a request without a whole reply counts as lost"),
    ("retries", 8, 0, "of one request that meets faults"),
)


def parse_args():
    layout = dict(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    p = argparse.ArgumentParser("python -m llm", description=__doc__, **layout)
    p.error = lambda message: p.exit(2, f"llm: {message}\n")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--show", choices=FORMULATIONS, help="print one question")
    what.add_argument("--model", help="benchmark the model of this name")
    what.add_argument("--plot", nargs="+", type=Path, metavar="FILE", help="draw answers files")
    steps = "equations per chain, for that formulation alone (default: 1 2 3 4 5 7 10; to show: 5)"
    p.add_argument("--D", nargs="+", type=int, help=steps)
    p.add_argument("--seed", default=0, type=int, help="of the questions (default: 0)")
    for name, default, _, help in FLAGS:
        help = f"{help} (default: {default})"
        p.add_argument(f"--{name}", default=default, type=type(default), help=help)
    out = "out/llm_MODEL/answers.jsonl, or out/figure2.png"
    p.add_argument("--out", type=Path, help=f"the answers, or the figure (default: {out})")
    args = p.parse_args()

    # what argparse does not check; nan fails too
    for name, _, least, _ in FLAGS:
        if not least <= vars(args)[name.replace("-", "_")] <= MOST:
            p.error(f"--{name} must be at least {least}, at most {MOST}")
    if args.D and not 1 <= min(args.D) <= max(args.D) <= MOST:
        p.error(f"--D must be at least 1, at most {MOST}")
    if args.show and args.D and (args.show != "equations" or len(args.D) > 1):
        p.error("--show takes one --D, and for equations alone")
    return args


def show(args):
    prompt, correct, acceptable = make_question(args.show, (args.D or [5])[0], args.seed, 0)
    print(f"{prompt}\nCorrect: {correct}\nAcceptable: {', '.join(acceptable)}")


def plot(args):
    models, path = [], args.out or Path("out/figure2.png")
    for file in args.plot:
        answers = read_answers(file)
        if not (rows := scores(answers)):  # a run that never reached its server
            print(f"{file} holds no answered question: left out")
            continue
        label = printable(f"model: {next(iter(answers.values()))[0]['settings']['model']}")
        n = min(row["n"] for row in rows.values())
        models.append((f"{label} (n = {n} or more per point)", rows))
        print(label)
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
    path, questions = args.out or Path("out", name, "answers.jsonl"), []
    for index in range(args.n):  # a stopped run has its share of every D
        questions += [
            ("equations", D, index) for D in sorted({*(args.D or [1, 2, 3, 4, 5, 7, 10])})
        ]
        questions += [(name, None, index) for name in list(FORMULATIONS)[1:]]
    with open_answers(path, settings) as (file, answers):
        run = benchmark(client, hide, settings, questions, args.concurrency, file, answers)
        asyncio.run(run)
    print_scores(answers)
    print(f"answers: {path}")


def main():
    try:
        try:
            args = parse_args()
            return show(args) if args.show else plot(args) if args.plot else ask(args)
        finally:
            print(end="", flush=True)  # --help too
    except BrokenPipeError:  # whoever read what we print has read enough
        sys.stdout = None  # nor is the rest of it printed at exit
        sys.exit(1)
    except (ValueError, OSError) as error:
        what, number, advice = printable(str(error)), getattr(error, "errno", None), ""
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = ": make room, then the same command goes on"
        elif number:
            advice = ": choose another --out"
        print(f"llm: {what}{advice}", file=sys.stderr)
        sys.stdout = None
        sys.exit(2)
