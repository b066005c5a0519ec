"""The models, written once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.sglang.engine.engines import ROOT


@pytest.fixture(scope="session")
def models() -> Iterator[Path]:
    """A folder with all tiny models, written by a process of its own."""
    with TemporaryDirectory(prefix="hicache-models-") as folder:
        command = [sys.executable, "-m", "tests.sglang.engine.tiny_models", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        yield Path(folder)
