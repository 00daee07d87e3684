"""What the tests of llm/ ask: a solver of the questions, models made from it, and a server of
chat completions in front of them, which misbehaves when told to."""

import base64
import contextlib
import gzip
import http.server
import json
import random
import re
import socket
import struct
import threading
import time
from pathlib import Path
from unittest import mock

from llm import benchmark as llm
from tests.common import run_main


KEY = "sk-test-0123456789-do-not-print"


# ---- the answer, by another way than the generators of llm/


def solve(prompt):
    """The answer, worked out from the words of the prompt alone. Raises ValueError for a line that
    it cannot read or a thing that is said twice (there could be two answers), KeyError for a thing
    that is used before it is said."""
    known = {}

    def say(thing, meaning):
        if thing in known:
            raise ValueError(f"{thing} is said twice")
        known[thing] = meaning

    # what each line says
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
                belief = people.lower().removesuffix("ists") + "ism"
                say(("holder", food), known["holder", belief])
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

    # what the question asks for
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


def acceptable_answers(prompt):
    """Read from the prompt."""
    if "numeric" in prompt:
        return list("0123")
    lines = [line.rstrip(".") for line in prompt.split("\n") if " lives in " in line]
    return [line.split(" lives in ")["Who has" not in prompt] for line in lines]


# ---- models: the answer to a prompt, with a random generator for what is drawn


def perfect(prompt, rng):
    return solve(prompt)


def guessing(prompt, rng):
    """One of the acceptable answers, after idle talk in one case of four."""
    talks = rng.random() < 0.25
    return "I would have to think." if talks else rng.choice(acceptable_answers(prompt))


def right_with_probability_06(prompt, rng):
    wrong = [answer for answer in acceptable_answers(prompt) if answer != solve(prompt)]
    return solve(prompt) if rng.random() < 0.6 else rng.choice(wrong)


# ---- the server


def error_body(message):
    return json.dumps({"error": {"message": message, "type": "error", "param": None, "code": None}})


def completion(answer, tokens_in="100"):
    message = {"role": "assistant", "content": answer}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"completion_tokens": 2, "prompt_tokens": "here"}
    body = {"model": "scripted", "choices": [choice], "usage": usage}
    return json.dumps(body).replace('"here"', tokens_in)


COLOURED = "\x1b]0;mine\x07\x1b[31mred\x1b[0m \x9b31m \u202etxt"
ZEROS = gzip.compress(bytes(2**26), 1)
FAULTS = {  # status, body
    "rate limit": (429, error_body("slow down")),
    "overloaded": (503, error_body("overloaded")),
    "bad gateway": (502, "<html>bad gateway</html>"),
    "only 500": (500, "Internal Server Error"),
    "unauthorized": (401, error_body(f"no such key: {KEY}")),
    "not found": (404, error_body("no such model")),
    "broken JSON": (200, '{"choices": [{"message": {"cont'),
    "nested JSON": (200, "[" * 100_000),
    "error as 200": (200, error_body(f"upstream failed with {KEY}")),
    "web page": (200, "<html>sign in</html>"),
    "escape codes": (403, error_body(COLOURED)),
    "raw escape codes": (403, COLOURED),
    "escape codes as 200": (200, COLOURED),
    "redirect": (307, error_body("go there")),
}
for option in ("max_tokens", "temperature", "max_completion_tokens"):
    complaint = f"Unsupported parameter: '{option}' is not supported with this model. {COLOURED}"
    FAULTS[option] = (400, error_body(complaint))


class ScriptedModel(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # one packet per reply

    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, login = request["messages"][0]["content"], self.headers["Authorization"]
        with server.lock:
            fault = server.faults(len(server.requests))
            server.requests.append((time.monotonic(), prompt))
            server.logins.add(login)
            server.open_requests += 1
            server.most_open = max(server.most_open, server.open_requests)
        time.sleep(3 if fault == "silent" else server.delay)
        with server.lock:
            server.open_requests -= 1
            answer = None
            if not fault:  # drawn anew for every prompt: the order in which they come is no matter
                answers = server.answers.setdefault(prompt, [])
                answer = server.model(prompt, random.Random(f"{prompt} {len(answers)}"))
                answers.append(answer)
        self.reply(fault, *(FAULTS.get(fault) or (200, completion(answer))))

    def reply(self, fault, status, body):
        self.close_connection = fault in ("silent", "reset", "cut off", "drip", "endless")
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return self.connection.close()
        if fault == "indiscreet":  # repeats who asks, and where
            login = self.headers["Authorization"]
            plain = base64.b64decode(login.removeprefix("Basic ")).decode()
            status, body = 401, error_body(f"not allowed: {login}, that is {plain}, at {self.path}")
        body = ZEROS if fault == "gzip" else body.encode()
        self.send_response(status)
        missing = {"cut off": 100, "drip": 10**9, "endless": 10**12}
        self.send_header("Content-Length", str(len(body) + missing.get(fault, 0)))
        more = {"gzip": ("Content-Encoding", "gzip"), "rate limit": ("Retry-After", "1")}
        more["redirect"] = ("Location", self.path)
        if fault in more:
            self.send_header(*more[fault])
        self.end_headers()
        while fault in ("drip", "endless"):  # until the other side has enough of it
            self.wfile.write(b" " if fault == "drip" else bytes(2**16))
            self.wfile.flush()
            time.sleep(0.05 if fault == "drip" else 0)
        self.wfile.write(body)

    def log_message(self, *_): ...


@contextlib.contextmanager
def scripted_server(model=perfect, faults=lambda number: None, delay=0.0):
    """Serves chat completions on 127.0.0.1, to which the environment points; faults(number of the
    request) names the fault. Yields an object with .answers, {prompt: [answer, ...]}, .requests,
    [(time, prompt)], .logins, {Authorization, ...}, and .most_open."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ScriptedModel, False)
    server.request_queue_size, server.handle_error = 128, lambda *_: None
    server.server_bind()
    server.server_activate()
    server.model, server.faults, server.delay, server.lock = model, faults, delay, threading.Lock()
    server.answers, server.requests, server.logins = {}, [], set()
    server.open_requests = server.most_open = 0
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with environment(server.url):
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()


def environment(url, key=KEY, **more):
    variables = {"OPENAI_API_KEY": key, "OPENAI_BASE_URL": url, "NO_PROXY": "127.0.0.1"}
    return mock.patch.dict("os.environ", variables | more)


# ---- the program and its answers file


def run_llm(*arguments):
    code, out, err = run_main(llm, *arguments)
    assert KEY not in out + err
    return code, out, err


def attempts_in(path):
    """{question: its attempts} in an answers file: every line is whole, and nothing was asked again
    once it was settled."""
    text, asked = Path(path).read_text(), {}
    assert KEY not in text
    for line in map(json.loads, text.splitlines()):
        asked.setdefault((line["formulation"], line["D"], line["index"]), []).append(line)
    for attempts in asked.values():
        assert [attempt["attempt"] for attempt in attempts] == list(range(1, len(attempts) + 1))
        assert not any(attempt["acceptable"] for attempt in attempts[:-1])
    return asked
