"""llm/: its questions against the paper's examples and a solver, its scores against models whose
accuracy is known, its figure."""

import json
from collections import Counter
from pathlib import Path
from unittest import mock

from parts.stats import wilson

import matplotlib

from llm import benchmark as llm
from tests.common import assert_refused, run_main
from tests.scripted_server import (
    attempts_in,
    guessing,
    perfect,
    right_with_probability_06,
    run_llm,
    scripted_server,
    solve,
)


# Appendix A: what each example chose, in the order in which the generators choose, and the example
# itself, several lines of it on one line.
APPENDIX_A = {
    "equations": (
        "bcda | 2301 | eghf | badc | kilj | efgh | npom | klij | qsrt | npom | s",
        """\
b = 2 | c = 3 | d = 0 | a = 1
e = b | g = a | h = d | f = c
k = e | i = f | l = g | j = h
n = k | p = l | o = i | m = j
q = n | s = p | r = o | t = m
What is the value of s? Say directly only the numeric value, without any other words.
Correct: 1
Acceptable: 0, 1, 2, 3
""",
    ),
    "lives-with": (
        "Charlie David Alice Bob | Cairo Delhi Berlin Amsterdam | Henry Eve Frank Grace | "
        "David Charlie Alice Bob | Kate Larry Jack Isabelle | Grace Frank Eve Henry | "
        "Mary Olivia Nick Peter | Jack Isabelle Kate Larry | Rose Queen Tom Sam | "
        "Peter Nick Olivia Mary | Rose",
        """\
Charlie lives in Cairo | David lives in Delhi | Alice lives in Berlin | Bob lives in Amsterdam
Henry lives with David | Eve lives with Charlie | Frank lives with Alice | Grace lives with Bob
Kate lives with Grace | Larry lives with Frank | Jack lives with Eve | Isabelle lives with Henry
Mary lives with Jack | Olivia lives with Isabelle | Nick lives with Kate | Peter lives with Larry
Rose lives with Peter | Queen lives with Nick | Tom lives with Olivia | Sam lives with Mary
Where does Rose live? Say directly only the name of the city, without any other words.
Correct: Berlin
Acceptable: Amsterdam, Berlin, Cairo, Delhi
""",
    ),
    "kingdoms": (
        "Silvania Novaria Aurora Florinia | Bob Alice Charlie David | "
        "celestian harmonian elysian lumin | Silvania Novaria Aurora Florinia | "
        "beef pork lamb chicken | lumin elysian harmonian celestian | "
        "Astralyte Nephryon Zephyrium Virellium | beef chicken lamb pork | "
        "Chronogy Aetherflux Somnosis Synthemia | Zephyrium Astralyte Virellium Nephryon "
        "| Chronogy",
        """\
Bob lives in Silvania. | Alice lives in Novaria. | Charlie lives in Aurora.
David lives in Florinia. | Silvanians believe in celestianism. | Novarians believe in harmonianism.
Aurorans believe in elysianism. | Florinians believe in luminism.
Luminists eat beef. | Elysianists eat pork. | Harmonianists eat lamb. | Celestianists eat chicken.
Beef contains Astralyte. | Chicken contains Nephryon. | Lamb contains Zephyrium.
Pork contains Virellium. | Zephyrium causes Chronogy. | Astralyte causes Aetherflux.
Virellium causes Somnosis. | Nephryon causes Synthemia.
Who has Chronogy? Say directly the name without other words.
Correct: Alice
Acceptable: Alice, Bob, Charlie, David
""",
    ),
    "functions": (
        "3201 | 1320 | 1032 | 1023 | bacd | 0231 | f | i",
        """\
a(0) = 3 | a(1) = 2 | a(2) = 0 | a(3) = 1 | b(0) = 1 | b(1) = 3 | b(2) = 2 | b(3) = 0
c(0) = 1 | c(1) = 0 | c(2) = 3 | c(3) = 2 | d(0) = 1 | d(1) = 0 | d(2) = 2 | d(3) = 3
e = b | f = a | g = c | h = d | i = 0 | j = 2 | k = 3 | l = 1
What is the value of f(i)? Say directly only the numeric value, without any other words.
Correct: 3
Acceptable: 0, 1, 2, 3
""",
    ),
    "relatives": (
        "Penny Lily Isabelle Cathy George Adam Kevin Ed Hank Mike Jane Fred Dana Olivia Bob Nancy "
        "| Canada Brazil France Kenya Italy Mexico Peru Laos Germany Japan England Hungary Norway "
        "Qatar Denmark Argentina | Jane Olivia Penny Dana Nancy Isabelle Lily Cathy | "
        "Ed Mike Adam George Hank Bob Fred Kevin | brother mother sister father | "
        "doctor engineer teacher lawyer | Eve",
        """\
Penny lives in Canada. | Lily lives in Brazil. | Isabelle lives in France. | Cathy lives in Kenya.
George lives in Italy. | Adam lives in Mexico. | Kevin lives in Peru. | Ed lives in Laos.
Hank lives in Germany. | Mike lives in Japan. | Jane lives in England. | Fred lives in Hungary.
Dana lives in Norway. | Olivia lives in Qatar. | Bob lives in Denmark. | Nancy lives in Argentina.
Johns mother is Jane. | Johns sister is Olivia. | Johns father is Ed. | Johns brother is Mike.
Chriss mother is Penny. | Chriss sister is Dana. | Chriss father is Adam.
Chriss brother is George. | Dianas mother is Nancy. | Dianas sister is Isabelle.
Dianas father is Hank. | Dianas brother is Bob.
Eves mother is Lily. | Eves sister is Cathy. | Eves father is Fred. | Eves brother is Kevin.
Doctors live with their brothers. | Lawyers live with their mothers.
Teachers live with their sisters. | Engineers live with their fathers.
John works as a doctor. | Chris works as an engineer. | Diana works as a teacher.
Eve works as a lawyer.
Where does Eve live? Say directly only the name, without any other words.
Correct: Brazil
Acceptable: Argentina, Brazil, Canada, Denmark, England, France, Germany, Hungary, Italy, Japan, \
Kenya, Laos, Mexico, Norway, Peru, Qatar
""",
    ),
}


class ChoicesOfThePaper:
    """Stands in for random.Random: hands out the choices of an example, each only where it is one
    of those offered."""

    def __init__(self, choices):
        self.choices = choices.split(" | ")

    def sample(self, items, k):
        choice = self.choices.pop(0)
        choice = choice.split() if " " in choice else list(choice)
        assert sorted(choice) == sorted(items) and k == len(items), (choice, items)
        return choice

    def choice(self, items):
        choice = self.choices.pop(0)
        assert choice in items, (choice, items)
        return choice


def test_llm_appendix_a_letter_by_letter():
    for formulation, (choices, example) in APPENDIX_A.items():
        rng = ChoicesOfThePaper(choices)
        with mock.patch("random.Random", return_value=rng):
            shown = run_main(llm, "--show", formulation)
        assert shown == (0, example.replace(" | ", "\n"), "")
        assert not rng.choices, "the example makes choices that the generator does not"


def test_llm_questions_agree_with_the_solver():
    for formulation in llm.FORMULATIONS:
        for D in (1, 2, 3, 4, 5, 7, 10, 30) if formulation == "equations" else (None,):
            questions = [llm.make_question(formulation, D, 0, index) for index in range(500)]
            given = [correct for _, correct, _ in questions]
            assert given == [solve(prompt) for prompt, _, _ in questions]

            # each acceptable answer is right at some time, none too often: chance is 1/4, 1/16
            assert all(acceptable == sorted(set(given)) for _, _, acceptable in questions)
            assert max(given.count(answer) for answer in given) < 2 * 500 / len(set(given))

            # no question comes twice, but where D = 1: it has only 24 * 24 * 4
            prompts = {prompt for prompt, _, _ in questions}
            assert len(prompts) == 500 or D == 1
            asked = {prompt.split("\n")[-1] for prompt in prompts}
            assert len(asked) == (16 if formulation == "functions" else 4)
    assert llm.make_question("kingdoms", None, 0, 7) == llm.make_question("kingdoms", None, 0, 7)
    assert llm.make_question("kingdoms", None, 0, 7) != llm.make_question("kingdoms", None, 1, 7)


def test_llm_four_chains_have_four_answers():
    ends = {"equations": list("qrst"), "kingdoms": "Chronogy Synthemia Somnosis Aetherflux".split()}
    for formulation, things in ends.items():
        prompt, _, acceptable = llm.make_question(formulation, 5, 0, 3)
        before, after = prompt.split("?")
        start = before.rindex(" ") + 1
        answers = [solve(f"{before[:start]}{thing}?{after}") for thing in things]
        assert sorted(answers) == acceptable


def test_llm_solver_finds_no_answer_where_there_is_none_or_two():
    def error_of(*lines):
        try:
            return solve("\n".join(lines))
        except (KeyError, ValueError) as error:
            return type(error)

    for formulation in llm.FORMULATIONS:
        *facts, question = llm.make_question(formulation, 5, 0, 0)[0].split("\n")
        assert error_of(facts[0], *facts, question) is ValueError, "said twice"
        assert error_of(question) is KeyError, "nothing is said"
        assert error_of(*facts, "So what?") is ValueError
        assert error_of("Once there was a king", *facts, question) is ValueError
    assert error_of("a = 1", "c = b", "What is the value of c?") is KeyError, "b is never said"


def test_llm_wilson_interval():
    assert [round(x, 4) for x in wilson(5, 10)] == [0.2366, 0.7634]
    for n in (1, 7, 500):
        for k in range(0, n + 1, max(1, n // 7)):
            for end in wilson(k, n):  # the ends p solve |k/n - p| = 1.96 sqrt(p (1 - p) / n)
                assert abs(abs(k / n - end) - 1.959964 * (end * (1 - end) / n) ** 0.5) < 1e-9
        assert wilson(0, n)[0] == 0 and wilson(n, n)[1] == 1


def test_llm_scripted_models_score_what_they_are(tmp_path):
    models = (perfect, 5, 2, 1), (guessing, 20, 5, 1 / 4), (right_with_probability_06, 20, 7, 0.6)
    for model, n, D, truth in models:
        path = tmp_path / model.__name__
        with scripted_server(model) as server:
            code, out, err = run_llm("--model", "m", "--n", n, "--D", D, "--out", path)
        assert code == 0, err
        rows = llm.scores(attempts_in(path))
        assert list(rows) == [("equations", D), *((f, None) for f in list(llm.FORMULATIONS)[1:])]
        for (formulation, _), row in rows.items():
            low, high = wilson(row["correct"], n)
            p = 1 / 16 if model is guessing and formulation == "relatives" else truth
            assert row["n"] == n and low <= p <= high, (model, formulation, low, high)
            assert f"{row['correct'] / n:.1%}  {low:6.1%} - {high:6.1%}" in out

        # the same numbers by another way: what the server said, against the solver
        said = server.answers.items()
        right = [[answer == solve(prompt) for answer in answers] for prompt, answers in said]
        total, asked = sum(rows.values(), Counter()), sum(map(len, right))
        assert total["attempts"] == asked == len(server.requests) and len(right) == 5 * n
        assert total["correct"] == sum(answers[-1] for answers in right)
        assert total["first"] == sum(answers[0] for answers in right)
        assert (asked > 5 * n) == (model is guessing)
        spent = f"{asked} attempts (0 empty, "
        tokens = f"{100 * asked} tokens in, {2 * asked} tokens out\n"
        last = [line for line in out.splitlines(True) if spent in line and line.endswith(tokens)]
        assert len(last) == 2 and last[0].startswith(f"{5 * n}/{5 * n} questions, 0.0 min left, ")


def test_llm_figure_2_says_which_models(tmp_path):
    files, figure = [tmp_path / "guessing", tmp_path / "other"], tmp_path / "f" / "figure2.svg"
    with scripted_server(guessing):
        for file, D in zip(files, (5, 10), strict=True):
            flags = "--model", file.name, "--n", 3, "--D", D, 2, "--out", file
            assert run_llm(*flags)[0] == 0
    assert list(llm.scores(attempts_in(files[1])))[:2] == [("equations", 2), ("equations", 10)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        code, out, err = run_llm("--plot", *files, "--out", figure)
        assert code == 0 and out.count("relatives") == 2, err
        for words in (
            "model: guessing (n = 3",
            "model: other (n = 3",
            "relatives",
            "random guessing: 1/4, relatives 1/16",
            "accuracy (%), Wilson 95% interval",
        ):
            assert words in figure.read_text(), words

        # not all of the formulations, and a name that is half a formula and half an escape code
        lines = [json.loads(line) for line in files[0].open() if '"lives-with"' in line]
        for line in lines:
            line["settings"]["model"] = "_$x^{$_\x1b[31m"
        files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, out, err = run_llm("--plot", files[0], "--out", figure)
        assert code == 0 and "\x1b" not in out and out.startswith("model: _$x^{$_ [31m\n"), err
        assert "model: _$x^{$_ [31m (n = 3 or more" in figure.read_text()


def test_llm_plots_only_what_it_can(tmp_path):
    empty, whole = tmp_path / "empty", tmp_path / "whole"
    empty.write_text("")
    with scripted_server():
        assert run_llm("--model", "m", "--n", 1, "--D", 5, "--out", whole)[0] == 0
    assert_refused(llm, "--plot", empty, says="no answered question")
    code, out, err = run_llm("--plot", empty, whole, "--out", tmp_path / "figure.png")
    assert code == 0 and "empty holds no answered question: left out" in out
    assert_refused(llm, "--plot", whole, "--out", Path(tmp_path, "a.jsonl"), says="not supported")
