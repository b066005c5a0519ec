"""``python -m tests.e2e.machines``: the nightly's machines and models, for GitHub's runner.

Without an argument the matrix of jobs; with the name of a model the variables of its run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parents[2] / ".github" / "gpu-machines.json"


def matrix(facts: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """A job for each backend and model, on a machine that has the backend."""
    return {
        "include": [
            {"backend": backend, "model": model, "runs_on": machine["runs_on"]}
            for machine in facts["machines"].values()
            for backend in machine["backends"]
            for model in facts["models"]
        ]
    }


def lines(facts: dict[str, Any], arguments: Sequence[str]) -> list[str]:
    """What is printed: ``name=value`` lines."""
    if not arguments:
        return [f"matrix={json.dumps(matrix(facts))}"]
    (model,) = arguments
    return [f"{name}={value}" for name, value in facts["models"][model].items()]


if __name__ == "__main__":
    print(*lines(json.loads(FACTS.read_text()), sys.argv[1:]), sep="\n")
