"""SGLang's engine on a CPU, in processes of its own, with a tiny model and one of our backends."""

from __future__ import annotations

import json
import os
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hicache_shared.cli.launch import EXTRA_CONFIG_FLAG, MEMORY_FLAGS
from hicache_shared.plugins import find
from hicache_shared.server import LOOPBACK, free_ports
from tests.e2e.client import Client
from tests.e2e.server import OwnEngine
from tests.sglang.engine.stores import Storage
from tests.sglang.engine.tiny_models import MODULES

ROOT = Path(__file__).parents[3]
SITE = Path(__file__).with_name("site")
PAGE = 16
START_S = 300.0

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
    *("--page-size", str(PAGE)),
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
    """

    module: str
    model: str
    backend: str
    tp: int = 1

    def engine(self, storage: Storage, models: Path, log: Path) -> OwnEngine:
        """The engine, not started."""
        (port,) = free_ports(1)
        client = Client(f"http://{LOOPBACK}:{port}", timeout_s=120.0)
        command = [sys.executable, "-m", self.module, *self.flags(storage, models), "--port"]
        return OwnEngine(
            [*command, str(port)], client, log, environment=self.environment(), start_s=START_S
        )

    def flags(self, storage: Storage, models: Path) -> list[str]:
        """SGLang's, with those that ``hicache launch-args`` prints."""
        plugin = find(self.backend)
        extra = {
            "backend_name": plugin.name,
            "module_path": plugin.module_path,
            "class_name": plugin.class_name,
            "interface_v1": 1,
            **storage.extra_config,
            "model_id": self.model,
            "revision": "0",
            "kv_cache_dtype": "bfloat16",
            "prefetch_threshold": PAGE,
        }
        return [
            *("--model-path", str(models / self.model), "--tp-size", str(self.tp)),
            *ON_A_CPU,
            *(word for flag in MEMORY_FLAGS for word in flag),
            *("--hicache-write-policy", "write_through"),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *(EXTRA_CONFIG_FLAG, json.dumps(extra)),
        ]

    def environment(self) -> Mapping[str, str]:
        """Variables: the stand-ins in every process, and no more work than needed."""
        binding = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.tp)))}
        return {
            "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT), *_inherited()]),
            "SGLANG_USE_CPU_ENGINE": "1",
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
