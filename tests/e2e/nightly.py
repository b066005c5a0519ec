"""``python -m tests.e2e.nightly``: one backend and one model on a machine with GPUs.

Everything comes from the environment: ``HICACHE_E2E_BACKEND`` and ``HICACHE_E2E_MODEL``, and the
other variables of :class:`Nightly`. Arguments go to ``python -m tests.e2e``. Without a GPU it does
nothing, and fails with ``HICACHE_REQUIRE_GPU=1``.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hicache_shared.cli.launch import Identity
from tests.e2e.command import main as try_out
from tests.e2e.flags import storage_flags
from tests.e2e.stores import STORAGES, Storage
from tests.e2e.verdict import ExitCode
from tests.gpu.accelerator import missing, required

PREFIX = "HICACHE_E2E_"
NUMBERS = ("tp", "page_size", "states", "store_bytes", "port")


@dataclass(frozen=True)
class Nightly:
    """What is run. Each field is a variable: ``HICACHE_E2E_`` and its name.

    Attributes:
        backend: of ours.
        model: SGLang's ``--model-path``.
        revision: of the checkpoint.
        kv_cache_dtype: SGLang's flag.
        tp: ranks.
        page_size: tokens a page.
        states: for models with recurrent states; see ``accounting.Rule``.
        store_bytes: that the storage may hold; for UMBP, those of each rank.
        port: of the server.
        flags: more of SGLang's, as in a shell.
    """

    backend: str
    model: str
    revision: str = "main"
    kv_cache_dtype: str = "auto"
    tp: int = 1
    page_size: int = 64
    states: int = 0
    store_bytes: int = 64 << 30
    port: int = 30000
    flags: str = ""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        """From the environment; a variable that is empty counts as not set.

        Raises:
            ValueError: the backend or the model is missing, or a number is none.
        """
        given = {
            name: environ[PREFIX + name.upper()]
            for name in cls.__dataclass_fields__
            if environ.get(PREFIX + name.upper())
        }
        lacking = [PREFIX + name.upper() for name in ("backend", "model") if name not in given]
        if lacking:
            raise ValueError(f"not set: {', '.join(lacking)}")
        if given["backend"] not in STORAGES:
            raise ValueError(f"{PREFIX}BACKEND is one of {', '.join(STORAGES)}")
        numbers = {name: int(given[name]) for name in NUMBERS if name in given}
        return cls(**{**given, **numbers})  # type: ignore[arg-type]

    def command(self, storage: Storage) -> list[str]:
        """What starts the server."""
        identity = Identity(self.model, self.revision, self.kv_cache_dtype)
        return [
            *(sys.executable, "-m", "sglang.launch_server"),
            *storage_flags(self.backend, identity, storage.extra_config),
            *("--tp-size", str(self.tp), "--page-size", str(self.page_size)),
            *("--port", str(self.port)),
            *shlex.split(self.flags),
        ]

    def arguments(self, storage: Storage, log: Path) -> list[str]:
        """For ``python -m tests.e2e``."""
        return [
            *("--launch", shlex.join(self.command(storage)), "--log", str(log)),
            *("--url", f"http://127.0.0.1:{self.port}", "--states", str(self.states)),
            *([] if storage.lasts else ["--no-restart"]),
        ]


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit code of ``python -m tests.e2e``."""
    why = missing("cuda")
    if why is not None:
        print(f"e2e: skipped: {why}")
        return ExitCode.NO_ENGINE if required() else ExitCode.GOOD
    try:
        nightly = Nightly.of(os.environ)
    except ValueError as error:
        print(f"e2e: {error}", file=sys.stderr)
        return ExitCode.USAGE
    with tempfile.TemporaryDirectory(prefix="hicache-e2e-") as name:
        folder = Path(name)
        with STORAGES[nightly.backend](folder, nightly.store_bytes) as storage:
            code = try_out([*nightly.arguments(storage, folder / "server.log"), *arguments])
        if code:
            print((folder / "server.log").read_text(errors="replace")[-20_000:], file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
