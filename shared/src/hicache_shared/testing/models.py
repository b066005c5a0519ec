"""Models of the suite's own beside the presets, and a model changed in one respect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hicache_shared.contract import PoolHitPolicy, PoolName
from hicache_shared.hostpool import (
    Allocate,
    DSAIndexerGeometry,
    MambaGeometry,
    MHAGeometry,
    MLAGeometry,
    MLAHostPool,
    ModelSpec,
    PoolSpec,
    SWAModel,
    V4Geometry,
    preset,
    with_draft,
)

MLA_MAMBA = "mla-mamba"
"""Replicated KV beside states that are sharded over ranks."""

TINY = "tiny"
"""Pages of 4 KB, for batches of thousands of them."""

DEEP = "deep"
"""Many layers: in ``layer_first`` a page has 122 components of 512 bytes."""

MHA_DRAFT, MLA_DRAFT, DSA_DRAFT, V4_DRAFT = "mha-draft", "mla-draft", "dsa-draft", "v4-draft"
DRAFT_MODELS = (MHA_DRAFT, MLA_DRAFT, DSA_DRAFT, V4_DRAFT)
"""Targets with the pools of a draft model beside them."""


def spec_of(model: str | ModelSpec) -> ModelSpec:
    """A preset or one of the suite's own by name, or the model that is given."""
    if isinstance(model, ModelSpec):
        return model
    return _OWN[model]() if model in _OWN else preset(model)


def _mla_mamba() -> ModelSpec:
    mla, states = preset("mla"), preset("mamba").pools[1]
    return replace(mla, name=MLA_MAMBA, pools=(*mla.pools, states))


def _tiny() -> ModelSpec:
    layer = MHAGeometry(layers=1, head_num=1, head_dim=64)
    return SWAModel(
        name=TINY,
        kv=layer,
        swa=layer,
        window_tokens=32,
        page_tokens=16,
        device_tokens=16 * 16,
        swa_device_tokens=16 * 16,
    ).spec()


def _deep() -> ModelSpec:
    mha = preset("mha")
    kv = replace(mha.pools[0], geometry=MHAGeometry(layers=61, head_num=1, head_dim=4))
    return replace(mha, name=DEEP, pools=(kv,))


def _mha_draft() -> ModelSpec:
    return with_draft(preset("mha"), MHAGeometry(layers=1, head_num=2, head_dim=64))


def _mla_draft() -> ModelSpec:
    """An MHA draft beside an MLA target: its heads are this rank's, the target's KV is not."""
    return with_draft(preset("mla"), MHAGeometry(layers=1, head_num=2, head_dim=64))


def _dsa_draft() -> ModelSpec:
    """The draft's KV and its indexer, both with the target's slots."""
    target = preset("deepseek-v3.2")
    kv = MLAGeometry(layers=1, kv_lora_rank=512, qk_rope_head_dim=64)
    indexer = DSAIndexerGeometry(layers=1)
    pools = (
        PoolSpec(name=name, geometry=geometry, page_size=target.page_tokens, source=PoolName.KV)
        for name, geometry in ((PoolName.DRAFT, kv), (PoolName.DRAFT_INDEXER, indexer))
    )
    return replace(target, pools=(*target.pools, *pools))


def _v4_draft() -> ModelSpec:
    """Sliding-window pages of a draft; in ``layer_first`` their ``kv_buffer`` is a list."""
    target = preset("deepseek-v4-flash")
    draft = PoolSpec(
        name=PoolName.DRAFT_SWA,
        geometry=V4Geometry(layers=1, row_bytes=149760),
        page_size=target.page_tokens,
        source=PoolName.SWA,
        policy=PoolHitPolicy.TRAILING_PAGES,
        window_pages=1,
    )
    return replace(target, pools=(*target.pools, draft))


_OWN: dict[str, Callable[[], ModelSpec]] = {
    MLA_MAMBA: _mla_mamba,
    TINY: _tiny,
    DEEP: _deep,
    MHA_DRAFT: _mha_draft,
    MLA_DRAFT: _mla_draft,
    DSA_DRAFT: _dsa_draft,
    V4_DRAFT: _v4_draft,
}


STATES_DIV = 8
"""Recurrent states of a layer are megabytes, heads and channels in the hundreds."""


def with_small_states(spec: ModelSpec) -> ModelSpec:
    """The model with fewer heads and channels in its recurrent states."""
    pools = (
        replace(pool, geometry=pool.geometry.of_rank(STATES_DIV))
        if isinstance(pool.geometry, MambaGeometry)
        else pool
        for pool in spec.pools
    )
    return replace(spec, pools=tuple(pools))


# -- changed in one respect --------------------------------------------------------------------


def with_dtype(spec: ModelSpec, dtype: str) -> ModelSpec:
    """The model with the KV of its MHA and MLA pools in another element type."""
    return replace(
        spec,
        pools=tuple(
            replace(pool, geometry=replace(pool.geometry, dtype=dtype))
            if isinstance(pool.geometry, MHAGeometry | MLAGeometry)
            else pool
            for pool in spec.pools
        ),
    )


def with_page_tokens(spec: ModelSpec, tokens: int) -> ModelSpec:
    """The model with another page size, in tokens."""
    pools = (
        replace(pool, page_size=tokens) if pool.page_size == spec.page_tokens else pool
        for pool in spec.pools
    )
    return replace(spec, page_tokens=tokens, pools=tuple(pools))


# -- decode context parallelism ------------------------------------------------------------------


def with_dcp(spec: ModelSpec, rank: int, size: int) -> ModelSpec:
    """An MLA model whose pages are divided over ``size`` ranks, as one of them has it."""
    pools = []
    for pool in spec.pools:
        geometry = pool.geometry
        assert isinstance(geometry, MLAGeometry)
        divided = DcpMLAGeometry(
            layers=geometry.layers,
            kv_lora_rank=geometry.kv_lora_rank,
            qk_rope_head_dim=geometry.qk_rope_head_dim,
            dcp_rank=rank,
            dcp_size=size,
        )
        pools.append(replace(pool, geometry=divided))
    return replace(spec, pools=tuple(pools))


@dataclass(frozen=True, kw_only=True)
class DcpMLAGeometry(MLAGeometry):
    """One rank's share of each page: every ``dcp_size``-th token."""

    dcp_rank: int
    dcp_size: int

    def pool(
        self, *, label: str, pages: int, page_size: int, layout: str, allocate: Allocate
    ) -> MLAHostPool:
        made = DcpMLAHostPool(
            self, label=label, pages=pages, page_size=page_size, layout=layout, allocate=allocate
        )
        made.dcp_rank, made.dcp_size = self.dcp_rank, self.dcp_size  # type: ignore[misc]
        return made


class DcpMLAHostPool(MLAHostPool):
    """SGLang's ``MLATokenToKVPoolHost`` under DCP: ``page_size`` is of the rank's own tokens.

    Callers count in slots of all ranks together, ``logical_page_size`` of them a page.
    """

    @property
    def logical_page_size(self) -> int:
        return self.page_size * self.dcp_size

    @property
    def logical_size(self) -> int:
        return self.size * self.dcp_size

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        return super().get_data_page(int(index) // self.dcp_size, flat)

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        super().set_from_flat_data_page(int(index) // self.dcp_size, data_page)

    def get_page_buffer_meta(self, indices: Any) -> Any:
        firsts = np.asarray(indices, dtype=np.int64)[:: self.logical_page_size] // self.dcp_size
        slots = firsts.reshape(-1, 1) + np.arange(self.page_size)
        return super().get_page_buffer_meta(slots.reshape(-1))
