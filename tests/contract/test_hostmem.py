"""Allocations behind tensors and arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_shared import hostmem
from hicache_shared.errors import LayoutError
from hicache_shared.hostmem import (
    Region,
    RegionSet,
    aligned_bytes,
    all_inside,
    byte_view,
    merged,
    rounded_to_huge_pages,
    slots_like,
    storage_region,
)
from tests.contract.core_support import FakeTensor

PAGE = 4096
HUGE = 2 << 20


def test_two_views_of_one_array_are_one_region() -> None:
    array = np.zeros((4, 6), dtype=np.uint16)
    whole = Region(array.ctypes.data, array.nbytes)
    views = [array[1:], array[0], array[:, 2:], array.view(np.uint8), array.reshape(-1)[::2]]
    assert {storage_region(view) for view in [array, *views]} == {whole}


def test_two_views_of_one_tensor_are_one_region() -> None:
    array = np.zeros(64, dtype=np.uint8)
    views = [FakeTensor(array[:32]), FakeTensor(array[32:])]
    assert {storage_region(view) for view in views} == {Region(array.ctypes.data, 64)}


def test_what_is_neither_array_nor_tensor_is_refused_by_its_type() -> None:
    with pytest.raises(LayoutError, match="bytearray"):
        storage_region(bytearray(4))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12))
def test_merged_regions_cover_the_same_bytes_in_order_and_apart(
    pairs: list[tuple[int, int]],
) -> None:
    regions = merged(Region(start, size) for start, size in pairs)
    covered = [byte for region in regions for byte in range(region.address, region.end)]
    assert covered == sorted({b for start, size in pairs for b in range(start, start + size)})


def test_allocations_that_only_touch_stay_apart() -> None:
    apart = (Region(0, 10), Region(10, 5))
    assert merged(reversed(apart)) == apart


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=8),
    st.integers(0, 70),
    st.integers(1, 12),
)
def test_a_span_is_inside_exactly_when_one_region_covers_it(
    pairs: list[tuple[int, int]], address: int, nbytes: int
) -> None:
    regions = merged(Region(start, size) for start, size in pairs)
    inside = any(r.address <= address and address + nbytes <= r.end for r in regions)
    assert all_inside(regions, [(address, nbytes)]) == inside


def test_a_region_is_registered_once_and_a_part_of_it_never_again() -> None:
    known = RegionSet()
    region = Region(100, 50)
    assert known.missing(region) == region
    known.add(region)
    assert known.missing(region) is None
    assert known.missing(Region(110, 5)) is None
    assert known.missing(Region(150, 5)) == Region(150, 5)
    assert known.drain() == [region]
    assert known.missing(region) == region, "a drained set knows nothing"


@pytest.mark.parametrize("region", [Region(90, 20), Region(140, 20), Region(90, 100)])
def test_a_region_that_is_registered_in_part_is_an_error(region: Region) -> None:
    known = RegionSet()
    known.add(Region(100, 50))
    with pytest.raises(LayoutError, match=r"overlaps the registered 0x64\+50"):
        known.missing(region)


SMAPS = """\
10000000-10800000 rw-s 00000000 00:0f 4242 /anon_hugepage (deleted)
Size:               8192 kB
KernelPageSize:     2048 kB
MMUPageSize:        2048 kB
VmFlags: rd wr sh mr mw me ms ht
10800000-10900000 rw-p 00000000 00:00 0
Size:               1024 kB
KernelPageSize:        4 kB
"""


@pytest.fixture
def smaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "smaps"
    path.write_text(SMAPS)
    monkeypatch.setattr(hostmem, "SMAPS", path)
    monkeypatch.setattr(hostmem, "_base_page_size", lambda: PAGE)
    return path


@pytest.mark.parametrize(
    ("region", "grown"),
    [
        (Region(0x10000000, HUGE), Region(0x10000000, HUGE)),
        (Region(0x10000000 + 5, 1), Region(0x10000000, HUGE)),
        (Region(0x10200000 - 1, 2), Region(0x10000000, 2 * HUGE)),
        (Region(0x10800000 - 1, 1), Region(0x10600000, HUGE)),
        (Region(0x10800000, 100), Region(0x10800000, 100)),
        (Region(0x20000000, 100), Region(0x20000000, 100)),
    ],
)
def test_only_regions_in_huge_pages_grow_to_whole_ones(
    smaps: Path, region: Region, grown: Region
) -> None:
    assert rounded_to_huge_pages(region) == grown


def test_without_smaps_nothing_grows(smaps: Path) -> None:
    smaps.unlink()
    assert rounded_to_huge_pages(Region(0x10000005, 1)) == Region(0x10000005, 1)


def test_ordinary_memory_of_this_process_does_not_grow() -> None:
    memory = aligned_bytes(3 * PAGE)
    region = Region(memory.ctypes.data + 3, 100)
    assert rounded_to_huge_pages(region) == region


@pytest.mark.parametrize("make", [lambda array: array, FakeTensor], ids=["array", "tensor"])
def test_a_byte_view_shares_memory_and_refuses_gaps(make: Callable[[Any], Any]) -> None:
    array = np.arange(12, dtype=np.uint16).reshape(3, 4)
    view = byte_view(make(array))
    assert (view.dtype, view.nbytes) == (np.dtype(np.uint8), 24)
    view[0] = 0xFF
    assert array[0, 0] == 0xFF
    with pytest.raises(LayoutError, match="contiguous"):
        byte_view(make(array[:, 1:]))


def test_a_byte_view_of_nothing_is_empty() -> None:
    assert byte_view(FakeTensor(np.empty(0, np.uint8))).nbytes == 0
    assert byte_view(np.empty((0, 3), np.uint16)).nbytes == 0


def test_a_byte_view_keeps_its_tensor_alive() -> None:
    view = byte_view(FakeTensor(np.full(64, 7, np.uint8), owns=True))
    assert (view == 7).all()


def test_a_tensor_on_a_device_is_refused() -> None:
    tensor = FakeTensor(np.zeros(4, np.uint8))
    tensor.device = type("Device", (), {"type": "cuda"})()
    with pytest.raises(LayoutError, match="host memory"):
        byte_view(tensor)


def test_slots_for_a_tensor_pool_are_a_tensor_of_whole_numbers() -> None:
    numbers = np.array([0, 255, 256, 70000])
    assert slots_like(np.zeros(1), numbers) is numbers
    tensor = slots_like(FakeTensor(np.zeros(3, np.uint8)), numbers)
    assert isinstance(tensor, FakeTensor)
    assert tensor.data.dtype == np.int64
    assert tensor.data.tolist() == numbers.tolist()


def test_aligned_bytes_start_at_the_alignment_and_are_zero() -> None:
    memory = aligned_bytes(100, 64)
    assert (memory.ctypes.data % 64, memory.nbytes, bool(memory.any())) == (0, 100, False)
