"""A run of pytest inside a test, with this repository's ``conftest.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.backends import REQUIRE

ROOT = Path(__file__).parents[2]


def inner_run(
    folder: Path, files: dict[str, str], *options: str, require: bool = False
) -> tuple[int, list[str]]:
    """Run the files (name -> text) in an empty folder: the exit status and lines printed."""
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    ini = f"[pytest]\nmarkers = backend(name): of a test\npythonpath = {ROOT}\n"
    for name, text in {"conftest.py": conftest, "pytest.ini": ini, **files}.items():
        (folder / name).write_text(text)
    environ = {name: value for name, value in os.environ.items() if name != REQUIRE}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", *options, str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**environ, REQUIRE: "1"} if require else environ,
    )
    return run.returncode, run.stdout.splitlines()
