"""Install UMBP's real client into a virtual environment, on a machine without ROCm."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.umbp_without_gpu import NOTICE, SetUpError
from tools.umbp_without_gpu.client import DEFAULT_VERSION, install


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m tools.umbp_without_gpu", description=f"{__doc__} {NOTICE}"
    )
    parser.add_argument("environment", type=Path, help="folder of a virtual environment, 3.12")
    parser.add_argument("--version", default=DEFAULT_VERSION, help="of amd-mori: %(default)s")
    options = parser.parse_args()
    try:
        new = install(options.environment, options.version)
    except SetUpError as error:
        print(f"UMBP's client was not installed: {error}", file=sys.stderr)
        return 1
    state = "is installed" if new else "was there already"
    print(f"amd-mori {options.version} {state} in {options.environment}. {NOTICE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
