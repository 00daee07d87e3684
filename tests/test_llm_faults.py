"""llm.py when things go wrong: servers that misbehave, kills, two at once, wrong settings,
answers that are none."""

import json
import signal
import time

from llm import __main__ as llm
from tests.common import assert_refused, contents, start, wait_for
from tests.scripted_server import (
    COLOURED,
    acceptable_answers,
    attempts_in,
    environment,
    guessing,
    perfect,
    run_llm,
    scripted_server,
    solve,
)


def test_llm_survives_every_fault_and_keeps_each_answer_once(tmp_path):
    faults = ["max_tokens", "temperature", "max_completion_tokens", None, "rate limit"]
    faults += ["overloaded", "bad gateway", "silent", "broken JSON", "error as 200", "web page"]
    faults += ["empty", "endless tokens", "nested JSON", "reset", "cut off"]
    flags = "--model m --n 8 --D 2 3 --timeout 1 --concurrency 2 --out".split()
    with scripted_server(faults=lambda n: faults[n] if n < len(faults) else None) as server:
        code, out, err = run_llm(*flags, tmp_path / "a")
    asked = attempts_in(tmp_path / "a")
    attempts = [attempt for attempts in asked.values() for attempt in attempts]

    # only the empty answer counts as an attempt
    assert code == 0 and len(asked) == 6 * 8, err
    assert all(attempts[-1]["correct"] for attempts in asked.values())
    assert len(attempts) == 6 * 8 + 1 and "(1 of them empty)" in out
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
    for before, fault, says in (  # the server behaves for so many requests: these must be kept
        (0, "unauthorized", "no such key: ***"),
        (2, "unauthorized", "***"),
        (2, "not found", "no such model"),
        (0, "overloaded", "overloaded"),
        (0, "only 500", "500 - Internal Server Error (does it have a model m?)"),
        (2, "rate limit", "slow down"),
        (0, "reset", "no reply from http"),
        (2, "cut off", "no reply from http"),
        (2, "silent", "(ReadTimeout)"),
        (0, "redirect", "no reply from http"),
        (0, "web page", "sign in"),
        (2, "broken JSON", "2 replies in a row were no chat comp"),
        (2, "error as 200", "failed with ***"),
        (2, "endless tokens", '"prompt_tokens": 1e999'),
        (2, "nested JSON", "no chat completion: [[["),
        (0, "escape codes", "red"),
        (2, "raw escape codes", "red"),
        (2, "escape codes as 200", "red"),
    ):
        path = tmp_path / f"{fault}{before}"
        flags = "--model m --n 2 --concurrency 1 --retries 1 --timeout 0.5 --out".split()
        with scripted_server(faults=lambda n, b=before, f=fault: f if n >= b else None) as server:
            code, out, err = run_llm(*flags, path)
        assert code == 2 and err.count("\n") == 1 and says in err, err
        assert (out + err).replace("\n", "").isprintable(), "escape codes in " + repr(out + err)
        assert len(attempts_in(path)) == len(server.answers) == before
        final = "unauthorized", "not found", "redirect", "escape codes", "raw escape codes"
        assert len(server.requests) == before + (1 if fault in final else 2), "bounded"
    assert not COLOURED.isprintable()
    with environment("http://127.0.0.1:9/v1"):
        flags = "--model m --retries 1 --out".split()
        assert_refused(llm, *flags, tmp_path / "b", says="no reply from http")


def test_llm_stopped_run_goes_on_where_it_was(tmp_path):
    for blow, status in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        path = tmp_path / blow.name
        flags = "--model", "m", "--n", 30, "--D", 5, "--concurrency", 8, "--out", path
        with scripted_server(delay=0.02) as server:
            process = start("llm", *flags)
            wait_for(lambda: len(server.answers) > 50)
            process.send_signal(blow)
            out, err = process.communicate(timeout=20)
            assert process.returncode == status
            stopped = "llm.py: stopped; the same command goes on\n"
            assert err == ("" if blow == signal.SIGKILL else stopped)
            time.sleep(0.2)  # the server finishes what it was asked before

            # not kept: at most what was under way
            kept, answered = attempts_in(path), len(server.answers)
            assert answered - 8 <= len(kept) <= answered < 150
            if blow == signal.SIGKILL:
                path.write_bytes(path.read_bytes()[:-10])  # as if it had come within the last line
                kept.popitem()

            # the rest, and nothing of what is kept
            server.answers.clear()
            code, out, err = run_llm(*flags)
            assert code == 0 and f"150 questions, {len(kept)} of them answered before" in out
            assert len(attempts_in(path)) == 150
            answered = [len(answers) for answers in server.answers.values()]
            assert answered == [1] * (150 - len(kept))
            assert not {llm.make_question(f, D, 0, i)[0] for f, D, i in kept} & set(server.answers)
            assert run_llm(*flags)[0] == 0 and len(server.answers) == 150 - len(kept)
            assert server.most_open <= 8


def test_llm_asks_as_many_at_a_time_as_told(tmp_path):
    with scripted_server(delay=0.3) as server:
        flags = "--model m --n 4 --D 5 --concurrency 8 --out".split()
        assert run_llm(*flags, tmp_path / "a")[0] == 0
    assert server.most_open == 8


def test_llm_second_process_on_one_answers_file_is_refused(tmp_path):
    path, flags = tmp_path / "a", "--model m --n 6 --D 5 --concurrency 4 --out".split()
    (tmp_path / "link").symlink_to("a")
    with scripted_server(delay=0.5) as server:
        # two at the same moment, which on a busy machine are seconds apart: one asks every question
        # once, the other says what to do
        pair = [start("llm", *flags, path) for _ in range(2)]
        (_, err), (_, other_err) = (process.communicate(timeout=60) for process in pair)
        assert sorted(process.returncode for process in pair) == [0, 2], err + other_err
        assert f"another llm.py writes to {path}: wait until it ends, or" in err + other_err
        assert (err + other_err).count("\n") == 1
        assert len(attempts_in(path)) == 30 == len(server.requests)

        # while one runs: refused by any name of the file, but not another file in the folder
        server.delay = 0.05
        process = start("llm", *flags, path, "--n", 30)
        wait_for(lambda: len(server.requests) > 35)
        assert_refused(llm, *flags, path, says="another llm.py writes")
        assert_refused(llm, *flags, tmp_path / "link", says="another llm.py writes")
        assert run_llm(*flags, tmp_path / "b", "--n", 1)[0] == 0
        assert process.poll() is None

        # a kill leaves the file of the lock, which locks nothing
        process.kill()
        process.communicate()
        assert (tmp_path / "a.lock").exists()
        assert run_llm(*flags, path, "--n", 30)[0] == 0
        assert len(attempts_in(path)) == 150


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
        other = [attempt | {"formulation": "F9"}, {"formulation": "equations", "D": 5, "index": 0}]
        other += [attempt | {"D": []}, {}, ["x"], 3]
        texts = [line[:20], "my notes", "my notes\n", "[" * 100_000 + "\n"]
        for text in texts + [line + "\n" + json.dumps(value) + "\n" for value in other]:
            path.write_text(text)
            assert_refused(llm, *same, says="is not an answers file")
            assert_refused(llm, "--plot", path, says="is not an answers file")
            assert path.read_text() == text
        assert_refused(llm, "--plot", path.with_name("none"), says="cannot be read")


def test_llm_bad_flags_get_one_line(tmp_path):
    with environment("", key=""):
        assert_refused(llm, "--model", "m", says="set OPENAI_API_KEY, or OPENAI_BASE_URL")
    for flags, says in (
        ("", "required"),
        ("--show F1", "invalid choice"),
        ("--show functions --model m", "not"),
        ("--mod m", "required"),
        ("--model m x", "unrecognized"),
        ("--model m --n 0", "at least 1"),
        ("--model m --n many", "invalid int"),
        ("--model m --n 1000000000000", "at most 100000"),
        ("--model m --D 3 0", "at least 1"),
        ("--model m --D 1000000000000", "at most 100000"),
        ("--model m --temperature nan", "at least 0"),
        ("--model m --temperature inf", "finite"),
        ("--model m --timeout 0", "above 0"),
        ("--model m --concurrency 0", "at least 1"),
        ("--model m --retries -1", "at least 0"),
        ("--plot none.jsonl", "No such file"),
    ):
        assert_refused(llm, *flags.split(), says=says)


def test_llm_asks_until_acceptable_and_says_what_was_not(tmp_path):
    never = llm.make_question("kingdoms", None, 3, 1)[0]
    talk = iter(["It must be 7", None, "<think>0, no, 1</think>\n **{}.**"])  # the third is dressed

    def model(prompt, rng):
        answer = None if prompt == never else next(talk, "{}")
        return answer and answer.format(solve(prompt))

    flags = "--model m --seed 3 --n 2 --D 2 --attempts 5 --out".split()
    with scripted_server(model) as server:
        code, out, err = run_llm(*flags, tmp_path / "a")
        rows = llm.scores(attempts_in(tmp_path / "a"))
        assert code == 0 and "(6 of them empty)" in out
        names = ["n", "correct", "first", "attempts", "unresolved"]
        assert rows["equations", 2] == dict(zip(names, (2, 2, 1, 4, 0), strict=True))
        assert rows["kingdoms", None] == dict(zip(names, (2, 1, 1, 6, 1), strict=True))
        assert len(server.requests) == 4 + 6 + 3 * 2
        assert run_llm(*flags, tmp_path / "a")[0] == 0
        assert len(server.requests) == 16, "nothing is left to ask, not even the unresolved"


def test_llm_notices_when_sampling_again_does_nothing(tmp_path):
    def greedy(prompt, rng):
        """Always the same, an acceptable answer or not."""
        talk = "I would have to think." if len(prompt) % 2 else "It is hard to say."
        return acceptable_answers(prompt)[0] if len(prompt) % 3 else talk

    def wordy(prompt, rng):
        return f"{rng.random()} or so"

    def empty(prompt, rng):
        return None

    said = {}
    for model in (greedy, wordy, empty, guessing, perfect):
        path = tmp_path / model.__name__
        with scripted_server(model):
            flags = "--model m --n 4 --D 5 --attempts 4 --out".split()
            code, out, err = run_llm(*flags, path)
        again = sum(len(attempts) - 1 for attempts in attempts_in(path).values())
        note = f"{again} of {again} further attempts gave the same answer once more: sampling again"
        said[model] = out.count(" sampling again does nothing")
        assert code == 0 and (note in out) == (model is greedy)
        if model is greedy:
            assert again > 9 and note in run_llm("--plot", path, "--out", tmp_path / "png")[1]
    assert said == {
        greedy: 2,
        wordy: 0,
        empty: 0,
        guessing: 0,
        perfect: 0,
    }  # when noticed, and last
