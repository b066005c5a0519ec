from __future__ import annotations

from tests.e2e.command import main

if __name__ == "__main__":
    raise SystemExit(main())
