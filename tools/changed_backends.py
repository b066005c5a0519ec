"""Which backends a change concerns: the matrix of CI's job ``backend``.

``python3 -m tools.changed_backends BASE`` prints two lines for ``$GITHUB_OUTPUT``. Without a
base, and for whatever is not known to concern some backends only, it is all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

PYTHONS = {"mooncake": ("3.11", "3.12"), "ucm": ("3.12",), "umbp": ("3.12",)}
"""The backends, and the Pythons that the client of each has wheels for, as in ``noxfile.py``."""

OWN = {"tools/umbp_without_gpu/": "umbp"}
"""Where else a backend's own files are."""

NONE = (
    ".github/workflows/drift.yml",
    ".github/workflows/nightly-gpu.yml",
    ".github/workflows/release.yml",
    "changelog.d/",
    "docs/",
    "examples/",
    "tests/cli/",
    "tests/contract/",
    "tests/e2e/",
    "tests/examples/",
    "tests/gpu/",
    "tests/packaging/",
    "tests/sglang/",
    "tests/suite/",
    "tools/sglang_drift/",
)
"""What other jobs test; a document in the root concerns no backend either."""


def backends_of(path: str) -> set[str]:
    """The backends whose tests a changed file may affect."""
    for name in PYTHONS:
        own = (f"packages/{name}/", f"tests/{name}/", f"tests/conformance/test_{name}.py")
        if path.startswith((*own, f"benchmarks/bench_{name}", f"benchmarks/{name}_")):
            return {name}
    for prefix, name in OWN.items():
        if path.startswith(prefix):
            return {name}
    if path.startswith(NONE) or ("/" not in path and path.endswith(".md")):
        return set()
    return set(PYTHONS)


def matrix(paths: Iterable[str] | None) -> list[dict[str, str]]:
    """One job a backend and Python; of every backend where the changed files are not known."""
    names = set(PYTHONS) if paths is None else {n for path in paths for n in backends_of(path)}
    return [
        {"backend": name, "python": python}
        for name, pythons in PYTHONS.items()
        if name in names
        for python in pythons
    ]


def changed(base: str) -> list[str]:
    """Files that differ from where this branch left ``base``, those that are gone included."""
    command = ["git", "diff", "--name-only", "--no-renames", f"{base}...HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else ""
    jobs = matrix(changed(base) if base else None)
    print(f"any={json.dumps(bool(jobs))}")
    print(f"matrix={json.dumps({'include': jobs})}")


if __name__ == "__main__":
    main()
