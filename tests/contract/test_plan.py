"""Every check on keys and indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hicache_shared.errors import TransferError
from hicache_shared.plan import (
    RegisteredPool,
    check_together,
    page_numbers,
    plan_get,
    plan_set,
)
from tests.contract.core_support import slots

WIDTH, PAGES = 4, 16
POOL = RegisteredPool("swa", None, PAGES, WIDTH, ())
ONE_SLOT = RegisteredPool("mamba", None, PAGES, 1, ())
PLANS = pytest.mark.parametrize("plan", [plan_get, plan_set])

page_lists = st.lists(st.integers(0, PAGES - 1), unique=True, max_size=PAGES)


@given(page_lists)
def test_whole_pages_give_their_numbers_in_order(pages: list[int]) -> None:
    keys = [f"k{page}" for page in pages]
    for plan in (plan_get, plan_set):
        got = plan(POOL, keys, slots(pages, WIDTH))
        assert (got.pages, list(got.keys)) == (pages, keys)
        assert all(type(page) is int for page in got.pages)


@given(
    page_lists.filter(bool),
    st.integers(0, PAGES * WIDTH),
    st.integers(-3 * PAGES * WIDTH, 3 * PAGES * WIDTH),
)
def test_a_changed_first_or_last_index_of_a_page_is_an_error(
    pages: list[int], where: int, value: int
) -> None:
    indices = slots(pages, WIDTH)
    where %= indices.size
    assume(where % WIDTH in (0, WIDTH - 1))
    assume(indices[where] != value)
    indices[where] = value
    with pytest.raises(TransferError, match="swa"):
        page_numbers(POOL, len(pages), indices)


@given(page_lists.filter(lambda pages: len(pages) > 1), st.randoms())
def test_shuffled_slots_are_an_error_where_a_page_starts_or_ends_elsewhere(
    pages: list[int], random: Any
) -> None:
    indices = slots(pages, WIDTH).tolist()
    random.shuffle(indices)
    rows = [indices[i : i + WIDTH] for i in range(0, len(indices), WIDTH)]
    assume(any(row[0] % WIDTH or row[-1] != row[0] + WIDTH - 1 for row in rows))
    with pytest.raises(TransferError, match="whole pages"):
        page_numbers(POOL, len(pages), indices)


@PLANS
@pytest.mark.parametrize("extra", [-WIDTH, -1, 1, WIDTH])
def test_another_number_of_indices_is_an_error_with_both_numbers(plan: Any, extra: int) -> None:
    with pytest.raises(TransferError, match=rf"'swa'.*2 x 4 = 8.*got {8 + extra}"):
        plan(POOL, ["a", "b"], np.arange(8 + extra))


@PLANS
def test_indices_that_start_inside_a_page_are_an_error(plan: Any) -> None:
    with pytest.raises(TransferError, match=r"'swa'.*multiple of 4"):
        plan(POOL, ["a"], np.arange(2, 6))


@PLANS
@pytest.mark.parametrize("page", [-1, PAGES, PAGES + 5, -PAGES])
def test_a_page_outside_the_pool_is_an_error_with_the_range(plan: Any, page: int) -> None:
    with pytest.raises(TransferError, match=rf"'swa'.*{page * WIDTH} is outside 0\.\.63"):
        plan(POOL, ["a", "b"], slots([0, page], WIDTH))


@PLANS
@pytest.mark.parametrize("slot", [-1, PAGES])
def test_a_state_slot_outside_the_pool_is_an_error(plan: Any, slot: int) -> None:
    with pytest.raises(TransferError, match="mamba"):
        plan(ONE_SLOT, ["a"], [slot])


def test_a_huge_unsigned_index_does_not_wrap_into_the_pool() -> None:
    indices = np.arange(WIDTH, dtype=np.uint64) + np.uint64(2**64 - WIDTH)
    with pytest.raises(TransferError, match="outside"):
        plan_get(POOL, ["a"], indices)


def test_a_host_page_filled_twice_is_an_error() -> None:
    with pytest.raises(TransferError, match=r"'swa'.*twice"):
        plan_get(POOL, ["a", "b"], slots([3, 3], WIDTH))
    with pytest.raises(TransferError, match="twice"):
        plan_get(POOL, ["a", "a"], slots([3, 3], WIDTH))


def test_a_host_page_stored_under_two_keys_is_an_error() -> None:
    with pytest.raises(TransferError, match=r"'swa'.*page 3.*two keys"):
        plan_set(POOL, ["a", "b"], slots([3, 3], WIDTH))


def test_one_key_may_be_stored_twice_from_one_page_or_two_and_read_into_two() -> None:
    assert plan_set(POOL, ["a", "a"], slots([3, 3], WIDTH)).pages == [3, 3]
    assert plan_set(POOL, ["a", "a"], slots([3, 4], WIDTH)).pages == [3, 4]
    assert plan_get(POOL, ["a", "a"], slots([3, 4], WIDTH)).pages == [3, 4]


def test_two_transfers_of_one_pool_are_held_to_the_rules_of_one() -> None:
    first = plan_get(POOL, ["a"], slots([3], WIDTH))
    same_page = plan_get(POOL, ["b"], slots([3], WIDTH))
    other_page = plan_get(POOL, ["b"], slots([4], WIDTH))
    other_pool = plan_get(ONE_SLOT, ["b"], [3])
    check_together("get", [first, other_page, other_pool])
    check_together("set", [first, first, other_pool])
    with pytest.raises(TransferError, match="twice"):
        check_together("get", [first, other_pool, same_page])
    with pytest.raises(TransferError, match="two keys"):
        check_together("set", [first, other_pool, same_page])


@PLANS
@pytest.mark.parametrize(
    "indices",
    [
        np.arange(4, dtype=np.float64),
        np.array([0.0, 1.5, 2, 3]),
        np.array([True, False, True, True]),
        np.array(["0", "1", "2", "3"]),
        [None] * 4,
        object(),
        [[0, 1], [2]],
    ],
    ids=["float", "fraction", "bool", "text", "none", "object", "ragged"],
)
def test_what_is_not_whole_numbers_is_an_error(plan: Any, indices: Any) -> None:
    with pytest.raises(TransferError, match="swa"):
        plan(POOL, ["a"], indices)


def test_indices_on_a_device_are_an_error_that_says_so() -> None:
    class OnDevice:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    with pytest.raises(TransferError, match=r"'swa'.*cuda:0"):
        plan_get(POOL, ["a"], OnDevice())


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_any_whole_number_type_is_taken(dtype: Any) -> None:
    assert plan_get(POOL, ["a", "b"], slots([5, 2], WIDTH).astype(dtype)).pages == [5, 2]


def test_torch_like_indices_and_one_page_a_row_are_taken() -> None:
    class Tensor:
        def __array__(self, *_: Any, **__: Any) -> Any:
            return slots([5, 2], WIDTH)

    assert plan_get(POOL, ["a", "b"], Tensor()).pages == [5, 2]
    assert plan_get(POOL, ["a", "b"], slots([5, 2], WIDTH).reshape(2, WIDTH)).pages == [5, 2]
    with pytest.raises(TransferError, match="whole pages"):
        plan_get(POOL, ["a", "b"], slots([5, 2], WIDTH).reshape(2, WIDTH).T)


@PLANS
def test_indices_without_keys_and_keys_without_indices_are_errors(plan: Any) -> None:
    with pytest.raises(TransferError, match=r"'swa'.*without keys"):
        plan(POOL, None, slots([0], WIDTH))
    with pytest.raises(TransferError, match=r"'swa'.*2 keys without host indices"):
        plan(POOL, ["a", "b"], None)


@PLANS
@pytest.mark.parametrize(
    ("keys", "indices"), [(None, None), ([], None), ([], []), ([], np.empty(0)), ([], np.arange(0))]
)
def test_nothing_to_move_is_no_error(plan: Any, keys: Any, indices: Any) -> None:
    assert plan(POOL, keys, indices).pages == []


def test_indices_beside_no_keys_are_an_error() -> None:
    with pytest.raises(TransferError, match="got 4"):
        plan_get(POOL, [], np.arange(4))
