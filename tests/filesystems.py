"""File systems of a kind and a size, for tests of a store that keeps files."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")
"""Where Linux has a tmpfs for everybody."""


@contextmanager
def tmpfs_folder() -> Iterator[Path]:
    """A folder on a tmpfs, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="hicache-", dir=MEMORY))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def small_tmpfs(nbytes: int) -> Iterator[tuple[Path, int]]:
    """A tmpfs of its own, and what it holds; needs root."""
    with tempfile.TemporaryDirectory(prefix="hicache-") as folder:
        _run("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "hicache", folder)
        try:
            free = os.statvfs(folder)
            yield Path(folder), free.f_bavail * free.f_frsize
        finally:
            _run("umount", folder)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A mounted file system that cannot be written for the while; needs root."""
    _run("mount", "-o", "remount,ro", str(folder))
    try:
        yield
    finally:
        _run("mount", "-o", "remount,rw", str(folder))


def fill(file: Path) -> None:
    """Let a file take all the space that its file system has left."""
    block = bytes(1 << 16)
    with file.open("wb", buffering=0) as out:
        try:
            while out.write(block) == len(block):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
