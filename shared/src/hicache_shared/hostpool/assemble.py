"""From the pools a model needs to the pools themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from hicache_shared.contract import PoolHitPolicy, PoolName, SidecarPoolSpec
from hicache_shared.errors import LayoutError, UnknownPoolError
from hicache_shared.hostmem import aligned_bytes
from hicache_shared.hostpool.base import LEGAL_LAYOUTS, check_layout
from hicache_shared.hostpool.deepseek_v4 import V4Geometry
from hicache_shared.hostpool.dsa import DSAIndexerGeometry
from hicache_shared.hostpool.group import HostPoolGroup, PoolEntry
from hicache_shared.hostpool.logical import LogicalGeometry
from hicache_shared.hostpool.mamba import MambaGeometry
from hicache_shared.hostpool.memory import Allocate
from hicache_shared.hostpool.mha import MHAGeometry
from hicache_shared.hostpool.mla import MLAGeometry
from hicache_shared.layout import MEMORY_LAYOUTS

Geometry: TypeAlias = (
    LogicalGeometry | V4Geometry | MHAGeometry | MLAGeometry | DSAIndexerGeometry | MambaGeometry
)

_EXACTLY_SIZED = frozenset({"logical", "deepseek_v4_paged", "deepseek_v4_state"})
"""Pools whose pages the assembler counts itself, without the spare page of the others."""


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """One pool of a model.

    Attributes:
        name: the pool's name.
        geometry: layers and sizes of all tensor-parallel ranks together.
        page_size: slots a page (tokens; 1 for Mamba states).
        source: the pool whose slots it uses; None if it has its own.
        policy: which of its pages a prefix needs.
        window_pages: N of ``TRAILING_PAGES``; 0 otherwise.
        device_slots: slots of the device pool behind it; only of pools with own slots.
    """

    name: PoolName | str
    geometry: Geometry
    page_size: int
    source: PoolName | str | None = None
    policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    window_pages: int = 0
    device_slots: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The pools of a model; the first is the anchor.

    Attributes:
        name: the model's name.
        page_tokens: tokens a page of the anchor.
        is_mla_model: SGLang's flag: every tensor-parallel rank holds the same primary KV.
        pools: in the order SGLang registers them.
        host_to_device_ratio: SGLang's ``--hicache-ratio``.

    Raises:
        LayoutError: names repeat, or a source is not a pool with slots of its own.
    """

    name: str
    page_tokens: int
    is_mla_model: bool
    pools: tuple[PoolSpec, ...]
    host_to_device_ratio: float = 2.0

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        own = [pool.name for pool in self.pools if pool.source is None]
        if not own or self.pools[0].source is not None or len(set(names)) < len(names):
            raise LayoutError(f"model {self.name!r} needs an anchor first and unique pool names")
        for pool in self.pools:
            if pool.source is not None and pool.source not in own:
                raise LayoutError(
                    f"pool {str(pool.name)!r} takes slots from {str(pool.source)!r}, which has "
                    f"none of its own; sources are {', '.join(map(str, own))}"
                )


@dataclass(frozen=True, eq=False, kw_only=True)
class AssembledModel:
    """One rank's host pools of a model.

    Attributes:
        name, page_tokens, is_mla_model: as of the :class:`ModelSpec`.
        layout: the memory layout of every pool.
        group: the pools.
        pools: what each pool is, in the group's order; geometry is this rank's.
        specs: SGLang's description of the pools that use another's slots.
        layers_div: by how much layer counts were divided.
        tp_size: tensor-parallel ranks.
    """

    name: str
    page_tokens: int
    is_mla_model: bool
    layout: str
    group: HostPoolGroup
    pools: tuple[PoolSpec, ...]
    specs: tuple[SidecarPoolSpec, ...]
    layers_div: int
    tp_size: int

    def spec_of(self, name: PoolName | str) -> PoolSpec:
        """Source, policy and window of a pool. Raises UnknownPoolError."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        known = ", ".join(str(pool.name) for pool in self.pools)
        raise UnknownPoolError(f"model {self.name!r} has no pool {str(name)!r}; it has {known}")

    def destroy(self) -> None:
        """Let every pool go of its memory. Idempotent."""
        self.group.destroy()


def legal_layouts(spec: ModelSpec) -> tuple[str, ...]:
    """Memory layouts in which every pool of the model can be stored."""
    kinds = [pool.geometry.kind for pool in spec.pools]
    return tuple(
        layout for layout in MEMORY_LAYOUTS if all(layout in LEGAL_LAYOUTS[k] for k in kinds)
    )


def host_pages(pool: PoolSpec, ratio: float) -> int:
    """Pages of a host pool with own slots, from its device pool.

    DeepSeek V4's assembler scales whole device pages (``_deepseek_v4_num_host_pages``);
    other pools scale tokens, round down, and keep one page more (``HostKVCache.__init__``).

    Raises:
        LayoutError: the pool would have no page.
    """
    if pool.geometry.kind in _EXACTLY_SIZED:
        pages = int(-(-pool.device_slots // pool.page_size) * ratio)
    else:
        pages = int(pool.device_slots * ratio) // pool.page_size + 1
    if pool.device_slots < 1 or pages < 1:
        raise LayoutError(
            f"pool {str(pool.name)!r} gets no host page from {pool.device_slots} device slots "
            f"and ratio {ratio}; raise them, or give the pages"
        )
    return pages


def build(
    spec: ModelSpec,
    *,
    layout: str,
    pages: int | None = None,
    layers_div: int = 1,
    tp_size: int = 1,
    allocate: Allocate = aligned_bytes,
) -> AssembledModel:
    """Build one rank's host pools of a model.

    Args:
        spec: the model.
        layout: memory layout of every pool.
        pages: pages of every pool; None derives them from the device capacity and the
            host-to-device ratio. Pools that use another's slots always have as many as it.
        layers_div: divides every pool's layer count, down to 1 at least.
        tp_size: tensor-parallel ranks that attention heads and states are split over.
        allocate: where host memory comes from, buffer by buffer.

    Raises:
        LayoutError: the layout is not legal for one of the pools, heads do not split over
            the ranks, or a pool would have no page.
    """
    if layers_div < 1 or tp_size < 1:
        raise LayoutError(f"layers_div and tp_size are 1 at least, got {layers_div} and {tp_size}")
    for pool in spec.pools:
        check_layout(pool.geometry.kind, layout, str(pool.name))
    ranked = tuple(
        replace(pool, geometry=pool.geometry.divided(layers_div).of_rank(tp_size))
        for pool in spec.pools
    )
    page_counts = {
        pool.name: host_pages(pool, spec.host_to_device_ratio) if pages is None else pages
        for pool in ranked
        if pool.source is None
    }
    entries = [
        PoolEntry(
            name=pool.name,
            host_pool=pool.geometry.pool(
                label=str(pool.name),
                pages=page_counts[pool.name if pool.source is None else pool.source],
                page_size=pool.page_size,
                layout=layout,
                allocate=allocate,
            ),
            is_primary_index_anchor=pool is ranked[0],
        )
        for pool in ranked
    ]
    return AssembledModel(
        name=spec.name,
        page_tokens=spec.page_tokens,
        is_mla_model=spec.is_mla_model,
        layout=layout,
        group=HostPoolGroup(entries),
        pools=ranked,
        specs=tuple(
            SidecarPoolSpec(pool.name, pool.source, pool.policy)
            for pool in ranked
            if pool.source is not None
        ),
        layers_div=layers_div,
        tp_size=tp_size,
    )
