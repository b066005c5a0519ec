"""UMBP's real client on a machine without ROCm, for tests.

``python3 -m tools.umbp_without_gpu ENVIRONMENT`` puts it into a virtual environment.

**HIP and HSA, AMD's GPU runtimes, are stand-ins there**: libraries of a few functions that
answer "no device" (:mod:`stand_ins`). All else is the real thing: the client of PyPI's
``amd-mori`` and its servers, with host memory, files and sockets. No claim about GPU memory or
RDMA may rest on what runs there. A machine with ROCm needs none of this: ``pip install
'hicache-umbp[client]'``.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

NOTICE = (
    "HIP and HSA are stand-ins here that answer 'no device': nothing that runs on them says "
    "anything about GPU memory or RDMA."
)


class SetUpError(Exception):
    """The client cannot be installed; the message says why and what to do."""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return what it prints on standard output.

    Raises:
        SetUpError: it fails; the message holds the end of its standard error.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        end = "\n".join((done.stderr or done.stdout).strip().splitlines()[-10:])
        raise SetUpError(f"this command failed ({done.returncode}): {' '.join(words)}\n{end}")
    return done.stdout
