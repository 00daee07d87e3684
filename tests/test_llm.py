"""extras/llm: questions against a solver, runs against a scripted server."""

import contextlib
import gzip
import hashlib
import http.server
import json
import re
import threading
import time
from unittest import mock

from extras.llm import __main__ as llm
from extras.llm import weights
from extras.llm.questions import FORMULATIONS, make_question
from tests.common import assert_refused, contents, output_of, run_main, start, wait_for

import pytest


KEY, LOGIN = "sk-test-0123456789", "user:pa55word"
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
        assert max(map(answers.count, answers)) < 2.5 * 200 / len({*answers}), "about uniform"
        assert D == 1 or len({*prompts}) == 200

    # those that 466961a:tests/test_llm.py compared with Appendix A letter by letter
    text = repr([make_question(*kind, 0, index) for index in range(200) for kind in KINDS])
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest[:16] == "c9997fe6b99bf7f2", "the questions have changed"
    prompt, answer, _ = make_question("relatives", 5, 7, 0)
    assert f"{prompt}\nCorrect: {answer}\n" in output_of(llm, "--show", "relatives", "--seed", 7)


def sends(message, finish="stop"):
    return 200, {"choices": [{"message": message, "finish_reason": finish}]}


def error(status, text):
    return status, {"error": {"message": text}}


@contextlib.contextmanager
def scripted_server(reply):
    """Serve chat completions; reply(prompt, n) is the n-th answer, or (status, body)."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            prompts = [request["messages"][0]["content"] for request in requests]
            answer = reply(prompts[-1], prompts.count(prompts[-1]))
            status, body = answer if isinstance(answer, tuple) else sends({"content": answer})
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Retry-After", "0.1")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_): ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # the client has gone
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://{LOGIN}@127.0.0.1:{server.server_port}/v1"
        variables = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": url, "NO_PROXY": "127.0.0.1"}
        with mock.patch.dict("os.environ", variables):
            yield requests
        server.shutdown()


def test_llm_counts_and_figure(tmp_path):
    def reply(prompt, n):
        number = [*ANSWERS].index(prompt) // 5  # the questions of all kinds take turns
        if "works" in prompt:  # a model that reasons, and content in parts
            text = f"<think>Peru or Laos</think>\n**{ANSWERS[prompt].lower()}.**"
            return sends({"content": [{"type": "thinking"}, {"type": "text", "text": text}]})
        if "lives with" in prompt:  # two faults, three answers that are not acceptable
            replies = error(429, "busy"), error(500, "down"), "It is hard to say.", None, sends({})
            return [*replies, ANSWERS[prompt]][n - 1]
        if "believe" in prompt:
            return sends({"content": "Zeus" * n}, "length" if number < 2 else "stop")
        if "(" not in prompt and number == 4:
            return error(400, f"no \u00e9 for {KEY}")
        return str((int(ANSWERS[prompt]) + ("(" in prompt and number < 3)) % 4)

    with scripted_server(reply) as requests:
        code, out, err = run_main(llm, *FLAGS, tmp_path, "--attempts", 7)
    path = tmp_path / "llm_m" / "answers.jsonl"
    assert code == 0 and "question 30/30, 0 s left" in err and KEY not in path.read_text()
    assert len(requests) == 6 * (1 + 6 + 7 + 1 + 1)
    assert {request["temperature"] for request in requests} == {1.0}
    rows = [" ".join(line.split()) for line in out.splitlines()[-5:]]
    assert rows == [  # Wilson's formula by hand; never settled, truncated, refused
        "equations 5 6 5 43.6% 97.0% 0 0 1",
        "lives-with 6 6 61.0% 100.0% 0 0 0",
        "kingdoms 6 0 0.0% 39.0% 4 2 0",
        "functions 6 3 18.8% 81.2% 0 0 0",
        "relatives 6 6 61.0% 100.0% 0 0 0",
    ]
    (packed := tmp_path / "m.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    with mock.patch.object(llm, "save_figure") as save:
        output_of(llm, "--plot", path, packed, "--out", tmp_path)
    above = save.call_args.args[0].axes[1]
    for lines in above.containers:
        assert lines.lines[0].get_ydata() == pytest.approx([500 / 6, 100, 0, 50, 100])


def test_llm_continues_after_a_kill(tmp_path):
    path = tmp_path / "llm_m" / "answers.jsonl"
    with scripted_server(lambda prompt, n: time.sleep(0.02) or ANSWERS[prompt]) as requests:
        process = start("extras.llm", *FLAGS, tmp_path)
        wait_for(lambda: len(requests) > 12)
        process.kill()
        process.communicate()
        path.write_bytes(path.read_bytes()[:-10])  # as if the kill had come within a line
        finished = path.read_text().count("\n")
        time.sleep(0.5)  # until the server has answered what the process had asked
        requests.clear()
        output_of(llm, *FLAGS, tmp_path)
        assert finished > 2 and len(requests) == 30 - finished
        assert_refused(llm, *FLAGS, tmp_path, "--seed", 1, says="has other settings")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({(line["formulation"], line["index"]) for line in lines}) == len(lines) == 30
    assert all(line["correct"] for line in lines)
    path.unlink()
    with scripted_server(lambda *_: str(path.write_text("what another process writes\n"))):
        assert_refused(llm, *FLAGS, tmp_path, says="is in use by another process")


def test_llm_user_errors_are_one_line(tmp_path):
    for body in "<html>", {}, {"choices": []}, sends(None)[1], sends({"content": ["3"]})[1]:
        with scripted_server(lambda *_, body=body: (200, body)):
            says = f"sent no chat completion: {ascii(json.dumps(body))}; check"
            assert_refused(llm, *FLAGS, tmp_path, says=says)
    for variables in {}, {"OPENAI_BASE_URL": f"http://{LOGIN}#@127.0.0.1:port/v1"}:
        with mock.patch.dict("os.environ", variables, clear=True):
            assert_refused(llm, "--model", "m", says="llm: set OPENAI_API_KEY to use OpenAI, or")
    with scripted_server(lambda *_: error(401, f"no key {KEY}\x1b[31m\u2028")):
        assert_refused(llm, *FLAGS, tmp_path, says="no key ***")
    written = b"".join(contents(tmp_path).values()).decode()
    assert KEY not in written and LOGIN not in written
    (tmp_path / "notes").write_text("3\n")
    assert_refused(llm, "--plot", tmp_path / "notes", says="is damaged")
    assert_refused(llm, "--plot", tmp_path / "none", says="FileNotFoundError")
    for flags in "--n 0", "--temperature nan", "--extra [1]", "--extra {", "--show F1":
        assert_refused(llm, "--model", "m", *flags.split(), says="llm: ")
    assert_refused(weights, "late", "--n", 0, says="--n must be positive")
    with mock.patch.dict("sys.modules", transformers=None):
        assert_refused(weights, "late", says="a package is missing")
