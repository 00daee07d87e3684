"""llm/ when things go wrong: servers that misbehave, kills, two at once, wrong settings, answers
that are none, full disks."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
import tracemalloc

from llm import benchmark as llm
from tests.common import HERE, assert_refused, contents, start, wait_for
from tests.scripted_server import (
    COLOURED,
    attempts_in,
    completion,
    environment,
    run_llm,
    scripted_server,
    solve,
)


def test_llm_survives_every_fault_and_keeps_each_answer_once(tmp_path):
    faults = ["max_tokens", "temperature", "max_completion_tokens", None, "rate limit"]
    faults += ["overloaded", "bad gateway", "silent", "drip", "broken JSON", "error as 200"]
    faults += ["web page", "empty", "nested JSON", "reset", "cut off"]
    flags = "--model m --n 8 --D 2 3 --timeout 0.7 --concurrency 4 --out".split()
    with scripted_server(faults=lambda n: faults[n] if n < len(faults) else None) as server:
        code, out, err = run_llm(*flags, tmp_path / "a")
    asked = attempts_in(tmp_path / "a")
    attempts = [attempt for attempts in asked.values() for attempt in attempts]

    # only the empty answer counts as an attempt
    assert code == 0 and len(asked) == 6 * 8, err
    assert all(attempts[-1]["correct"] for attempts in asked.values())
    assert len(attempts) == 6 * 8 + 1 and "(1 empty, 0 as the one before)" in out
    assert [len(answers) for answers in server.answers.values()] == [1] * 6 * 8
    assert len(server.requests) == 6 * 8 + len(faults) - 1

    # what was rejected is left out, and that is said, without the escape codes in it
    said = [line.split(":")[0] for line in out.splitlines() if line.startswith("going on with")]
    assert said == [
        "going on with {'temperature'",
        "going on with {'max_completion_tokens'",
        "going on with no options",
    ]
    assert out.replace("\n", "").isprintable()
    assert all(attempt["options"] == {} for attempt in attempts)
    limited, prompt = server.requests[faults.index("rate limit")]
    waits = [again - limited for again, asked in server.requests if asked == prompt]
    assert any(1 <= wait < 10 for wait in waits), "Retry-After was 1 second"


def test_llm_ends_in_one_clear_line(tmp_path):
    right = "are OPENAI_BASE_URL, OPENAI_API_KEY and the model m right?"
    for before, fault, says in (  # the server behaves for so many requests: these must be kept
        (0, "unauthorized", "no such key: ***"),
        (2, "not found", "no such model"),
        (0, "overloaded", "overloaded"),
        (0, "only 500", f"Internal Server Error ({right})"),
        (0, "reset", "no reply from http"),
        (2, "cut off", "no reply from http"),
        (2, "silent", "(ReadTimeout)"),
        (2, "drip", "(ReadTimeout)"),
        (2, "redirect", "/v1 says Error code: 307 - "),  # to itself
        (0, "web page", "sign in"),
        (2, "broken JSON", "no chat completion, 1 times"),
        (2, "error as 200", "failed with ***"),
        (2, "nested JSON", "times in a row: [[["),
        (0, "escape codes", "red"),
        (2, "raw escape codes", "red"),
        (2, "escape codes as 200", "red"),
    ):
        path = tmp_path / f"{fault}{before}"
        flags = "--model m --n 2 --concurrency 1 --retries 0 --timeout 0.4 --out".split()
        with scripted_server(faults=lambda n, b=before, f=fault: f if n >= b else None) as server:
            code, out, err = run_llm(*flags, path)
        assert code == 2 and err.count("\n") == 1 and says in err, err
        assert (out + err).replace("\n", "").isprintable(), "escape codes in " + repr(out + err)
        assert len(attempts_in(path)) == len(server.answers) == before
        assert len(server.requests) == before + 1
    assert not COLOURED.isprintable()
    with scripted_server(faults=lambda n: "broken JSON") as server:
        assert_refused(llm, *flags, tmp_path / "b", "--retries", 1, says="2 times in a row")
        assert len(server.requests) == 2, "bounded"


def test_llm_reads_no_more_of_a_reply_than_its_bound(tmp_path):
    flags = "--model m --retries 0 --out".split()
    for fault, most in ("gzip", 2**25), ("endless", 5 * llm.MOST_BYTES):
        with scripted_server(faults=lambda n, f=fault: f):
            tracemalloc.start()
            assert_refused(llm, *flags, tmp_path / fault, says="sent no chat completion")
            assert tracemalloc.get_traced_memory()[1] < most, "2**26 bytes, or more than there are"
            tracemalloc.stop()


def test_llm_counts_of_tokens_that_cannot_be_are_none():
    for said, counted in ("7", 7), ("0", 0), ("-3", 0), ("-1e30", 0), ("1e999", 0), ("2.5", 0):
        assert llm.read_reply(completion("1", said))["tokens_in"] == counted
    for said in "NaN", '"7"', "[7]", "null", "1" + 30 * "0":
        assert llm.read_reply(completion("1", said))["tokens_in"] == 0


def test_llm_stopped_run_goes_on_where_it_was(tmp_path):
    (tmp_path / "link").symlink_to("SIGKILL")
    for blow, status in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        path = tmp_path / blow.name
        flags = "--model", "m", "--n", 30, "--D", 5, "--concurrency", 8, "--out", path
        with scripted_server(delay=0.05) as server:
            process = start("llm", *flags, env=os.environ | {"PYTHONUNBUFFERED": ""})
            wait_for(lambda: len(server.answers) > 9)
            if blow == signal.SIGKILL:  # while it runs, nothing else writes to the file
                assert_refused(llm, *flags, says=f"another process writes to {path}: wait until")
                assert_refused(llm, *flags[:-1], tmp_path / "link", says="another process writes")
                assert run_llm(*flags, "--n", 1, "--out", tmp_path / "other")[0] == 0
            process.send_signal(blow)
            out, err = process.communicate(timeout=20)
            assert process.returncode == status
            stopped = "llm: stopped; the same command goes on\n"
            assert err == ("" if blow == signal.SIGKILL else stopped)
            assert out.startswith("150 questions, 0 of them answered before\n2/150 questions, ")
            time.sleep(0.2)  # the server finishes what it was asked before

            # not kept: at most what was under way
            kept, answered = attempts_in(path), len(server.answers)
            assert answered - 8 <= len(kept) <= answered < 150 and server.most_open >= 8
            if blow == signal.SIGKILL:
                path.write_bytes(path.read_bytes()[:-10])  # as if it had come within the last line
                kept.popitem()

            # the rest, and nothing of what is kept; the kill left no lock
            server.answers.clear()
            server.delay = server.most_open = 0
            code, out, err = run_llm(*flags)
            assert code == 0 and f"150 questions, {len(kept)} of them answered before" in out
            assert len(attempts_in(path)) == 150
            answered = [len(answers) for answers in server.answers.values()]
            assert answered == [1] * (150 - len(kept))
            assert not {llm.make_question(f, D, 0, i)[0] for f, D, i in kept} & set(server.answers)
            assert run_llm(*flags)[0] == 0 and len(server.answers) == 150 - len(kept)
            assert server.most_open <= 8


def test_llm_ctrl_c_while_modules_load_is_one_line(tmp_path):
    text = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    for module, flags in ("filelock", ["--show", "functions"]), ("openai", ["--model", "m"]):
        folder = tmp_path / module
        folder.mkdir()
        (folder / f"{module}.py").write_text(text)
        with environment("http://127.0.0.1:9/v1", PYTHONPATH=f"{folder}:{HERE}"):
            process = start("llm", *flags, cwd=folder)
            _, err = process.communicate()
        assert (process.returncode, err) == (130, "llm: stopped; the same command goes on\n")


def test_llm_output_that_nobody_reads_or_nothing_holds(tmp_path):
    read_end, pipe = os.pipe()
    os.close(read_end)
    full = os.open("/dev/full", os.O_WRONLY)
    said = "llm: [Errno 28] No space left on device: make room, then the same command goes on\n"
    for out, flags, expected in (
        (pipe, ["--show", "functions"], (1, "")),
        (os.dup(pipe), ["--help"], (1, "")),
        (full, ["--show", "functions"], (2, said)),
    ):
        command = [sys.executable, "-m", "llm", *flags]
        how = {"env": os.environ | {"PYTHONUNBUFFERED": ""}, "text": True}
        ended = subprocess.run(command, cwd=HERE, stdout=out, stderr=subprocess.PIPE, **how)
        assert (ended.returncode, ended.stderr) == expected
        os.close(out)


def test_llm_full_disk_loses_nothing_that_was_answered(tmp_path):
    path, limits = tmp_path / "a", resource.getrlimit(resource.RLIMIT_FSIZE)
    flags = "--model", "m", "--n", 6, "--D", 5, "--out", path
    with scripted_server():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        try:
            assert_refused(llm, *flags, says="make room, then the same command goes on")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        *lines, rest = path.read_text().split("\n")
        assert len(lines) > 5 and rest and path.stat().st_size == 5000
        code, out, _ = run_llm(*flags)
        assert code == 0 and f"30 questions, {len(lines)} of them answered before" in out
        assert len(attempts_in(path)) == 30 and path.read_text().startswith("\n".join(lines))
        assert_refused(llm, *flags[:-1], path / "in a file", says=f"{path}': choose another --out")


def test_llm_settings_are_never_mixed(tmp_path):
    path = tmp_path / "a"
    same = ["--model", "m", "--n", 2, "--D", 5, "--out", path]
    with scripted_server() as server:
        assert run_llm(*same)[0] == 0
        before, line = contents(tmp_path), path.read_text().partition("\n")[0]
        for flag, value, held in (
            ("--seed", 1, 0),
            ("--temperature", 0, 1.0),
            ("--max-tokens", 9, 4096),
            ("--attempts", 3, 10),
            ("--model", "x", "m"),
        ):
            assert_refused(llm, *same, flag, value, says=f"{held}, not {value}")
        with environment(server.url + "/other"):
            assert_refused(llm, *same, says="endpoint http://127.0.0.1")
        assert contents(tmp_path) == before and len(server.requests) == 10

        # more of the same
        assert run_llm(*same, "--n", 3, "--D", 5, 7)[0] == 0
        assert len(server.requests) == 10 + 5 + 3

        # files that are something else
        attempt = json.loads(line)
        other = [attempt | {"formulation": "F9"}, attempt | {"D": None}, attempt | {"D": 0}]
        other += [attempt | {"settings": attempt["settings"] | {"seed": 1}}, {}, ["x"], 3]
        texts = ["my notes", "my notes\n", line[:20], "[" * 100_000 + "\n"]
        for text in texts + [line + "\n" + json.dumps(value) + "\n" for value in other]:
            path.write_text(text)
            assert_refused(llm, *same, says="is not an answers file, see its line")
            assert path.read_text() == text

        # damaged: a value of another kind
        for wrong in [], {}, None, "1", 1.5:
            for kinds, changed in (
                (llm.ATTEMPT, lambda damage: attempt | damage),
                (llm.SETTINGS, lambda damage: attempt | {"settings": attempt["settings"] | damage}),
            ):
                for key in [key for key, kind in kinds.items() if kind is not type(wrong)]:
                    path.write_text(line + "\n" + json.dumps(changed({key: wrong})) + "\n")
                    assert_refused(llm, "--plot", path, says="see its line 2: mend it, or name")
        assert_refused(llm, "--plot", path.with_name("none"), says="cannot be read")


def test_llm_bad_flags_get_one_line(tmp_path):
    with environment("", key=""):
        assert_refused(llm, "--model", "m", says="set OPENAI_API_KEY, or OPENAI_BASE_URL")
    for flags, says in (
        ("", "required"),
        ("--show F1", "invalid choice"),
        ("--show functions --model m", "not"),
        ("--show functions --D 3", "for equations alone"),
        ("--show equations --D 3 4", "takes one --D"),
        ("--mod m", "required"),
        ("--model m x", "unrecognized"),
        ("--model m --n 0", "at least 1"),
        ("--model m --n many", "invalid int"),
        ("--model m --n 1000000000000", "at most 1000000"),
        ("--model m --D 3 0", "at least 1"),
        ("--model m --D 1000000000000", "at most 1000000"),
        ("--model m --temperature nan", "at least 0"),
        ("--model m --timeout 0", "at least 0.001"),
        ("--plot none.jsonl", "No such file"),
    ):
        assert_refused(llm, *flags.split(), says=says)
    assert "equations per chain" not in run_llm("--show", "equations", "--D", 1)[1]
    assert run_llm("--help")[1].startswith("usage: python -m llm [-h]")


def test_llm_asks_until_acceptable_and_says_what_was_not(tmp_path):
    never = llm.make_question("kingdoms", None, 3, 1)[0]
    talk = iter(["It is 7", "It is 7", None, None, "<think>0, no, 1</think>\n **{}.**"])  # dressed

    def model(prompt, rng):
        answer = None if prompt == never else next(talk, "{}")
        return answer and answer.format(solve(prompt))

    flags = "--model m --seed 3 --n 2 --D 2 --attempts 6 --out".split()
    with scripted_server(model) as server:
        code, out, err = run_llm(*flags, tmp_path / "a")
        rows = llm.scores(attempts_in(tmp_path / "a"))
        assert code == 0 and "19 attempts (8 empty, 1 as the one before), 1900 tokens in" in out
        names = ["n", "correct", "first", "attempts", "unresolved"]
        assert rows["equations", 2] == dict(zip(names, (2, 2, 1, 6, 0), strict=True))
        assert rows["kingdoms", None] == dict(zip(names, (2, 1, 1, 7, 1), strict=True))
        assert len(server.requests) == 6 + 7 + 3 * 2
        assert run_llm(*flags, tmp_path / "a")[0] == 0
        assert len(server.requests) == 19, "nothing is left to ask, not even the unresolved"
