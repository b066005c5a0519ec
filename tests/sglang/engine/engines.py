"""SGLang's engine on a CPU, in processes of its own, with a tiny model and one of our backends."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hicache_shared.cli.launch import Identity
from hicache_shared.server import LOOPBACK, free_ports
from tests.e2e.client import Client
from tests.e2e.flags import storage_flags
from tests.e2e.server import OwnEngine
from tests.e2e.stores import Storage
from tests.sglang.engine.tiny_models import MODULES

ROOT = Path(__file__).parents[3]
SITE = Path(__file__).with_name("site")
PAGE = 16
START_S = 900.0

ENGINE = "tests.sglang.engine.engine_server"
SERVER = "sglang.launch_server"

ON_A_CPU = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    "--skip-tokenizer-init",
    "--skip-server-warmup",
    *("--max-total-tokens", "4096"),
    *("--max-running-requests", "4"),
    *("--hicache-ratio", "2"),
    *("--mem-fraction-static", "0.5"),
    *("--random-seed", "7"),
    *("--log-level", "warning"),
)
"""Of the KV pool, ``--max-total-tokens`` decides; the fraction is of the machine's free memory,
and must not be so small that others' use of it leaves nothing."""


@dataclass(frozen=True)
class Setup:
    """What is started.

    Attributes:
        module: ``ENGINE`` or ``SERVER``.
        model: of ``tiny_models``.
        backend: of ours.
        tp: ranks.
        page: tokens a page.
    """

    module: str
    model: str
    backend: str
    tp: int = 1
    page: int = PAGE

    def engine(self, storage: Storage, models: Path, log: Path) -> OwnEngine:
        """The engine, not started."""
        (port,) = free_ports(1)
        client = Client(f"http://{LOOPBACK}:{port}", timeout_s=300.0)
        command = [sys.executable, "-m", self.module, *self.flags(storage, models), "--port"]
        return OwnEngine(
            [*command, str(port)], client, log, environment=self.environment(), start_s=START_S
        )

    def flags(self, storage: Storage, models: Path) -> list[str]:
        """SGLang's."""
        identity = Identity(str(models / self.model), "0", "bfloat16")
        extra = {**storage.extra_config, "model_id": self.model, "prefetch_threshold": PAGE}
        return [
            *storage_flags(self.backend, identity, extra),
            *("--tp-size", str(self.tp), "--page-size", str(self.page)),
            *ON_A_CPU,
        ]

    def environment(self) -> Mapping[str, str]:
        """Variables: the stand-ins in every process, and no more work than needed."""
        binding = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.tp)))}
        return {
            "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT), *_inherited()]),
            "SGLANG_USE_CPU_ENGINE": "1",
            # Some small functions would be compiled, which takes longer than a test.
            "TORCHDYNAMO_DISABLE": "1",
            # Else ranks meet through NCCL wherever a CUDA build of torch brought it.
            "SGLANG_NCCL_SO_PATH": "none.so",
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(MODULES[self.model])),
            "MC_LOG_LEVEL": "ERROR",
            "UCM_LOG_LEVEL": "error",
            "UCM_LOG_TO_FILE": "false",
            **(binding if self.tp > 1 else {}),
        }


def _inherited() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _other_models(module: str) -> list[str]:
    """SGLang's model modules but one, without importing SGLang."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent / "srt" / "models"
    return [each.name for each in pkgutil.iter_modules([str(folder)]) if each.name != module]
