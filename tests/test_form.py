"""The form of our files, so that it cannot decay: what a reader takes in at one look, and which
file may know which."""

import ast
import subprocess

import pytest

from tests.common import HERE


LONGER = {("train.py", "train"): 80, ("ablate.py", "find_circuit"): 80}
OLDEST_PYTHON = (3, 10)

PARTS = "flags runs circuit flow search emergence".split()  # each may import those before it
STAGES = "train sweep ablate analyze".split()
ROOMS = "studies pages llm mechanisms".split()
FOLDERS = [".", "parts", *ROOMS, "tests", "bench"]
FILES = {str(path.relative_to(HERE)): path for at in FOLDERS for path in (HERE / at).glob("*.py")}
FIRST_LEVEL = "README.md requirements.txt LICENSE ruff.toml .gitignore .ci data.py model.py"
FIRST_LEVEL += " train.py sweep.py ablate.py analyze.py test_all.py parts studies pages llm"
FIRST_LEVEL += " mechanisms tests bench results"


def read(name):
    return ast.parse(FILES[name].read_text(), name, feature_version=OLDEST_PYTHON)


@pytest.mark.parametrize("name", FILES)
def test_form(name):
    lines, tree = FILES[name].read_text().splitlines(), read(name)
    wide = [number for number, line in enumerate(lines, 1) if len(line) > 100]
    assert not wide, f"lines of more than 100 columns: {wide}"
    assert len(lines) <= (300 if name.startswith("tests/") else 600), f"{len(lines)} lines"
    assert ast.get_docstring(tree), "no docstring"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            assert length <= LONGER.get((name, node.name), 60), (node.name, length)
        if isinstance(node, ast.Attribute) and node.attr == "path":
            assert getattr(node.value, "id", "") != "sys", f"line {node.lineno}: sys.path"


# ---- which file may know which


def imported(name):
    """The files of ours that a file imports anywhere: {"data", "parts.config", ...}."""
    found = set()
    for node in ast.walk(read(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}, line {node.lineno}: name the file from the root"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {path.removesuffix(".py").replace("/", ".") for path in FILES}
    return found & ours


def allowed(name):
    """What it may import, each a file or a folder."""
    folder, _, own = name.removesuffix(".py").rpartition("/")
    if folder == "parts":
        before = PARTS[: PARTS.index(own)] if own in PARTS else []
        core = ["data", "model"] if own in PARTS else []
        return core + [f"parts.{part}" for part in before]
    if own in STAGES:
        return ["data", "model", "parts", *STAGES]
    if folder in ROOMS:
        return ["data", "model", "parts", *STAGES, folder] + ["studies"] * (folder == "pages")
    return []  # data.py, model.py, test_all.py


@pytest.mark.parametrize("name", [name for name in FILES if name[:5] not in ("tests", "bench")])
def test_imports_point_one_way(name):
    for other in imported(name):
        assert {other, other.partition(".")[0]} & {*allowed(name)}, f"{name} imports {other}"


def test_no_stage_is_imported_in_a_circle():
    left = {stage: imported(f"{stage}.py") & {*STAGES} for stage in STAGES}
    while free := [stage for stage in left if not left[stage] & left.keys()]:
        for stage in free:
            del left[stage]
    assert not left


def test_the_first_level_holds_what_it_should():
    listed = subprocess.run(["git", "ls-files"], cwd=HERE, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    assert {line.partition("/")[0] for line in listed.stdout.split()} == {*FIRST_LEVEL.split()}
