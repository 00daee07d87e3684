"""Questions on the retrieval problem in words, with four chains each, as in Appendix A."""

import random


NUMBER_ONLY = "Say directly only the numeric value, without any other words."

# The first line has the words where the chains end. Each further line has the words of a step, and
# the sentence that connects a new word to an old one. The last line is the question.
LIVES_WITH = """\
Amsterdam Berlin Cairo Delhi
Alice Bob Charlie David: {new} lives in {old}
Eve Frank Grace Henry: {new} lives with {old}
Isabelle Jack Kate Larry: {new} lives with {old}
Mary Nick Olivia Peter: {new} lives with {old}
Queen Rose Sam Tom: {new} lives with {old}
Where does {queried} live? Say directly only the name of the city, without any other words."""

KINGDOMS = """\
Alice Bob Charlie David
Novaria Silvania Aurora Florinia: {old} lives in {new}.
harmonian celestian elysian lumin: {old}ns believe in {new}ism.
lamb chicken pork beef: {Old}ists eat {new}.
Zephyrium Nephryon Virellium Astralyte: {Old} contains {new}.
Chronogy Synthemia Somnosis Aetherflux: {old} causes {new}.
Who has {queried}? Say directly the name without other words."""

PEOPLE, JOBS = "John Chris Diana Eve".split(), "doctor lawyer teacher engineer".split()
WOMEN = "Cathy Dana Isabelle Jane Lily Nancy Olivia Penny".split()
MEN = "Adam Bob Ed Fred George Hank Kevin Mike".split()
COUNTRIES = """Argentina Brazil Canada Denmark England France Germany Hungary Italy Japan Kenya
Laos Mexico Norway Peru Qatar""".split()


def paired(rng, left, right):
    """Draw {left: right} with both sides in a random order."""
    return dict(zip(rng.sample(left, len(left)), rng.sample(right, len(right)), strict=True))


def chain_question(rng, chain):
    """F1, F2, F3: ask about a word of the last step; the answer is the end of its chain."""
    ends, *steps, question = chain.splitlines()
    words, lines, old_word = ends.split(), [], {}
    for step in steps:
        old_words, (words, statement) = words, step.split(": ")
        words = words.split()
        for new, old in paired(rng, words, old_words).items():
            lines.append(statement.format(new=new, old=old, Old=old.capitalize()))
            old_word[new] = old
    answer = queried = rng.choice(words)
    while answer in old_word:
        answer = old_word[answer]
    return "\n".join([*lines, question.format(queried=queried)]), answer, sorted(ends.split())


def variable(i):
    """Name variable i: a, ..., z, aa, ab, ... like the columns of a spreadsheet."""
    return (variable(i // 26 - 1) if i >= 26 else "") + chr(ord("a") + i % 26)


def equations(rng, D):
    """F1 (A.1), with D equations per chain."""
    steps = [" ".join(variable(4 * k + i) for i in range(4)) + ": {new} = {old}" for k in range(D)]
    question = f"What is the value of {{queried}}? {NUMBER_ONLY}"
    return chain_question(rng, "\n".join(["0 1 2 3", *steps, question]))


def functions(rng, D):
    """F4 (A.4), conditional: the answer depends on a function and on its argument."""
    table = {f: rng.sample("0123", 4) for f in "abcd"}
    function = dict(zip("efgh", rng.sample("abcd", 4), strict=True))
    value = dict(zip("ijkl", rng.sample("0123", 4), strict=True))
    f, x = rng.choice("efgh"), rng.choice("ijkl")
    lines = [f"{name}({i}) = {y}" for name, row in table.items() for i, y in enumerate(row)]
    lines += [f"{left} = {right}" for left, right in (function | value).items()]
    lines.append(f"What is the value of {f}({x})? {NUMBER_ONLY}")
    return "\n".join(lines), table[function[f]][int(value[x])], list("0123")


def relatives(rng, D):
    """F5 (A.5), conditional: the job of a person decides with which relative the person lives."""
    home = paired(rng, WOMEN + MEN, COUNTRIES)
    lines = [f"{person} lives in {country}." for person, country in home.items()]
    women, men = iter(rng.sample(WOMEN, 8)), iter(rng.sample(MEN, 8))
    family = {}
    for person in PEOPLE:
        family[person] = {"mother": next(women), "sister": next(women)}
        family[person] |= {"father": next(men), "brother": next(men)}
        lines += [f"{person}s {relation} is {name}." for relation, name in family[person].items()]
    lives_with = dict(zip(JOBS, rng.sample(list(family["Eve"]), 4), strict=True))
    job = dict(zip(PEOPLE, rng.sample(JOBS, 4), strict=True))
    queried = rng.choice(PEOPLE)
    lines += [f"{j.capitalize()}s live with their {lives_with[j]}s." for j in JOBS]
    lines += [f"{p} works as {'an' if j == 'engineer' else 'a'} {j}." for p, j in job.items()]
    lines.append(f"Where does {queried} live? Say directly only the name, without any other words.")
    return "\n".join(lines), home[family[queried][lives_with[job[queried]]]], COUNTRIES


FORMULATIONS = {
    "equations": equations,
    "lives-with": lambda rng, D: chain_question(rng, LIVES_WITH),  # F2 (A.2), D = 5
    "kingdoms": lambda rng, D: chain_question(rng, KINGDOMS),  # F3 (A.3), D = 5, queried backwards
    "functions": functions,
    "relatives": relatives,
}


def make_question(formulation, D, seed, index):
    """Make question `index`: (prompt, correct answer, acceptable answers), the same every time."""
    return FORMULATIONS[formulation](random.Random(f"{seed} {formulation} {D} {index}"), D)
