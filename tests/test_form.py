"""The form of our files, so that it cannot decay: what a reader can take in at one look."""

import ast

import pytest

from tests.common import HERE


FOLDERS = [HERE, HERE / "tests", HERE / "mechanisms", HERE / "bench"]
FILES = sorted(path for folder in FOLDERS for path in folder.glob("*.py"))
LONGER = {("train.py", "train"): 80}  # the training loop, from top to bottom
OLDEST_PYTHON = (3, 10)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HERE)))
def test_form(path):
    text = path.read_text()
    lines, tree = text.splitlines(), ast.parse(text, str(path), feature_version=OLDEST_PYTHON)
    wide = [number for number, line in enumerate(lines, 1) if len(line) > 100]
    assert not wide, f"lines of more than 100 columns: {wide}"
    assert path.parent.name != "tests" or len(lines) <= 300, f"{len(lines)} lines"
    assert ast.get_docstring(tree), "no docstring"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            assert length <= LONGER.get((path.name, node.name), 60), (node.name, length)
