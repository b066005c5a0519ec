"""Host memory behind numpy arrays and torch tensors, without importing torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_shared.errors import LayoutError

SMAPS = Path("/proc/self/smaps")
"""Where Linux tells the page size of each mapping of this process."""


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A range of host memory: ``address`` and ``nbytes`` in bytes."""

    address: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def covers(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.end


def storage_region(buffer: Any) -> Region:
    """The whole allocation behind a tensor or array, of which it may be a view.

    Two views of one storage give the same region, so that it is registered once.
    """
    if isinstance(buffer, np.ndarray):
        root = buffer
        while isinstance(root.base, np.ndarray):
            root = root.base
        low, high = np.lib.array_utils.byte_bounds(root)
        return Region(low, high - low)
    if hasattr(buffer, "untyped_storage"):
        storage = buffer.untyped_storage()
        return Region(storage.data_ptr(), storage.nbytes())
    raise LayoutError(
        f"expected a numpy array or a torch tensor as host buffer, got {type(buffer).__name__}"
    )


def merged(regions: Iterable[Region]) -> tuple[Region, ...]:
    """The regions in address order, overlapping ones joined, empty ones dropped."""
    result: list[Region] = []
    for region in sorted(r for r in regions if r.nbytes > 0):
        if result and region.address < result[-1].end:
            end = max(result[-1].end, region.end)
            result[-1] = Region(result[-1].address, end - result[-1].address)
        else:
            result.append(region)
    return tuple(result)


def merged_huge_pages(regions: Iterable[Region]) -> tuple[Region, ...]:
    """The regions rounded to huge pages, and those that then touch or overlap as one.

    Together, since two pools may share a huge page, which a client registers once.
    """
    return merged(map(rounded_to_huge_pages, regions))


def rounded_to_huge_pages(region: Region) -> Region:
    """The region grown to whole huge pages where it lies in a hugetlb mapping.

    RDMA registration fails on a part of a huge page. The kernel maps whole ones, so the
    grown region is still this process's memory.
    """
    size = _kernel_page_size(region.address)
    if size <= _base_page_size():
        return region
    start = region.address // size * size
    end = -(-region.end // size) * size
    return Region(start, end - start)


@cache
def _base_page_size() -> int:
    import resource

    return resource.getpagesize()


def _kernel_page_size(address: int) -> int:
    """The page size of the mapping that holds ``address``, in bytes (Linux smaps)."""
    if not SMAPS.exists():
        return _base_page_size()
    inside = False
    with SMAPS.open() as lines:
        for line in lines:
            head = line.split(None, 1)[0]
            if not head.endswith(":"):
                low, _, high = head.partition("-")
                inside = int(low, 16) <= address < int(high, 16)
            elif inside and head == "KernelPageSize:":
                return int(line.split()[1]) * 1024
    return _base_page_size()


class RegionSet:
    """Regions already registered with a client; finds what is still to be registered.

    Not thread-safe: registrations are made by one thread at a time.
    """

    def __init__(self) -> None:
        self._regions: list[Region] = []

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def missing(self, region: Region) -> Region | None:
        """``region`` if none of it is registered, None if all of it is.

        Raises:
            LayoutError: a part of it is registered, which no client can extend.
        """
        for known in self._regions:
            if known.covers(region.address, region.nbytes):
                return None
            if known.address < region.end and region.address < known.end:
                raise LayoutError(
                    f"host memory {region.address:#x}+{region.nbytes} overlaps the registered "
                    f"{known.address:#x}+{known.nbytes} without lying inside it"
                )
        return region

    def add(self, region: Region) -> None:
        self._regions.append(region)

    def drain(self) -> list[Region]:
        regions, self._regions = self._regions, []
        return regions


def all_inside(regions: Sequence[Region], spans: Iterable[tuple[int, int]]) -> bool:
    """Whether each (address, nbytes) lies inside one of ``regions``, which are in order."""
    starts = [region.address for region in regions]
    for address, nbytes in spans:
        i = bisect_right(starts, address) - 1
        if i < 0 or not regions[i].covers(address, nbytes):
            return False
    return True


def byte_view(buffer: Any) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous tensor or array, shared with it: ``uint8[nbytes]``.

    Works for element types that numpy lacks (bfloat16). The view keeps ``buffer`` alive.

    Raises:
        LayoutError: it is not contiguous, or not on the host.
    """
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise LayoutError("expected a contiguous array")
        return buffer.reshape(-1).view(np.uint8)
    if not buffer.is_contiguous() or buffer.device.type != "cpu":
        raise LayoutError("expected a contiguous tensor in host memory")
    if buffer.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.asarray(_Bytes(buffer))


class _Bytes:
    """A tensor's bytes by numpy's array interface; the array made of it keeps the tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def slots_like(buffer: Any, slots: npt.NDArray[np.int64]) -> Any:
    """Token slots as a pool of that buffer takes them: a tensor for tensors, else the array.

    SGLang's pools call tensor methods on their indices (``numel``, ``device``).
    """
    if isinstance(buffer, np.ndarray):
        return slots
    return buffer.new_empty(0).long().new_tensor(slots)


ALIGNMENT = 4096
"""Bytes at whose multiples fresh memory starts, as direct I/O wants it."""


def aligned_bytes(nbytes: int, alignment: int = ALIGNMENT) -> npt.NDArray[np.uint8]:
    """Fresh zeroed host memory, ``uint8[nbytes]``, its start a multiple of ``alignment`` bytes."""
    raw = np.zeros(nbytes + alignment, dtype=np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]
