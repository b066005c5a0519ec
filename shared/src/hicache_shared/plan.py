"""From a transfer of SGLang's to pages of a pool: every check on input lives here.

SGLang's pools check nothing: a slot one past the end of K points into V, a slot inside a
page is rounded down, a negative one wraps around. So no index goes on unchecked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hicache_shared.errors import TransferError
from hicache_shared.store import StoredPool

Operation = Literal["get", "set"]
OPERATIONS: tuple[Operation, ...] = ("get", "set")


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredPool:
    """A host pool as the backend knows it.

    Attributes:
        name: as it was registered.
        pool: the host pool.
        pages: pages it holds.
        page_slots: index slots a page.
        stored: the objects a page becomes: one, or one a head shard. Empty for a logical
            anchor, which owns indices and no bytes.
    """

    name: str
    pool: Any
    pages: int
    page_slots: int
    stored: tuple[StoredPool, ...]

    @property
    def logical(self) -> bool:
        return not self.stored

    @property
    def page_bytes(self) -> int:
        return sum(stored.layout.page_bytes for stored in self.stored)


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Pages of one pool to move: ``keys[i]`` belongs to page ``pages[i]`` of the host pool."""

    pool: RegisteredPool
    keys: Sequence[str]
    pages: list[int]


def plan_get(pool: RegisteredPool, keys: Sequence[str] | None, host_indices: Any) -> PagePlan:
    """Check a transfer that fills host pages.

    Raises:
        TransferError: indices of the wrong number, kind, alignment or range, or a page
            that would be filled twice.
    """
    plan = _plan(pool, keys, host_indices)
    _check_get(plan)
    return plan


def plan_set(pool: RegisteredPool, keys: Sequence[str] | None, host_indices: Any) -> PagePlan:
    """Check a transfer that stores host pages.

    Raises:
        TransferError: as :func:`plan_get`, or one host page stored under two keys.
    """
    plan = _plan(pool, keys, host_indices)
    _check_set(plan)
    return plan


def check_together(operation: Operation, plans: Sequence[PagePlan]) -> None:
    """Hold several transfers of one pool in one call to the rules of a single one.

    Raises:
        TransferError: as :func:`plan_get` or :func:`plan_set`.
    """
    if len({plan.pool.name for plan in plans}) == len(plans):
        return
    by_pool: dict[str, list[PagePlan]] = {}
    for plan in plans:
        by_pool.setdefault(plan.pool.name, []).append(plan)
    check = _check_get if operation == "get" else _check_set
    for same in by_pool.values():
        keys = [key for plan in same for key in plan.keys]
        check(PagePlan(same[0].pool, keys, [page for plan in same for page in plan.pages]))


def _check_get(plan: PagePlan) -> None:
    if len(set(plan.pages)) != len(plan.pages):
        raise TransferError(f"pool {plan.pool.name!r}: a host page is named twice in one get")


def _check_set(plan: PagePlan) -> None:
    if len(set(plan.pages)) == len(plan.pages):
        return
    owner: dict[int, str] = {}
    for key, page in zip(plan.keys, plan.pages, strict=True):
        if owner.setdefault(page, key) != key:
            raise TransferError(
                f"pool {plan.pool.name!r}: host page {page} is stored under two keys"
            )


def _plan(pool: RegisteredPool, keys: Sequence[str] | None, host_indices: Any) -> PagePlan:
    if keys is None:
        if host_indices is None:
            return PagePlan(pool, [], [])
        raise TransferError(f"pool {pool.name!r}: host indices without keys")
    return PagePlan(pool, keys, page_numbers(pool, len(keys), host_indices))


def page_numbers(pool: RegisteredPool, count: int, host_indices: Any) -> list[int]:
    """The host pages that ``count`` keys belong to.

    Args:
        host_indices: CPU int64 tensor or array of ``count * page_slots`` token slots, each
            page's in order.

    Raises:
        TransferError: they are not that.
    """
    if host_indices is None:
        if count == 0:
            return []
        raise TransferError(f"pool {pool.name!r}: {count} keys without host indices")
    slots = _as_slots(pool.name, host_indices)
    width = pool.page_slots
    if slots.size != count * width:
        raise TransferError(
            f"pool {pool.name!r}: {count} keys need {count} x {width} = {count * width} host "
            f"indices, got {slots.size}"
        )
    if count == 0:
        return []
    # First and last slot of each page: looking at all of them takes ten times as long at
    # 128 pages, and SGLang gives out whole pages, so none is wrong by itself. As lists, since
    # with cold caches numpy's arithmetic costs more than it saves at 128 pages.
    firsts: list[int] = slots[::width].tolist()
    lasts: list[int] = slots[width - 1 :: width].tolist()
    numbers = [first // width for first in firsts]
    if [number * width for number in numbers] != firsts or [
        first + width - 1 for first in firsts
    ] != lasts:
        raise TransferError(
            f"pool {pool.name!r}: host indices are no whole pages of {width} slots, each "
            f"starting at a multiple of {width}"
        )
    if min(numbers) < 0 or max(numbers) >= pool.pages:
        outside = next(n for n in numbers if not 0 <= n < pool.pages)
        raise TransferError(
            f"pool {pool.name!r}: host index {outside * width} is outside "
            f"0..{pool.pages * width - 1}"
        )
    return numbers


def _as_slots(name: str, host_indices: Any) -> npt.NDArray[np.int64]:
    try:
        slots = np.asarray(host_indices)
    except (TypeError, ValueError) as error:
        raise TransferError(
            f"pool {name!r}: host indices are no array in host memory: {error}"
        ) from error
    if slots.size and slots.dtype.kind not in "iu":
        raise TransferError(f"pool {name!r}: host indices are {slots.dtype}, not whole numbers")
    return slots.reshape(-1).astype(np.int64, copy=False)
