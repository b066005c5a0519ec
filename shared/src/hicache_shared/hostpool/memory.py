"""Element types and host memory of the reference pools, over numpy alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_shared.errors import LayoutError

AnyArray: TypeAlias = npt.NDArray[Any]
IndexArray: TypeAlias = npt.NDArray[np.int64]
ByteArray: TypeAlias = npt.NDArray[np.uint8]

Allocate: TypeAlias = Callable[[int], ByteArray]
"""Gives a writable, contiguous ``uint8[n]`` for a number of bytes."""

_ITEMSIZES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class DType:
    """An element type by name. Stands in for ``torch.dtype``, whose names numpy lacks.

    Attributes:
        name: torch's name, without a library prefix (``bfloat16``).
        itemsize: bytes an element.
    """

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name

    @property
    def storage(self) -> np.dtype[Any]:
        """The unsigned integer of the same size, which is what the arrays hold."""
        return np.dtype(f"u{self.itemsize}")


def dtype_of(name: str) -> DType:
    """The element type of that name.

    Raises:
        LayoutError: there is none.
    """
    if name not in _ITEMSIZES:
        raise LayoutError(f"unknown dtype {name!r}; known are {', '.join(sorted(_ITEMSIZES))}")
    return DType(name, _ITEMSIZES[name])


def new_array(shape: tuple[int, ...], dtype: DType, allocate: Allocate) -> AnyArray:
    """An array of ``shape`` over memory from ``allocate``; an empty one asks for none.

    Raises:
        LayoutError: ``allocate`` gave something else than was asked for.
    """
    nbytes = prod(shape) * dtype.itemsize
    if nbytes == 0:
        return np.empty(shape, dtype=dtype.storage)
    memory = allocate(nbytes)
    if (
        memory.dtype != np.uint8
        or memory.shape != (nbytes,)
        or not memory.flags.c_contiguous
        or not memory.flags.writeable
    ):
        raise LayoutError(
            f"allocate({nbytes}) must give a writable, contiguous uint8[{nbytes}], "
            f"gave {memory.dtype}{list(memory.shape)}"
        )
    return memory.view(dtype.storage).reshape(shape)
