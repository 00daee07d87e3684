"""How well language models solve the retrieval problem when it is put in words (Section 4, Appendix A, Figure 2).

    python llm.py --show equations                 # one question with its correct and acceptable answers
    python llm.py --model gpt-4o-mini --n 500      # ask a model all five formulations; once more to go on after a stop
    python llm.py --plot out/llm_*/answers.jsonl   # Figure 2 from the answers of one or more models

Any OpenAI-compatible endpoint will do: OPENAI_API_KEY and OPENAI_BASE_URL are read from the environment.
"""
import argparse
import asyncio
import json
import math
import os
import random
import re
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path


# ---- the questions: (prompt, correct answer, acceptable answers), four chains each, worded as in Appendix A

def name(i):
    """Variable i: a, ..., z, aa, ab, ... like the columns of a spreadsheet."""
    return (name(i // 26 - 1) if i >= 26 else "") + chr(ord("a") + i % 26)


def shuffled(rng, items):
    return rng.sample(list(items), len(items))


def interleaved(rng, pools, statements, question):
    """Chains through pools of 4 words: step k says which word of pool k+1 belongs to which word of pool k. A word of
    the last pool is asked for; the word of the first pool at the end of its chain answers."""
    pools = [pool.split() for pool in pools]
    lines, link = [], {}
    for old_pool, new_pool, statement in zip(pools, pools[1:], statements):
        for new, old in zip(shuffled(rng, new_pool), shuffled(rng, old_pool)):
            lines.append(statement.format(new=new, old=old, Old=old.capitalize()))
            link[new] = old
    answer = asked = rng.choice(pools[-1])
    while answer in link:
        answer = link[answer]
    return "\n".join([*lines, question.format(asked)]), answer, sorted(pools[0])


def equations(rng, D):
    """F1 (A.1): D equations per chain."""
    pools = ["0 1 2 3"] + [" ".join(name(4 * step + i) for i in range(4)) for step in range(D)]
    return interleaved(rng, pools, ["{new} = {old}"] * D,
                       "What is the value of {}? Say directly only the numeric value, without any other words.")


def lives_with(rng, D):
    """F2 (A.2), D = 5."""
    pools = ["Amsterdam Berlin Cairo Delhi", "Alice Bob Charlie David", "Eve Frank Grace Henry",
             "Isabelle Jack Kate Larry", "Mary Nick Olivia Peter", "Queen Rose Sam Tom"]
    return interleaved(rng, pools, ["{new} lives in {old}"] + ["{new} lives with {old}"] * 4,
                       "Where does {} live? Say directly only the name of the city, without any other words.")


def kingdoms(rng, D):
    """F3 (A.3), D = 5: asked from the far end, so the chain runs back to the person."""
    pools = ["Alice Bob Charlie David", "Novaria Silvania Aurora Florinia", "harmonian celestian elysian lumin",
             "lamb chicken pork beef", "Zephyrium Nephryon Virellium Astralyte",
             "Chronogy Synthemia Somnosis Aetherflux"]
    return interleaved(rng, pools, ["{old} lives in {new}.", "{old}ns believe in {new}ism.", "{Old}ists eat {new}.",
                                    "{Old} contains {new}.", "{old} causes {new}."],
                       "Who has {}? Say directly the name without other words.")


def functions(rng, D):
    """F4 (A.4), conditional: the answer needs both the function and its argument."""
    table = {f: shuffled(rng, "0123") for f in "abcd"}
    function = dict(zip("efgh", shuffled(rng, "abcd")))
    value = dict(zip("ijkl", shuffled(rng, "0123")))
    g, x = rng.choice("efgh"), rng.choice("ijkl")
    lines = [f"{f}({i}) = {y}" for f in table for i, y in enumerate(table[f])]
    lines += [f"{left} = {right}" for left, right in {**function, **value}.items()]
    lines.append(f"What is the value of {g}({x})? Say directly only the numeric value, without any other words.")
    return "\n".join(lines), table[function[g]][int(value[x])], list("0123")


def relatives(rng, D):
    """F5 (A.5), conditional: the job decides with which relative a person lives; 16 homes, 4 of them of relatives."""
    people, jobs = "John Chris Diana Eve".split(), "doctor lawyer teacher engineer".split()
    women = "Cathy Dana Isabelle Jane Lily Nancy Olivia Penny".split()
    men = "Adam Bob Ed Fred George Hank Kevin Mike".split()
    countries = ("Argentina Brazil Canada Denmark England France Germany Hungary Italy Japan Kenya Laos Mexico Norway "
                 "Peru Qatar").split()
    home = dict(zip(shuffled(rng, women + men), shuffled(rng, countries)))
    women, men = shuffled(rng, women), shuffled(rng, men)
    family = {p: {"mother": women[2 * i], "sister": women[2 * i + 1], "father": men[2 * i], "brother": men[2 * i + 1]}
              for i, p in enumerate(people)}
    lives_with = dict(zip(jobs, shuffled(rng, family["Eve"])))
    job = dict(zip(people, shuffled(rng, jobs)))
    asked = rng.choice(people)
    lines = [f"{p} lives in {country}." for p, country in home.items()]
    lines += [f"{p}s {relation} is {relative}." for p in people for relation, relative in family[p].items()]
    lines += [f"{j.capitalize()}s live with their {relation}s." for j, relation in lives_with.items()]
    lines += [f"{p} works as {'an' if j == 'engineer' else 'a'} {j}." for p, j in job.items()]
    lines.append(f"Where does {asked} live? Say directly only the name, without any other words.")
    return "\n".join(lines), home[family[asked][lives_with[job[asked]]]], countries


FORMULATIONS = {"equations": equations, "lives-with": lives_with, "kingdoms": kingdoms, "functions": functions,
                "relatives": relatives}


def make_question(formulation, D, seed, index):
    """Question `index` of a benchmark: a pure function of its arguments, so every model is asked the same."""
    prompt, correct, acceptable = FORMULATIONS[formulation](random.Random(f"{seed} {formulation} {D} {index}"), D)
    assert solve(prompt) == correct, prompt  # 0.1 ms: no question is asked unchecked
    return prompt, correct, acceptable


def solve(prompt):
    """The answer, worked out from the words of the prompt alone. Raises ValueError for a line that it cannot read or a
    thing that is said twice (there could be two answers), KeyError for a thing that is used before it is said."""
    known = {}

    def say(thing, meaning):
        if thing in known:
            raise ValueError(f"{thing} is said twice")
        known[thing] = meaning

    *facts, question = prompt.split("\n")
    for line in facts:
        match re.findall(r"\w+", line):
            case [left, right]:
                say(left, right if right.isdigit() else known[right])
            case [person, "lives", "in", place]:
                say(("home", person), place)
                say(("holder", place.lower()), person)
            case [person, "lives", "with", other]:
                say(("home", person), known["home", other])
            case [people, "believe", "in", belief]:
                say(("holder", belief), known["holder", people.lower().removesuffix("ns")])
            case [people, "eat", food]:
                say(("holder", food), known["holder", people.lower().removesuffix("ists") + "ism"])
            case [thing, "contains" | "causes", other]:
                say(("holder", other.lower()), known["holder", thing.lower()])
            case [function, argument, result]:
                known[function] = "function " + function
                say(f"function {function} of {argument}", result)
            case [person, relation, "is", relative]:
                say((person, relation + "s"), relative)
            case [jobs, "live", "with", "their", relations]:
                say(("lives with", jobs.lower().removesuffix("s")), relations)
            case [person, "works", "as", "a" | "an", job]:
                say(("home", person), known["home", known[person + "s", known["lives with", job]]])
            case _:
                raise ValueError(f"cannot read: {line}")
    match re.findall(r"\w+", question.partition("?")[0]):
        case ["What", "is", "the", "value", "of", variable]:
            return known[variable]
        case ["What", "is", "the", "value", "of", function, argument]:
            return known[f"{known[function]} of {known[argument]}"]
        case ["Where", "does", person, "live"]:
            return known["home", person]
        case ["Who", "has", thing]:
            return known["holder", thing.lower()]
    raise ValueError(f"cannot read: {question}")


# ---- the answers file: one line per attempt, each with the settings of its run

def read_answers(path):
    """{(formulation, D, index): [attempt, ...]}, less a last line that a kill has cut off; ValueError, one line, if the
    file is something else."""
    data, asked = path.read_bytes(), defaultdict(list)
    try:
        for line in data.split(b"\n")[:-1]:
            attempt = json.loads(line)
            asked[attempt["formulation"], attempt["D"], attempt["index"]].append(attempt)
    except (ValueError, LookupError, TypeError):
        asked.clear()
    if data and not asked:
        raise ValueError(f"{path} is not an answers file: name another one")
    return asked


def open_answers(path, settings):
    """The file, open for appending, and what read_answers finds. ValueError, one line, if its settings are others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    asked = read_answers(path)
    for attempts in asked.values():
        held = attempts[0]["settings"]
        other = [f"{key} {held[key]}, not {value}" for key, value in settings.items() if held[key] != value]
        if other:
            raise ValueError(f"{path} holds answers to {', '.join(other)}: choose another --out")
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # the next line must not go on where one was cut off
    return open(path, "a"), asked


def settled(attempts):
    """Whether a question needs no further attempt: the last one was acceptable, or there were --attempts of them."""
    return bool(attempts) and (attempts[-1]["acceptable"] or len(attempts) >= attempts[-1]["settings"]["attempts"])


# ---- asking

def read_reply(body):
    """What we keep of a chat completion (JSON text); ValueError if it is none."""
    try:
        reply = json.loads(body)
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        answer = choice["message"].get("content") or ""  # null where a model spent all its tokens on reasoning
        return dict(answer=answer.strip(), finish=choice.get("finish_reason"), served=str(reply.get("model")),
                    tokens_in=int(usage.get("prompt_tokens") or 0), tokens_out=int(usage.get("completion_tokens") or 0))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"no chat completion: {body}") from None


async def complete(client, model, options, prompt):
    """One reply to the prompt, see read_reply. An option that the server rejects is taken out of `options` for good.

    The client itself asks again after a rate limit (heeding Retry-After), 5xx, time-out or lost connection. Raises
    ConnectionError, one line, after --retries faults or where asking again is no use."""
    import openai

    def printable(text):
        return " ".join(str(text).replace(client.api_key, "***").split())[:300]

    broken = 0
    while True:
        sent = dict(options)
        try:
            raw = await client.chat.completions.with_raw_response.create(
                model=model, messages=[{"role": "user", "content": prompt}], **sent)
            return read_reply(raw.http_response.text.replace(client.api_key, "***")) | {"options": sent}
        except ValueError as error:  # status 200, but broken JSON or no completion
            broken += 1
            if broken > client.max_retries:
                raise ConnectionError(f"{broken} replies in a row were {printable(error)}")
        except openai.APIConnectionError as error:  # its text may hold the key in disguise, its name says enough
            raise ConnectionError(f"no reply from {client.base_url} ({type(error.__cause__ or error).__name__}): is it "
                                  "the right OPENAI_BASE_URL, does the server run, does it need more --timeout?")
        except openai.APIStatusError as error:
            rejected = [option for option in sent if option in error.message]
            if error.status_code not in (400, 422) or not rejected:
                raise ConnectionError(f"{client.base_url} says: {printable(error.message)}")
            for option in rejected:
                options.pop(option, None)
            if "max_tokens" in rejected:  # OpenAI's newer models have another word for it
                options["max_completion_tokens"] = sent["max_tokens"]
            print(f"going on with {options or 'no options'}: {printable(error.message)}", flush=True)


async def benchmark(client, settings, questions, concurrency, file, asked):
    """Settle all questions (formulation, D, index) that are not settled yet; raises the ConnectionError of complete."""
    todo = [question for question in questions if not settled(asked[question])]
    print(f"{len(questions)} questions, {len(questions) - len(todo)} of them answered before", flush=True)
    options = {option: settings[option] for option in ("temperature", "max_tokens")}
    done, start = 0, time.monotonic()

    async def work(client, share):
        nonlocal done
        for formulation, D, index in share:
            prompt, correct, acceptable = make_question(formulation, D, settings["seed"], index)
            attempts = asked[formulation, D, index]
            while not settled(attempts):  # the paper's protocol: until the answer is acceptable, here with a cap
                reply = await complete(client, settings["model"], options, prompt)
                # what is said: no <think> block, no blanks, quotes, bold marks or full stop around it
                answer = reply["answer"].rpartition("</think>")[2].strip(" \t\r\n.\"'*`").casefold()
                attempts.append(dict(formulation=formulation, D=D, index=index, attempt=len(attempts) + 1, **reply,
                                     expected=correct, correct=answer == correct.casefold(),
                                     acceptable=answer in [a.casefold() for a in acceptable], settings=settings))
                file.write(json.dumps(attempts[-1]) + "\n")
                file.flush()
            done += 1
            if done % math.ceil(len(todo) / 100) == 0 or done == len(todo):
                left = (time.monotonic() - start) / done * (len(todo) - done) / 60
                print(f"{done}/{len(todo)} questions, {left:.1f} min left, {spent(asked)}", flush=True)

    async with client:
        # the first one alone and with little patience: a wrong address, key, model or option shows at once
        await work(client.with_options(max_retries=min(2, client.max_retries)), todo[:1])
        others = iter(todo[1:])
        await asyncio.gather(*(work(client, others) for _ in range(concurrency)))


# ---- scores and Figure 2

def spent(asked):
    attempts = [attempt for attempts in asked.values() for attempt in attempts]
    return (f"{len(attempts)} attempts ({sum(not a['answer'] for a in attempts)} of them empty), "
            f"{sum(a['tokens_in'] for a in attempts)} tokens in, {sum(a['tokens_out'] for a in attempts)} tokens out")


def wilson(successes, n, z=1.959964):
    """(low, high): Wilson's 95% interval of a proportion; stays inside [0, 1], also at 0 and n successes."""
    middle, half = successes + z * z / 2, z * math.sqrt(successes * (n - successes) / n + z * z / 4)
    return max(0.0, (middle - half) / (n + z * z)), min(1.0, (middle + half) / (n + z * z))


def scores(asked):
    """{(formulation, D): counts} over the settled questions, in the paper's order.

    counts: n, correct (at the last attempt, the paper's protocol; an unresolved question is not correct), first
    (correct at the first attempt), attempts, unresolved."""
    rows = defaultdict(Counter)
    for (formulation, D, _), attempts in asked.items():
        if settled(attempts):
            rows[formulation, D].update(n=1, correct=attempts[-1]["correct"], first=attempts[0]["correct"],
                                        attempts=len(attempts), unresolved=not attempts[-1]["acceptable"])
    order = list(FORMULATIONS)
    return dict(sorted(rows.items(), key=lambda item: (order.index(item[0][0]), item[0][1] or 0)))


def print_scores(asked):
    print("formulation   D      n  accuracy  95% interval     first answer  attempts  unresolved")
    for (formulation, D), row in scores(asked).items():
        low, high = wilson(row["correct"], row["n"])
        print(f"{formulation:<12}{D or '':>3}{row['n']:>7}{row['correct'] / row['n']:>10.1%}  {low:6.1%} - {high:6.1%}"
              f"{row['first'] / row['n']:>15.1%}{row['attempts'] / row['n']:>10.2f}{row['unresolved']:>12}")
    print(spent(asked))


def figure2(models, path):
    """Figure 2: accuracy by D on equations (left), all five formulations (right), Wilson 95% intervals.

    models: [(label, scores)]. Dashed: guessing among the acceptable answers."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    def accuracy(rows):  # heights in percent (R,), and how far the intervals reach below and above them (2, R)
        heights = 100 * np.array([row["correct"] / row["n"] for row in rows])
        ends = 100 * np.array([wilson(row["correct"], row["n"]) for row in rows]).reshape(-1, 2).T
        return heights, abs(ends - heights)

    bars = [("equations", 5), ("lives-with", None), ("kingdoms", None), ("functions", None), ("relatives", None)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), width_ratios=(1, 1.5), sharey=True,
                                         layout="constrained")
    for i, (label, rows) in enumerate(models):
        steps = [D for formulation, D in rows if formulation == "equations"]
        heights, reach = accuracy([rows["equations", D] for D in steps])
        left.errorbar(steps, heights, reach, color=f"C{i}", marker="o", capsize=3, label=label)
        places = [x for x, cell in enumerate(bars) if cell in rows]
        heights, reach = accuracy([rows[cell] for cell in bars if cell in rows])
        width = 0.8 / len(models)
        right.bar([x - 0.4 + (i + 0.5) * width for x in places], heights, 0.9 * width, yerr=reach, color=f"C{i}",
                  capsize=3)
    left.axhline(25, color="black", ls="--", lw=1)
    right.hlines([25, 25, 25, 25, 6.25], [x - 0.45 for x in range(5)], [x + 0.45 for x in range(5)], color="black",
                 ls="--", lw=1, label="random guessing: 1/4, relatives 1/16")
    right.hlines(25, 3.55, 4.45, color="black", ls=":", lw=1, label="guessing among the person's own 4 relatives: 1/4")
    left.set(title="F1 equations", xlabel="D (equations per chain)", ylabel="accuracy (%), Wilson 95% interval",
             ylim=(0, 104))
    right.set(title="All five formulations (equations at D = 5)", xticks=range(5), xticklabels=FORMULATIONS)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".tmp")
    figure.savefig(half, dpi=150, format=path.suffix[1:] or "png")
    half.replace(path)
    plt.close(figure)


# ---- the command line

def parse_args():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = lambda message: p.exit(2, f"llm.py: {message}\n")

    def flag(name, default, help):
        p.add_argument(f"--{name}", default=default, type=type(default), help=f"{help} (default: {default})")

    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--show", choices=FORMULATIONS, help="print one question of this formulation")
    what.add_argument("--model", help="benchmark the model of this name")
    what.add_argument("--plot", nargs="+", type=Path, metavar="FILE", help="draw Figure 2 from these answers files")
    p.add_argument("--D", nargs="+", type=int, help="equations per chain, for that formulation alone: one to show "
                   "(default: 5), several to benchmark (default: 1 2 3 4 5 7 10)")
    flag("n", 500, "questions per formulation and D")
    flag("seed", 0, "of the questions")
    flag("temperature", 1.0, "of sampling")
    flag("max-tokens", 4096, "of one answer, reasoning included")
    flag("attempts", 10, "a question without an acceptable answer after so many is unresolved")
    flag("concurrency", 8, "questions asked at a time")
    flag("timeout", 120.0, "seconds of silence before a request counts as lost")
    flag("retries", 8, "of one request that meets faults")
    p.add_argument("--out", type=Path, help="the answers (default: out/llm_MODEL/answers.jsonl) or the figure "
                   "(default: out/figure2.png)")
    args = p.parse_args()
    args.D = sorted(set(args.D or ([5] if args.show else [1, 2, 3, 4, 5, 7, 10])))
    if min(*args.D, args.n, args.max_tokens, args.attempts, args.concurrency) < 1:
        p.error("--D, --n, --max-tokens, --attempts and --concurrency must be at least 1")
    if not (args.temperature >= 0 and args.timeout > 0 and args.retries >= 0):  # so written, nan fails too
        p.error("--timeout must be above 0, --temperature and --retries at least 0")
    return args


def show(args):
    prompt, correct, acceptable = make_question(args.show, args.D[0], args.seed, 0)
    print(f"{prompt}\nCorrect: {correct}\nAcceptable: {', '.join(acceptable)}")


def plot(args):
    models, path = [], args.out or Path("out/figure2.png")
    for file in args.plot:
        asked = read_answers(file)
        rows = scores(asked)
        if not rows:  # a run that never reached its server
            print(f"{file} holds no answered question: left out")
            continue
        attempts = [attempt for attempts in asked.values() for attempt in attempts]
        scripted = any(attempt["served"].startswith("scripted") for attempt in attempts)  # the server of the tests
        label = f"{'scripted model: ' if scripted else ''}{attempts[0]['settings']['model']}"
        models.append((f"{label} (n = {min(row['n'] for row in rows.values())} or more per point)", rows))
        print(label)
        print_scores(asked)
    if not models:
        raise ValueError("there is no answered question to plot")
    figure2(models, path)
    print(path)


def ask(args):
    import openai
    key, endpoint = os.environ.get("OPENAI_API_KEY", "").strip(), os.environ.get("OPENAI_BASE_URL", "").strip()
    if not key and not endpoint:
        raise ValueError("set OPENAI_API_KEY, or OPENAI_BASE_URL for a server of your own "
                         "(http://localhost:11434/v1 is Ollama)")
    endpoint = endpoint or "https://api.openai.com/v1"
    client = openai.AsyncOpenAI(api_key=key or "no-key", base_url=endpoint, timeout=args.timeout,
                                max_retries=args.retries)
    settings = dict(model=args.model, endpoint=endpoint, seed=args.seed, temperature=args.temperature,
                    max_tokens=args.max_tokens, attempts=args.attempts)  # what one answers file must not mix
    path = args.out or Path("out", f"llm_{re.sub('[^A-Za-z0-9._-]+', '-', args.model)}", "answers.jsonl")
    questions = [(formulation, D, index) for index in range(args.n)  # a stopped run has its share of every D
                 for formulation in FORMULATIONS for D in (args.D if formulation == "equations" else [None])]
    file, asked = open_answers(path, settings)
    with file:
        asyncio.run(benchmark(client, settings, questions, args.concurrency, file, asked))
    print_scores(asked)
    print(f"answers: {path}")


def main():
    args = parse_args()
    try:
        return show(args) if args.show else plot(args) if args.plot else ask(args)
    except (ValueError, OSError) as error:
        print(f"llm.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("llm.py: stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
