"""Derived indices, merging, and all-or-nothing allocation over several pools."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_shared.contract import PoolHitPolicy, PoolName, PoolTransfer
from hicache_shared.errors import TransferError
from hicache_shared.sidecar import (
    allocate_transfers,
    merge_transfers,
    release_transfers,
    resolve_derived,
)

Indices = np.ndarray[Any, np.dtype[np.int64]]


def slots(*values: int) -> Indices:
    return np.array(values, dtype=np.int64)


@dataclass
class Pool:
    page_size: int
    free: set[int]
    broken: bool = False


@dataclass
class Group:
    """Host pools that refuse to free a slot twice."""

    pools: dict[str, Pool]
    order: list[str] = field(default_factory=list)

    def get_pool(self, name: Any) -> Pool:
        return self.pools[name]

    def alloc(self, need_size: int, *, pool: Any = None) -> Any:
        host = self.pools[pool]
        self.order.append(pool)
        if host.broken:
            raise MemoryError(pool)
        if need_size > len(host.free):
            return None
        return np.array([host.free.pop() for _ in range(need_size)], dtype=np.int64)

    def free(self, indices: Any, *, pool: Any = None) -> int:
        host = self.pools[pool]
        for index in indices.tolist():
            assert index not in host.free, f"slot {index} of {pool} freed twice"
            host.free.add(index)
        return len(indices)

    def available(self) -> dict[str, set[int]]:
        return {name: set(pool.free) for name, pool in self.pools.items()}


def make_group(**pools: tuple[int, int]) -> Group:
    """Pools by name: (page size, slots)."""
    return Group({name: Pool(size, set(range(n))) for name, (size, n) in pools.items()})


def own(name: str, keys: list[str] | None, indices: Any = None, **rest: Any) -> PoolTransfer:
    return PoolTransfer(name=name, keys=keys, host_indices=indices, **rest)


def derived(name: str, source: str, keys: list[str] | None = None) -> PoolTransfer:
    return PoolTransfer(name=name, keys=keys, indices_from_pool=source)


# --- derived indices ---------------------------------------------------------------------


def test_a_pool_derived_from_the_kv_takes_the_keys_and_indices_of_the_operation() -> None:
    kv = slots(8, 9)
    (c4,) = resolve_derived([derived("c4", PoolName.KV, ["old"])], kv_keys=["a"], kv_indices=kv)
    assert c4.keys == ["a"]
    assert c4.host_indices is kv


@pytest.mark.parametrize("source", ["swa", "anything_new"])
def test_a_pool_derived_from_another_takes_its_indices_and_keeps_keys_of_its_own(
    source: str,
) -> None:
    transfers = [derived("s1", source), own(source, ["y"], slots(4)), derived("s2", source, ["z"])]
    s1, same, s2 = resolve_derived(transfers, kv_keys=["a"], kv_indices=slots(0))
    assert (s1.keys, s1.host_indices.tolist()) == (["y"], [4])
    assert (s2.keys, s2.host_indices.tolist()) == (["z"], [4])
    assert same is transfers[1]
    assert transfers[0].host_indices is None, "the transfers passed in stay as they are"


def test_the_kv_may_be_among_the_transfers() -> None:
    transfers = [derived("c4", "kv"), own("kv", ["a"], slots(3))]
    c4, _ = resolve_derived(transfers, kv_keys=None, kv_indices=None)
    assert (c4.keys, c4.host_indices.tolist()) == (["a"], [3])


@pytest.mark.parametrize(
    ("transfers", "source"),
    [
        ([derived("state", "swa")], "swa"),
        ([derived("c4", "kv")], "kv"),
        ([derived("state", "c4"), derived("c4", "swa"), own("swa", [])], "c4"),
        ([derived("state", "state")], "state"),
    ],
    ids=["absent", "no-kv", "source-is-derived", "itself"],
)
def test_a_missing_source_is_an_error_that_names_both_pools(
    transfers: list[PoolTransfer], source: str
) -> None:
    with pytest.raises(TransferError, match=f"'{transfers[0].name}' .* '{source}'"):
        resolve_derived(transfers, kv_keys=None, kv_indices=None)


# --- merging -----------------------------------------------------------------------------


def test_transfers_of_one_pool_and_source_become_one_in_order_of_first_appearance() -> None:
    merged = merge_transfers(
        [
            own(PoolName.SWA, ["a"], slots(1)),
            derived("c4", "kv"),
            own("swa", ["b", "c"], [2, 3]),
            derived("c4", "swa", ["d"]),
            derived("c4", "kv"),
        ]
    )
    assert [(t.name, t.indices_from_pool, t.keys) for t in merged] == [
        ("swa", None, ["a", "b", "c"]),
        ("c4", "kv", None),
        ("c4", "swa", ["d"]),
    ]
    assert merged[0].host_indices.tolist() == [1, 2, 3]
    assert merged[0].host_indices.dtype == np.int64


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=4))))
def test_merging_keeps_every_key_beside_its_index(parts: list[tuple[str, list[int]]]) -> None:
    transfers = [own(n, [f"{n}{i}" for i in found], slots(*found)) for n, found in parts]
    merged = merge_transfers(transfers)
    assert [t.name for t in merged] == list(dict.fromkeys(n for n, _ in parts))
    for transfer in merged:
        expected = [i for name, found in parts if name == transfer.name for i in found]
        assert transfer.host_indices.tolist() == expected
        assert transfer.keys == [f"{transfer.name}{i}" for i in expected]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (own("p", ["b"], slots(2), hit_policy=PoolHitPolicy.TRAILING_PAGES), "trailing_pages"),
        (own("p", ["b"], slots(2), block_pages=4), "block_pages"),
        (own("p", None, slots(2)), "1 of 2 have keys"),
        (own("p", ["b"]), "1 of 2 have host_indices"),
    ],
)
def test_transfers_that_do_not_fit_together_are_an_error_that_names_the_pool(
    second: PoolTransfer, message: str
) -> None:
    with pytest.raises(TransferError, match=f"'p' cannot be merged.*{message}"):
        merge_transfers([own("p", ["a"], slots(1)), second])


# --- allocation --------------------------------------------------------------------------


def test_pools_are_allocated_in_the_order_of_their_names_and_derived_ones_share() -> None:
    group = make_group(swa=(4, 16), mamba=(1, 2))
    transfers = [own("swa", ["a", "b"]), own("mamba", ["b"]), derived("state", "swa"),
                 derived("c4", "kv")]  # fmt: skip
    kv = slots(7)
    assert allocate_transfers(group, transfers, kv_indices=kv)
    assert group.order == ["mamba", "swa"]
    assert [len(t.host_indices) for t in transfers[:2]] == [8, 1]
    assert transfers[2].host_indices is transfers[0].host_indices
    assert transfers[3].host_indices is kv


@pytest.mark.parametrize(("mamba_slots", "complete"), [(0, False), (1, True)])
def test_slots_a_transfer_already_has_are_neither_replaced_nor_rolled_back(
    mamba_slots: int, complete: bool
) -> None:
    group = make_group(indexer=(1, 5), mamba=(1, mamba_slots))
    held = group.alloc(2, pool="indexer")
    transfers = [own("indexer", ["a", "b"], held), own("mamba", ["b"])]
    assert allocate_transfers(group, transfers) is complete
    assert transfers[0].host_indices is held
    assert len(group.available()["indexer"]) == 3


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (own("swa", None), TransferError, "'swa': expected keys"),
        (derived("state", "swa"), TransferError, "'state' .* 'swa'"),
        (own("other", ["a"]), LookupError, "other"),
    ],
)
def test_misuse_is_refused_before_any_slot_is_taken(
    bad: PoolTransfer, error: type[Exception], message: str
) -> None:
    group = make_group(mamba=(1, 3))
    with pytest.raises(error, match=message):
        allocate_transfers(group, [own("mamba", ["a"]), bad])
    assert len(group.available()["mamba"]) == 3


NAMES = ["a", "b", "c", "d"]


@given(
    capacities=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    page_sizes=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    wanted=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3)), max_size=6),
    broken=st.none() | st.sampled_from(NAMES),
)
def test_allocation_takes_everything_or_leaves_every_pool_as_it_was(
    capacities: list[int],
    page_sizes: list[int],
    wanted: list[tuple[str, int]],
    broken: str | None,
) -> None:
    group = make_group(**dict(zip(NAMES, zip(page_sizes, capacities, strict=True), strict=True)))
    if broken:
        group.pools[broken].broken = True
    before = copy.deepcopy(group.available())
    transfers = [own(name, ["k"] * pages) for name, pages in wanted]
    transfers += [derived(f"{name}_state", name) for name, _ in wanted]
    need = {n: sum(p for m, p in wanted if m == n) * s for n, s in zip(NAMES, page_sizes)}  # noqa: B905
    fits = all(need[n] <= c for n, c in zip(NAMES, capacities)) and broken not in dict(wanted)  # noqa: B905

    try:
        complete = allocate_transfers(group, transfers)
    except MemoryError:
        complete = False
    assert complete == fits
    if complete:
        assert {n: len(b) - len(group.available()[n]) for n, b in before.items()} == need
        assert release_transfers(group, transfers) == sum(need.values())
    assert group.available() == before
    assert all(t.host_indices is None for t in transfers)
    assert release_transfers(group, transfers) == 0
