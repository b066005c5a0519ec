"""The suite's arrays and pools as a backend sees them: torch's where SGLang is installed."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np

from hicache_shared.contract import SGLANG_INSTALLED
from hicache_shared.hostpool.memory import DType


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
    """CPU tensors over the same memory."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")

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
        return TorchPool(pool, self)

    def seen(self, value: Any) -> Any:
        """An attribute of a pool, or what a method of it gave."""
        if isinstance(value, np.ndarray):
            return self.array(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self.seen, value))
        return getattr(self._torch, value.name) if isinstance(value, DType) else value


class TorchPool:
    """A reference pool whose buffers and pages are torch's; all else is the pool's.

    As with SGLang's own, an attribute that the pool lacks is lacking here.
    """

    def __init__(self, pool: Any, tensors: TorchTensors) -> None:
        self._pool = pool
        self._tensors = tensors

    def __getattr__(self, name: str) -> Any:
        return self._tensors.seen(getattr(self._pool, name))

    def get_hybrid_pool_buffer(self) -> Any:
        return self._tensors.seen(self._pool.get_hybrid_pool_buffer())

    def get_data_page(self, index: Any, flat: bool = True) -> Any:
        return self._tensors.array(self._pool.get_data_page(int(index), flat))

    def get_dummy_flat_data_page(self) -> Any:
        return self._tensors.array(self._pool.get_dummy_flat_data_page())

    def set_from_flat_data_page(self, index: Any, data_page: Any) -> None:
        self._pool.set_from_flat_data_page(int(index), self._tensors.plain(data_page))


def tensors() -> Tensors:
    """What backends see in this environment."""
    return TorchTensors() if SGLANG_INSTALLED else NumpyTensors()
