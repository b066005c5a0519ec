"""What the ``hicache`` command does with this adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.backend("ucm")

SMALL = ["--backend", "ucm", "--model", "mla", "--layers-div", "16", "--pages", "2", "--json"]


def roundtrip(where: str, current: Path) -> tuple[int, Any]:
    """Exit code and answer. UCM's log goes to files, as it does unless told otherwise."""
    environ = {**os.environ, "UCM_LOG_LEVEL": "error", "UCM_LOG_TO_FILE": "true"}
    command = [sys.executable, "-m", "hicache_shared.cli", "roundtrip", *SMALL, "--root", where]
    done = subprocess.run(command, cwd=current, env=environ, capture_output=True, check=False)
    return done.returncode, json.loads(done.stdout)


def test_a_round_trip_leaves_nothing_where_it_ran_nor_in_the_current_folder(
    root: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    code, answer = roundtrip(str(root), here)
    assert (code, answer["byte_exact"]) == (0, True)
    assert list(root.iterdir()) == []
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [("/absent", 3, "make the folder"), (__file__, 3, "no folder"), ("here", 2, "absolute path")],
)
def test_a_round_trip_in_what_is_no_root_says_so(
    tmp_path: Path, where: str, code: int, said: str
) -> None:
    (tmp_path / "here").mkdir()
    ended, answer = roundtrip(where, tmp_path)
    assert ended == code
    assert said in answer["error"]["message"]
