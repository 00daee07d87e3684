"""extras/llm: questions against a solver, runs against a scripted server, and a planted model."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
from types import SimpleNamespace
from unittest import mock

from extras.llm import __main__ as llm
from extras.llm import weights
from extras.llm.questions import FORMULATIONS, make_question
from tests.common import output_of, run_main
from train import read_file

import pytest
import torch
from torch.nn.functional import one_hot


FLAGS = "--model", "m", "--D", 5, "--n", 6, "--out"
KINDS = [("equations", 5), *((name, None) for name in list(FORMULATIONS)[1:])]
ANSWERS = dict(make_question(*kind, 0, index)[:2] for index in range(6) for kind in KINDS)


def solve(prompt, acceptable):
    """Find the answer from the words of the prompt."""
    *facts, question = prompt.partition("?")[0].split("\n")
    if call := re.search(r"(\w)\((\w)\)", question):
        value = dict(fact.split(" = ") for fact in facts)
        return value[f"{value[call[1]]}({value[call[2]]})"]
    if "works" in prompt:
        person = question.split()[2]
        job = re.search(rf"{person} works as an? (\w+)", prompt)[1]
        relation = re.search(rf"{job}s live with their (\w+)s", prompt, re.IGNORECASE)[1]
        relative = re.search(rf"{person}s {relation} is (\w+)", prompt)[1]
        return re.search(rf"{relative} lives in (\w+)", prompt)[1]

    # a chain is what is connected to the word in question
    chain = {*question.lower().split()}
    for fact in facts * len(facts):
        first, *_, last = re.sub(r"(ns|ism|ists)\b|\.", "", fact.lower()).split()
        chain |= {first, last} if {first, last} & chain else set()
    [answer] = [word for word in acceptable if word.lower() in chain]
    return answer


def test_llm_questions_agree_with_the_solver():
    for formulation, D in [("equations", 1), ("equations", 7), *KINDS]:
        questions = [make_question(formulation, D, 0, index) for index in range(200)]
        prompts, answers, acceptable = zip(*questions, strict=True)
        assert [*answers] == [*map(solve, prompts, acceptable)]
        assert all(words == sorted({*answers}) for words in acceptable)

    # those that 466961a:tests/test_llm.py compared with Appendix A letter by letter
    text = repr([make_question(*kind, 0, index) for index in range(200) for kind in KINDS])
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest[:16] == "c9997fe6b99bf7f2", "the questions have changed"
    prompt, answer, _ = make_question("relatives", 5, 0, 0)
    assert f"{prompt}\nCorrect: {answer}\n" in output_of(llm, "--show", "relatives")


@contextlib.contextmanager
def scripted_server(reply):
    """Serve chat completions; reply(prompt, n) is the n-th answer to a prompt, or the status of a
    failure."""
    prompts = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompts.append(request["messages"][0]["content"])
            said = reply(prompts[-1], prompts.count(prompts[-1]))
            choice = {"message": {"content": said}, "finish_reason": "stop"}
            self.send_response(said if isinstance(said, int) else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Retry-After", "0.1")
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [choice]}).encode())

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        with mock.patch.dict("os.environ", {"OPENAI_BASE_URL": url, "NO_PROXY": "127.0.0.1"}):
            yield prompts
        server.shutdown()


def test_llm_counts_goes_on_and_refuses_what_would_mix(tmp_path):
    def reply(prompt, n):
        answer = ANSWERS[prompt]
        if "works" in prompt:  # a model that reasons
            return f"<think>Peru or Laos</think>\n**{answer.lower()}.**"
        if "lives with" in prompt and n <= 4:  # two failures, two answers that are not acceptable
            return (429, 500, "It is hard to say.", None)[n - 1]
        if "believe" in prompt:
            return "Zeus" * n
        if "(" in prompt and [*ANSWERS].index(prompt) // 5 < 3:  # the first three of these
            return str((int(answer) + 1) % 4)
        return answer

    rows = [
        "equations 5 {'right': 6}",
        "lives-with {'right': 6}",
        "kingdoms {'never settled': 6}",
        "functions {'right': 3, 'wrong': 3}",
        "relatives {'right': 6}",
    ]
    path = tmp_path / "llm_m" / "answers.jsonl"
    with scripted_server(reply) as prompts:
        for asked in 6 * (1 + 5 + 7 + 1 + 1), 91:
            out = output_of(llm, *FLAGS, tmp_path, "--attempts", 7)
            assert [" ".join(line.split()) for line in out.splitlines()[-5:]] == rows
            assert len(prompts) == asked
            whole = path.read_text().splitlines(keepends=True)
            path.write_text("".join(whole)[:-20])  # as if it had been killed within the last
        with pytest.raises(FileExistsError, match="has other settings"):
            run_main(llm, *FLAGS, tmp_path, "--seed", 1)
    path.write_text("".join(whole))
    with mock.patch.object(llm, "save_figure") as save:
        output_of(llm, "--plot", path, "--out", tmp_path)
    [points] = save.call_args.args[0].axes[1].containers
    assert points.lines[0].get_ydata() == pytest.approx([100, 100, 50, 100])  # none for kingdoms
    low, high = points.lines[1][0].get_ydata()[2], points.lines[1][1].get_ydata()[2]
    assert (low, high) == pytest.approx((18.8, 81.2), abs=0.05)  # Wilson's formula by hand


class Planted:
    """A model and its tokenizer, by words: the likeliest next token is the country of the city with
    which the text begins, but the last of four MLPs makes it "the"; all else is up to `taste`."""

    def __init__(self):
        self.numbers = {}  # of the words
        self.taste = torch.rand(500, generator=torch.Generator().manual_seed(0))
        self.layers = [SimpleNamespace(mlp=torch.nn.Identity()) for _ in range(4)]

    def get_decoder(self):
        return self

    def number(self, word):
        return self.numbers.setdefault(word, len(self.numbers))

    def tokenize(self, text, add_special_tokens=True):
        return SimpleNamespace(input_ids=[*map(self.number, re.findall(r" ?\w+|\W", text))])

    def __call__(self, ids, logits_to_keep):
        x = self.taste.repeat(len(ids), 1, 1)
        for pair in weights.CITIES.split(", "):
            city, country = map(self.number, re.findall(r" ?\w+", pair))
            x[ids[:, 0] == city, :, country] += 5
        for layer, amount in zip(self.layers, (0, 0, 0, 9), strict=True):
            x = x + layer.mlp(amount * one_hot(torch.tensor(self.number(" the")), 500))
        return SimpleNamespace(logits=x)


def test_weights_of_a_planted_model(tmp_path):
    model = Planted()
    tokenizer = mock.Mock(wraps=model.tokenize)
    tokenizer.apply_chat_template = lambda chat, **_: chat[0]["content"]
    patches = dict(load=lambda name: (model, tokenizer), QUESTIONS=20)
    with mock.patch.multiple(weights, **patches):
        for what in "late", "choices", "late":  # the second takes the place of the first
            output_of(weights, what, "--out", tmp_path)
    rows = read_file(path := tmp_path / "weights.jsonl")
    late = [row for row in rows if row["what"] == "late"]
    assert len(late) == 1 + 4 + 2
    for row in late:
        cut = row["first"] <= 3 < row["first"] + row["cut"]
        assert (row["country"], row["the"]) == (11 * cut, 11 * (not cut))
    for row in [row for row in rows if row["what"] == "choices"]:
        right = 0
        for index in range(20):
            _, answer, words = make_question(row["formulation"], row["D"], 0, index)
            right += answer == max(words, key=lambda word: model.taste[model.number(f" {word}")])
        assert row["correct"] == right < 20
        assert llm.accuracies(path)["gemma-3-270m"][row["formulation"], row["D"]] == (right, 20)
