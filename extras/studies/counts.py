"""How many runs agree with each claim (claims.py), and the tables of them on the pages."""

from functools import cache

from extras.studies import grouped, markdown, share, span
from extras.studies.claims import CLAIMS
from extras.studies.rows import same_run
from train import DEFAULTS


SECTIONS = "5", "7.2", "8.2", "8.2 i", "8.2 ii", "9.2 i", "9.2 ii", "9.2 iii"  # of the paper
VARYING = "N", "D", "layers", "heads", "head_dimension", "places", "steps", "seed", "mlp"
VARYING += "positions", "optimizer", "dtype"  # what may vary between the runs of a claim
USUAL = DEFAULTS | dict(head_dimension=128, places=4)


@cache
def count(claim):
    """Return the rows of the runs that could disagree with a claim, and whether each `agrees`."""
    found = {}
    for row in claim.of():
        agrees = claim(row, row["flags"])
        if agrees is not None:
            first = found.setdefault(same_run(row), row | dict(agrees=True))
            first["agrees"] &= agrees
    return [*found.values()]


def said(name, values):
    """Return "heads 4-8" or "positions appended/rope"."""
    if isinstance(values[0], (str, bool)):
        return f"{name} {'/'.join(map(str, values))}"
    return f"{name.replace('_', ' ')} {span(values, '{:,}')}"


def which(claim):
    """Return which runs a claim counts: what it says of them, and their sizes."""
    texts, rows = [claim.runs], count(claim)
    for name in VARYING:
        values = sorted({row[name] for row in rows})
        if values != [USUAL[name]]:
            texts.append(said(name, values))
    return "; ".join(filter(None, texts))


def fails(claim):
    """Return where runs disagree: "optimizer adamw, D 3: 2 of 3"."""
    texts = []
    for values, group in sorted(grouped(count(claim), *claim.by).items()):
        words = [said(name, [value]) for name, value in zip(claim.by, values, strict=True)]
        failed = [not row["agrees"] for row in group]
        if any(failed):
            texts.append(f"{', '.join(words)}: {share(failed)}")
    return "; ".join(texts)


# ---- the tables


def on_page(page):
    return [claim for claim in CLAIMS if page in claim.pages]


def numbers_of(claim):
    """Return how many runs agree, and of how many."""
    return sum(row["agrees"] for row in count(claim)), len(count(claim))


def table(page):
    """Return a row per claim of a page."""
    lines = [[c.text, which(c), *numbers_of(c), fails(c)] for c in on_page(page)]
    return markdown(["claim", "runs", "agree", "of", "where it fails, how often"], *lines)


def sections():
    """Return a row per claim of the paper: AdamW with appended positions beside all others."""
    lines = []
    for section in SECTIONS:
        for claim in on_page(section):
            papers, others = [], []
            for row in count(claim):
                is_papers = (row["optimizer"], row["positions"]) == ("adamw", "appended")
                (papers if is_papers else others).append(row["agrees"])
            cells = [share(part) if part else "" for part in (papers, others)]
            lines.append([section, claim.text, *cells])
    head = "section", "claim, as counted", "AdamW, positions appended", "Muon, RoPE, or both"
    return markdown(head, *lines)


def readme_table(finding):
    """Return a row per claim of a finding of the README, with the page on which it stands."""
    lines = []
    for claim in on_page(f"README {finding}"):
        page = "paper" if "README" in claim.pages[0] else claim.pages[0]
        lines.append([claim.text, *numbers_of(claim), f"[{page}](results/{page}.md)"])
    return markdown(["claim", "agree", "of", "page"], *lines)
