"""Language models on the retrieval problem in words (Section 4)."""

import importlib
import sys


def package(name):
    """Import a package that not every command needs, or end with one line."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{error}: pip install -r extras/requirements.txt, or what its comments name")
