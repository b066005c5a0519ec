"""An SGLang wheel: fetched without its dependencies, read without being installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tools.sglang_drift.release import FACTORY, SERVING, STORAGE

NEWEST = "newest"


class FetchError(Exception):
    """There is no such wheel; the message has what pip said."""


def fetch(version: str, folder: Path) -> Path:
    """The wheel of a release for this Python; one that is in the folder already is used.

    Raises:
        FetchError: pip finds none.
    """
    have = sorted(folder.glob(f"sglang-{version}-*.whl"))
    if have:
        return have[0]
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.glob("*.whl"))
    wanted = "sglang" if version == NEWEST else f"sglang=={version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), wanted], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FetchError(f"pip download {wanted} failed:\n{done.stderr.strip()}")
    new = set(folder.glob("*.whl")) - before
    if len(new) == 1:
        return new.pop()
    # pip says so of a wheel that was there, and names it.
    named = [path for path in before if path.name in done.stdout]
    if len(named) != 1:
        raise FetchError(f"pip download {wanted} left no wheel in {folder}:\n{done.stdout}")
    return named[0]


def version_of(wheel: Path) -> str:
    """``0.5.23`` of ``sglang-0.5.23-cp312-....whl``."""
    return wheel.name.split("-")[1]


def sources(wheel: Path) -> dict[str, str]:
    """The text of every module under ``sglang/srt``, by path."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name).decode()
            for name in archive.namelist()
            if name.startswith(SERVING) and name.endswith(".py")
        }


STAND_INS = {
    "torch.py": '"""Stands in for torch: the storage interface only annotates with it."""\n',
    "sglang/__init__.py": '"""Stands in for SGLang\'s own, which imports the whole engine."""\n',
}
"""What is not SGLang's own in an excerpt, by path."""

EXCERPT = (STORAGE, FACTORY, "sglang/srt/mem_cache/storage/__init__.py", "sglang/srt/environ.py")
"""The release's own modules that a round trip needs."""


def unpack(modules: dict[str, str], folder: Path) -> None:
    """Lay out the storage interface and the factory of a release, with the two stand-ins."""
    for name, text in {**{name: modules[name] for name in EXCERPT}, **STAND_INS}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
