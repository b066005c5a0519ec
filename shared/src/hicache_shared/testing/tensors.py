"""The suite's arrays and pools as a backend sees them: torch's where SGLang is installed."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Protocol

import numpy as np

from hicache_shared.contract import SGLANG_INSTALLED
from hicache_shared.hostpool.memory import DType
from hicache_shared.testing.sglang_pools import SGLangPools


class Tensors(Protocol):
    """Turns what the suite holds into what a backend sees, and back. Memory is shared."""

    def array(self, array: Any) -> Any:
        """An array of indices or a flat page; None stays None."""

    def plain(self, array: Any) -> Any:
        """A flat page that a backend gave, as numpy's; None stays None."""

    def pool(self, pool: Any) -> Any:
        """A host pool."""


class NumpyTensors:
    """Everything as it is."""

    def array(self, array: Any) -> Any:
        return array

    def plain(self, array: Any) -> Any:
        return array

    def pool(self, pool: Any) -> Any:
        return pool


_ELEMENTS = {2: "bfloat16", 4: "float32", 8: "float64"}
"""torch's type of unsigned elements of some bytes, which numpy has no floats of; 1 is uint8."""


class TorchTensors:
    """CPU tensors over the same memory, and pools of SGLang's own classes."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(1)  # small tensors: more threads only wait for each other
        self._pools = SGLangPools(self.seen)

    def array(self, array: Any) -> Any:
        if array is None:
            return None
        plain = np.asarray(array)
        if plain.dtype.kind != "u" or plain.itemsize == 1:
            return self._torch.from_numpy(plain)
        integers = self._torch.from_numpy(plain.view(f"i{plain.itemsize}"))
        return integers.view(getattr(self._torch, _ELEMENTS[plain.itemsize]))

    def plain(self, array: Any) -> Any:
        if array is None:
            return None
        flat = array.contiguous().reshape(-1)
        return flat.view(self._torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)

    def pool(self, pool: Any) -> Any:
        return self._pools.twin(pool)

    def seen(self, value: Any) -> Any:
        """An attribute of a pool as SGLang's has it."""
        if isinstance(value, np.ndarray):
            return self.array(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self.seen, value))
        return getattr(self._torch, value.name) if isinstance(value, DType) else value


@cache
def tensors() -> Tensors:
    """What backends see in this environment."""
    return TorchTensors() if SGLANG_INSTALLED else NumpyTensors()
