"""Compare our copy of SGLang's storage contract with SGLang releases, and try each of them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.sglang_drift import table, wheel
from tools.sglang_drift.compare import differences, expected_of
from tools.sglang_drift.expected import SUPPORTED
from tools.sglang_drift.release import MIRROR, ROOT, contract_of, our_contract


class DriftError(Exception):
    """A release's contract differs, or the round trip over its types failed."""


def main() -> int:
    options = _options()
    failed = False
    results: dict[str, str] = {}
    for wanted in options.version or SUPPORTED:
        try:
            version, result = check(wanted, options.wheels)
        except (DriftError, wheel.FetchError) as error:
            failed = True
            print(error, file=sys.stderr)
        else:
            results[version] = result
            known = (
                "" if version in SUPPORTED else " (not among the supported: SUPPORTED lists them)"
            )
            print(f"SGLang {version}{known}: the contract is equal; round trip: {result}")
    if not failed and all(version in results for version in SUPPORTED):
        problem = table.problem(results, write=options.write)
        if problem:
            failed = True
            print(problem, file=sys.stderr)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s drift --", description=__doc__)
    parser.add_argument(
        "--version",
        action="append",
        metavar="X",
        help=f"an SGLang release, or 'newest'; may be repeated (default: {', '.join(SUPPORTED)})",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        default=ROOT / ".nox" / "sglang-wheels",
        help="folder that keeps the wheels",
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write the table into {table.DOCUMENT.name}"
    )
    return parser.parse_args()


def check(wanted: str, wheels: Path) -> tuple[str, str]:
    """Fetch a release, compare its contract, and make a round trip over its types.

    Returns:
        The release's version, and what the round trip restored.

    Raises:
        DriftError: with every difference, or the trip's findings.
        FetchError: there is no wheel.
    """
    found = wheel.fetch(wanted, wheels)
    version, modules = wheel.version_of(found), wheel.sources(found)
    ours = our_contract((ROOT / MIRROR).read_text())
    lines = differences(version, expected_of(version, ours), contract_of(modules))
    if lines:
        raise DriftError("\n".join(lines))
    return version, _trip(version, modules)


def _trip(version: str, modules: dict[str, str]) -> str:
    """Run the round trip in a process that imports this release, and no other SGLang."""
    with tempfile.TemporaryDirectory() as folder:
        wheel.unpack(modules, Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", "tools.sglang_drift.trip"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": folder + os.pathsep + os.environ.get("PYTHONPATH", "")},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise DriftError(
            f"SGLang {version}: the round trip over its own types failed\n"
            f"{done.stdout.strip()}\n{done.stderr.strip()}"
        )
    answer = json.loads(done.stdout)
    return f"{answer['pools']} pools x {answer['pages']} pages, {answer['bytes']:,} bytes equal"


if __name__ == "__main__":
    sys.exit(main())
