"""How the tests of SGLang's own classes begin, and what is done about its warnings."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.sglang import stand_ins


def left_out_without_sglang(first: str) -> list[str]:
    """pytest's ``collect_ignore_glob`` of a folder of tests that need SGLang's cache classes.

    Where they are installed, the stand-ins are put in, and the folder's module ``first`` is
    imported before its tests.
    """
    if any(importlib.util.find_spec(name) is None for name in ("sglang", "transformers")):
        return ["test_*.py"]
    stand_ins.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, torch's and transformers' own, on import
        importlib.import_module(first)
    return []


def mark(items: Iterable[pytest.Item], folder: Path, *marks: pytest.MarkDecorator) -> None:
    """Mark a folder's tests; SGLang's warnings are not ours to mend."""
    for item in items:
        if folder in item.path.parents:
            for one in (*marks, pytest.mark.filterwarnings("default")):
                item.add_marker(one)
