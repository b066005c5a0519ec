"""All that stands in for a GPU where SGLang's classes run on a CPU, and why.

``install()``, before SGLang is used, in each process. Whatever is not named here is SGLang's own:
its pools, their layouts and addresses, its allocators, controller, prefix tree and factory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from tests.sglang import conv_ops
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


def _short_convolutions(module: ModuleType) -> None:
    for name, operation in conv_ops.OPERATIONS.items():
        setattr(module, name, operation)


OPERATION_NAMES = ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu")

_declared: list[Any] = []


def _operation_names(torch: Any) -> None:
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in OPERATION_NAMES:
        library.define(f"{name}(Tensor x) -> Tensor")
    _declared.append(library)  # they go with it


def _translated_reads(module: Any) -> None:
    backend = module.TorchNativeAttnBackend
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, _reading_translated(getattr(backend, name)))


def _reading_translated(attention: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, q: Any, o: Any, k: Any, v: Any, slots: Any, *rest: Any, **more: Any) -> Any:
        window = more.get("sliding_window_size")
        if self.use_sliding_window_kv_pool and window is not None:
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
        return attention(self, q, o, k, v, slots, *rest, **more)

    return run


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
    StandIn(
        "the short convolution of Mamba-like layers",
        "SGLang has it as Triton and CUDA kernels",
        ("sglang.srt.layers.attention.mamba.causal_conv1d",),
        _short_convolutions,
    ),
    StandIn(
        "the names of two operations of sgl_kernel for gated delta nets",
        "SGLang looks them up for every model with recurrent states, and calls them for that kind",
        ("torch",),
        _operation_names,
    ),
    StandIn(
        "the reads of sliding-window layers in TorchNativeAttnBackend",
        "0.5.23 writes their KV to slots of the window's pool and reads it from slots of the full "
        "pool, as no GPU kernel does: right only while both pools give the same slots, so that a "
        "prompt has another answer the second time, storage or not",
        ("sglang.srt.layers.attention.torch_native_backend",),
        _translated_reads,
    ),
)
"""Beside them a test says which rank it is, by ``get_parallel().override(...)``: SGLang's own way
where no model is loaded over several GPUs."""


ABSENT = {
    "sgl_kernel": "CUDA kernels; an engine imports their names, and on a CPU calls none of them",
}
"""Packages that are empty here, and why; whatever is called of them raises."""


def install() -> None:
    """Put every stand-in into its modules, those that are imported later included."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if find_spec("sgl_kernel") is None:
        sys.meta_path.append(_AbsentFinder())
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


class _AbsentFinder(MetaPathFinder, Loader):
    """Finds packages that are not installed, and gives an empty one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _Absent(module.__name__).__getattr__  # type: ignore[method-assign]


class _Absent:
    """A name of a package that is not there. It can be imported and not be called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.name} is not here: see tests/sglang/stand_ins.py")
