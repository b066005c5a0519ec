"""All that stands in for a GPU where SGLang's classes run on a CPU, and why.

``install()``, before SGLang is used, in each process. Whatever is not named here is SGLang's own:
its pools, their layouts and addresses, its allocators, controller, prefix tree and factory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from tests.sglang.copy_ops import OPERATIONS

POOLS = "sglang.srt.mem_cache.pool_host"


@dataclass(frozen=True)
class StandIn:
    """One thing that is not SGLang's.

    Attributes:
        name: what is stood in for.
        why: it cannot be had here.
        modules: it is put into each of these when that is imported.
        put: puts it into one.
    """

    name: str
    why: str
    modules: tuple[str, ...]
    put: Callable[[ModuleType], None]


def _copy_operations(module: ModuleType) -> None:
    for name, operation in OPERATIONS.items():
        setattr(module, name, operation)


def _plain_memory(module: Any) -> None:
    # Constructors set it to their default, True; it stays False.
    module.HostKVCache.pin_memory = property(lambda self: False, lambda self, value: None)


def _no_reserve(module: Any) -> None:
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


STAND_INS = (
    StandIn(
        "the copy operations of sgl_kernel.kvcacheio",
        "they are CUDA kernels, which SGLang imports where there is a GPU",
        (
            "sglang.srt.mem_cache.memory_pool_host",
            *(f"{POOLS}.{kind}" for kind in ("mha", "mla", "dsa", "mamba")),
        ),
        _copy_operations,
    ),
    StandIn(
        "page-locked host memory (cudaHostRegister, pin_memory=True)",
        "torch locks pages through the CUDA driver; host pools are plain memory instead",
        (f"{POOLS}.base",),
        _plain_memory,
    ),
    StandIn(
        "HICACHE_HOST_MEMORY_RESERVE_BYTES",
        "SGLang keeps 10 GiB of memory for other programs, which a small machine has not",
        (f"{POOLS}.base",),
        _no_reserve,
    ),
)
"""Beside them a test says which rank it is, by ``get_parallel().override(...)``: SGLang's own way
where no model is loaded over several GPUs."""


def install() -> None:
    """Put every stand-in into its modules, those that are imported later included."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for stand_in in STAND_INS:
        for name in stand_in.modules:
            if name in sys.modules:
                stand_in.put(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the modules of the stand-ins, and has their loaders put them in."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = [stand_in for stand_in in STAND_INS if fullname in stand_in.modules]
        spec = PathFinder.find_spec(fullname, path, target) if ours else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_put(module: ModuleType) -> None:
            run(module)
            for stand_in in ours:
                stand_in.put(module)

        spec.loader.exec_module = run_and_put  # type: ignore[method-assign]
        return spec
