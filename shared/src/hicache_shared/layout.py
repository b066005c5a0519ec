"""From any host pool to a frozen ``PoolLayout``: what a page is made of and where it lies.

A pool is looked at once, when it is registered. Everything afterwards works on the
frozen record, which also keeps the pool's memory alive: SGLang takes the tensors away
from its pools before it closes the backend.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np

from hicache_shared.errors import LayoutError
from hicache_shared.hostmem import Region, all_inside, merged, slots_like, storage_region

MEMORY_LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")
"""Values of SGLang's ``--hicache-mem-layout`` whose pages can be stored."""


MOST_PROBES = 256
"""Pages whose addresses are compared at registration; all of them in a pool of no more."""


class Access(enum.Enum):
    """How the addresses of a page are found."""

    AFFINE = "affine"
    """Computed: base + stride x page, per component."""
    ASKED = "asked"
    """The pool is asked in each call, since its pages may move or are not evenly spaced."""
    STAGED = "staged"
    """The pool gives no addresses; a page is copied through its flat form."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolLayout:
    """Geometry of one kind of stored object.

    A pool whose heads are split over objects (``page_head`` with a split factor) has one
    layout a head shard; every other pool has one.

    Attributes:
        name: the pool's name.
        memory_layout: one of :data:`MEMORY_LAYOUTS`.
        dtype: element type as the pool names it, without a library prefix (``bfloat16``), and
            after it those of its buffers that differ: a Mamba pool names one of its two.
        format_tag: the pool's own name of its byte format, where it has one.
        pages: how many pages the pool holds.
        page_slots: index slots a page: SGLang's page size, 1 for Mamba states.
        component_bytes: bytes of each buffer a page is made of, in order.
        access: how addresses are found.
        bases: address of each component of page 0; empty unless ``AFFINE``.
        strides: bytes from a page to the next, per component; empty unless ``AFFINE``.
        per_head: whether the bytes depend on which attention heads a rank holds.
        layers: the pool's ``(start_layer, end_layer)``, where it tells.
        head_shard: ``(shard, shards of all ranks)`` where heads are split over objects.
        split_factor: head shards that this rank's page is split into.
        regions: the allocations behind the pool, each once, in address order.
        pool: the host pool itself.
        keep_alive: the pool's buffers.
    """

    name: str
    memory_layout: str
    dtype: str
    format_tag: str | None
    pages: int
    page_slots: int
    component_bytes: tuple[int, ...]
    access: Access
    bases: tuple[int, ...]
    strides: tuple[int, ...]
    per_head: bool
    layers: tuple[int, int] | None
    head_shard: tuple[int, int] | None
    split_factor: int
    regions: tuple[Region, ...]
    pool: Any = field(repr=False)
    keep_alive: tuple[Any, ...] = field(repr=False)

    @property
    def page_bytes(self) -> int:
        """Bytes of a whole page, all components."""
        return sum(self.component_bytes)

    def addresses(self, pages: list[int]) -> list[int] | list[list[int]]:
        """Where the given pages lie: an int a page, or a list of one int a component.

        The caller has checked the page numbers. Plain lists on purpose: at 8 pages numpy's
        fixed cost is three times the whole of this, and at 128 pages they are level.
        """
        if self.access is Access.AFFINE:
            if len(self.bases) == 1:
                base, stride = self.bases[0], self.strides[0]
                return [base + stride * page for page in pages]
            places = list(zip(self.bases, self.strides, strict=True))
            return [[base + stride * page for base, stride in places] for page in pages]
        if self.access is Access.ASKED:
            return self._asked(pages)
        raise LayoutError(f"pool {self.name!r} gives no addresses; its pages are staged")

    def _asked(self, pages: list[int]) -> list[int] | list[list[int]]:
        if not pages:
            return []
        spans = _spans(self, pages)
        if any(tuple(size for _, size in page) != self.component_bytes for page in spans):
            raise LayoutError(f"pool {self.name!r} changed its page sizes after registration")
        if not all_inside(self.regions, (span for page in spans for span in page)):
            raise LayoutError(f"pool {self.name!r} gave an address outside its own buffers")
        if len(self.component_bytes) == 1:
            return [page[0][0] for page in spans]
        return [[address for address, _ in page] for page in spans]


def is_logical(pool: Any) -> bool:
    """Whether a pool owns indices and no bytes (DeepSeek V4's anchor).

    All three must hold: a pool that was destroyed also has ``kv_buffer`` None, and a DSA
    indexer has no such attribute at all.
    """
    if not hasattr(pool, "kv_buffer") or pool.kv_buffer is not None:
        return False
    if getattr(pool, "size_per_token", None) != 0:
        return False
    return pool.get_page_buffer_meta(np.arange(pool.page_size, dtype=np.int64)) is None


def page_slots_of(pool: Any) -> int:
    """Index slots a page: wider than the pool's own page under decode context parallelism."""
    return int(getattr(pool, "logical_page_size", pool.page_size))


def layouts_of(
    name: str,
    pool: Any,
    *,
    split_factor: int = 1,
    first_shard: int = 0,
    shard_count: int = 1,
) -> tuple[PoolLayout, ...]:
    """Look at a physical host pool and freeze what was seen.

    Args:
        name: the pool's name.
        pool: any object with SGLang's host-pool methods, over numpy or torch.
        split_factor: head shards that this rank's page is split into (``page_head``).
        first_shard: this rank's first head shard.
        shard_count: head shards of all ranks; 1 means that heads are not split and the
            shards are not named in keys.

    Returns:
        One layout, or one a head shard of this rank.

    Raises:
        LayoutError: the pool's memory layout, sizes or buffers cannot be stored.
    """
    seen = _look(name, pool)
    if seen.pages < 1:
        raise LayoutError(
            f"pool {name!r} holds no page: size {pool.size}, page size {pool.page_size}"
        )
    if shard_count == 1:
        return (_with_addresses(seen),)
    return tuple(
        _with_addresses(replace(seen, head_shard=(shard, shard_count), split_factor=split_factor))
        for shard in range(first_shard, first_shard + split_factor)
    )


def flat_layout(name: str, pool: Any) -> PoolLayout:
    """The layout of a pool's pages in flat form, as its ``get_data_page`` gives them.

    The order of bytes in the flat form is the pool's own affair and need not be that of
    its buffers, so the two forms are different objects (see ``identity``).
    """
    return _staged(_look(name, pool))


def equal_parts(component_bytes: Sequence[int]) -> tuple[int, int]:
    """Bytes and number of the largest parts of one size that every component is made of."""
    part_bytes = gcd(*component_bytes)
    return part_bytes, sum(component_bytes) // part_bytes


def buffers_of(name: str, pool: Any) -> list[Any]:
    """The tensors or arrays behind a pool; empty ones left out.

    Raises:
        LayoutError: the pool shows none.
    """
    if hasattr(pool, "get_hybrid_pool_buffer"):
        try:
            found = pool.get_hybrid_pool_buffer()
        except (AttributeError, TypeError) as error:
            raise LayoutError(
                f"pool {name!r} shows no host memory: {error} (a destroyed pool looks like this)"
            ) from error
    else:
        found = getattr(pool, "kv_buffer", None)
    buffers = list(found) if isinstance(found, list | tuple) else [found]
    buffers = [buffer for buffer in buffers if buffer is not None and buffer.nbytes > 0]
    if not buffers:
        raise LayoutError(
            f"pool {name!r} shows no host memory: neither get_hybrid_pool_buffer() nor "
            "kv_buffer has any (a destroyed pool looks like this)"
        )
    return buffers


Span = tuple[int, int]
"""Address and size in bytes of one component of one page."""


def _look(name: str, pool: Any) -> PoolLayout:
    """What can be told of a pool without asking for addresses."""
    memory_layout = str(pool.layout)
    if memory_layout not in MEMORY_LAYOUTS:
        raise LayoutError(
            f"pool {name!r} has memory layout {memory_layout!r}; supported are "
            f"{', '.join(MEMORY_LAYOUTS)} (set --hicache-mem-layout)"
        )
    buffers = buffers_of(name, pool)
    start, end = getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)
    return PoolLayout(
        name=name,
        memory_layout=memory_layout,
        dtype=_dtypes(pool, buffers),
        format_tag=getattr(pool, "storage_format_tag", None),
        pages=int(pool.size) // int(pool.page_size),
        page_slots=page_slots_of(pool),
        component_bytes=(),
        access=Access.STAGED,
        bases=(),
        strides=(),
        per_head=hasattr(pool, "head_num"),
        layers=None if start is None or end is None else (int(start), int(end)),
        head_shard=None,
        split_factor=1,
        regions=merged(storage_region(buffer) for buffer in buffers),
        pool=pool,
        keep_alive=tuple(buffers),
    )


def _dtypes(pool: Any, buffers: Sequence[Any]) -> str:
    kinds = [str(kind).rsplit(".", 1)[-1] for kind in (pool.dtype, *(b.dtype for b in buffers))]
    return "+".join(dict.fromkeys(kinds))


def _with_addresses(seen: PoolLayout) -> PoolLayout:
    """Probe pages all over the pool: sizes, whether addresses are affine, that they stay inside."""
    last = seen.pages - 1
    probes = sorted({0, min(1, last), *range(0, seen.pages, -(-seen.pages // MOST_PROBES)), last})
    try:
        spans = _spans(seen, probes)
    except _NoAddressesError as error:
        return _without_addresses(seen, error)
    component_bytes = tuple(size for _, size in spans[0])
    if any(tuple(size for _, size in page) != component_bytes for page in spans):
        raise LayoutError(f"pool {seen.name!r} has pages of different sizes")
    if min(component_bytes) < 1:
        raise LayoutError(f"pool {seen.name!r} has an empty component: {component_bytes}")
    if not all_inside(seen.regions, (span for page in spans for span in page)):
        raise LayoutError(f"pool {seen.name!r} lists addresses outside its own buffers")
    if _overlap(span for page in spans for span in page):
        raise LayoutError(f"pool {seen.name!r} lists pages that overlap in memory")
    sized = replace(seen, component_bytes=component_bytes, access=Access.ASKED)
    # Pools of a shared allocation may move their pages between calls (layout leases).
    moves = getattr(seen.pool, "shared_allocation_domain", None) is not None
    shape = None if moves else _affine(probes, spans)
    if shape is None:
        return sized
    return replace(sized, access=Access.AFFINE, bases=shape[0], strides=shape[1])


def _without_addresses(seen: PoolLayout, error: Exception) -> PoolLayout:
    """A pool that refuses to list addresses: staged where its layout is a page layout."""
    if seen.memory_layout == "layer_first":
        raise LayoutError(
            f"pool {seen.name!r} cannot be stored in memory layout 'layer_first' ({error}); "
            "use --hicache-mem-layout page_first"
        ) from error
    if seen.split_factor > 1:
        raise LayoutError(f"pool {seen.name!r} cannot split its heads: {error}") from error
    return _staged(seen)


def _staged(seen: PoolLayout) -> PoolLayout:
    try:
        nbytes = int(seen.pool.get_dummy_flat_data_page().nbytes)
    except NotImplementedError as error:
        raise LayoutError(
            f"pool {seen.name!r} has no flat pages ({error}); KV of this kind needs "
            '"interface_v1": 1 in the extra config, other pools cannot be stored'
        ) from error
    if nbytes < 1:
        raise LayoutError(f"pool {seen.name!r} has an empty component: ({nbytes},)")
    return replace(seen, component_bytes=(nbytes,), access=Access.STAGED)


class _NoAddressesError(LayoutError):
    """The pool says that it has no page addresses, by the errors that SGLang's raise."""


def _spans(layout: PoolLayout, pages: Sequence[int]) -> list[list[Span]]:
    """The pool's own list of the components of each page, of this layout's head shard."""
    addresses, sizes = _listed(layout, pages)
    spans = [(int(a), int(n)) for a, n in zip(addresses, sizes, strict=False)]
    width, rest = divmod(len(spans), len(pages) * layout.split_factor)
    if rest or not width or len(addresses) != len(sizes):
        raise LayoutError(
            f"pool {layout.name!r} lists {len(addresses)} addresses and {len(sizes)} sizes for "
            f"{len(pages)} pages of {layout.split_factor} head shards"
        )
    shard = layout.head_shard[0] % layout.split_factor if layout.head_shard else 0
    step = width * layout.split_factor
    starts = range(shard * width, len(spans), step)
    return [spans[start : start + width] for start in starts]


def _listed(layout: PoolLayout, pages: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Addresses and sizes as the pool lists them, all head shards of all pages."""
    firsts = np.asarray(pages, dtype=np.int64)[:, None] * layout.page_slots
    slots = (firsts + np.arange(layout.page_slots, dtype=np.int64)).reshape(-1)
    indices = slots_like(layout.keep_alive[0], slots)
    try:
        if layout.split_factor > 1:
            meta = layout.pool.get_split_heads_page_buffer_meta(indices, layout.split_factor)
        else:
            meta = layout.pool.get_page_buffer_meta(indices)
    except LayoutError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise _NoAddressesError(f"pool {layout.name!r} lists no addresses: {error}") from error
    except (AssertionError, AttributeError, TypeError) as error:
        raise LayoutError(
            f"pool {layout.name!r} failed to list its page addresses: {error!r}"
        ) from error
    if meta is None:
        raise LayoutError(f"pool {layout.name!r} has buffers but lists no page addresses")
    addresses, sizes = meta
    return addresses, sizes


def _overlap(spans: Iterable[Span]) -> bool:
    return any(one[0] + one[1] > other[0] for one, other in pairwise(sorted(spans)))


def _affine(
    probes: list[int], spans: list[list[Span]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Base and stride of each component if the probed pages are evenly spaced, else None."""
    bases, strides = [], []
    for component in range(len(spans[0])):
        addresses = [page[component][0] for page in spans]
        base = addresses[0]
        stride = addresses[1] - base if len(probes) > 1 else spans[0][component][1]
        if any(a != base + stride * p for a, p in zip(addresses, probes, strict=True)):
            return None
        bases.append(base)
        strides.append(stride)
    return tuple(bases), tuple(strides)
