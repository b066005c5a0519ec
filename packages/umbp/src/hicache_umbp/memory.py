"""Host memory that another process can map: all that a standalone server moves pages with."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import numpy.typing as npt

from hicache_shared.errors import BackendUnavailableError
from hicache_umbp.client import native_module

HUGE_PAGE_BYTES = 2 << 20
ANY_NODE = -1


def shared_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """Fresh zeroed memory of the client's own allocator (AnonymousShm), ``uint8[nbytes]``.

    It is given back when the last array over it is gone. Thread-safe.

    Raises:
        BackendUnavailableError: the client is not installed, or gives none.
    """
    module = native_module()
    allocator = module.UMBPHostMemAllocator()
    backing = module.UMBPHostBufferBacking.AnonymousShm
    handle = allocator.alloc(nbytes, backing, HUGE_PAGE_BYTES, ANY_NODE, False)
    if not handle.ptr:
        raise BackendUnavailableError(
            f"UMBPHostMemAllocator gave no {nbytes} bytes of shared memory; see df /dev/shm"
        )
    block = (ctypes.c_uint8 * nbytes).from_address(handle.ptr)
    weakref.finalize(block, allocator.free, handle)
    return np.frombuffer(block, np.uint8)
