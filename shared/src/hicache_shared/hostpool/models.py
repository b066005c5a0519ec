"""Which host pools a model needs, from a description of its layers.

One frozen dataclass a kind of model, each with a ``spec()``; the rules are those of
SGLang 0.5.23's ``hybrid_pool_assembler`` and device pools. Capacities are in tokens of
the device pools; ``host_to_device_ratio`` is SGLang's ``--hicache-ratio``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hicache_shared.contract import PoolHitPolicy, PoolName
from hicache_shared.errors import LayoutError
from hicache_shared.hostpool.assemble import ModelSpec, PoolSpec
from hicache_shared.hostpool.deepseek_v4 import V4Geometry
from hicache_shared.hostpool.dsa import DSAIndexerGeometry
from hicache_shared.hostpool.logical import LogicalGeometry
from hicache_shared.hostpool.mamba import MambaGeometry
from hicache_shared.hostpool.memory import dtype_of
from hicache_shared.hostpool.mha import MHAGeometry
from hicache_shared.hostpool.mla import MLAGeometry


@dataclass(frozen=True, kw_only=True)
class PlainModel:
    """One pool: MHA, asymmetric MHA or MLA KV on its own.

    Attributes:
        name: the model's name.
        kv: its layers and heads.
        page_tokens: tokens a page.
        device_tokens: tokens of the device pool.
    """

    name: str
    kv: MHAGeometry | MLAGeometry
    page_tokens: int
    device_tokens: int
    host_to_device_ratio: float = 2.0

    def spec(self) -> ModelSpec:
        return ModelSpec(
            name=self.name,
            page_tokens=self.page_tokens,
            is_mla_model=isinstance(self.kv, MLAGeometry),
            pools=(
                PoolSpec(
                    name=PoolName.KV,
                    geometry=self.kv,
                    page_size=self.page_tokens,
                    device_slots=self.device_tokens,
                ),
            ),
            host_to_device_ratio=self.host_to_device_ratio,
        )


@dataclass(frozen=True, kw_only=True)
class DSAModel(PlainModel):
    """MLA KV and an indexer whose pages go with it (``make_dsa_indexer_pool_decl``)."""

    kv: MLAGeometry
    indexer: DSAIndexerGeometry

    def spec(self) -> ModelSpec:
        plain = super().spec()
        indexer = PoolSpec(
            name=PoolName.INDEXER,
            geometry=self.indexer,
            page_size=self.page_tokens,
            source=PoolName.KV,
        )
        return replace(plain, pools=(*plain.pools, indexer))


@dataclass(frozen=True, kw_only=True)
class MambaModel(PlainModel):
    """MHA KV, and recurrent states of which a prefix needs the last alone.

    Attributes:
        kv: the full-attention layers.
        states: the linear-attention layers.
        device_states: states of the device state pool.
    """

    kv: MHAGeometry
    states: MambaGeometry
    device_states: int

    def spec(self) -> ModelSpec:
        plain = super().spec()
        states = PoolSpec(
            name=PoolName.MAMBA,
            geometry=self.states,
            page_size=1,
            policy=PoolHitPolicy.TRAILING_PAGES,
            window_pages=1,
            device_slots=self.device_states,
        )
        return replace(plain, pools=(*plain.pools, states))


@dataclass(frozen=True, kw_only=True)
class SWAModel(PlainModel):
    """MHA KV of the full-attention layers, and of the sliding-window layers.

    Attributes:
        kv: the full-attention layers.
        swa: the sliding-window layers; pages of as many tokens.
        window_tokens: tokens of the window.
        swa_device_tokens: tokens of the sliding-window device pool.
    """

    kv: MHAGeometry
    swa: MHAGeometry
    window_tokens: int
    swa_device_tokens: int

    def spec(self) -> ModelSpec:
        plain = super().spec()
        swa = PoolSpec(
            name=PoolName.SWA,
            geometry=self.swa,
            page_size=self.page_tokens,
            policy=PoolHitPolicy.TRAILING_PAGES,
            window_pages=window_pages(self.window_tokens, self.page_tokens),
            device_slots=self.swa_device_tokens,
        )
        return replace(plain, pools=(*plain.pools, swa))


@dataclass(frozen=True, kw_only=True)
class DeepSeekV4Model:
    """A logical anchor, sliding-window KV in every layer, compressed KV and states.

    Attributes:
        name: the model's name.
        compression_ratios: one a layer: 0 (window only), 4 or 128.
        page_tokens: tokens a page; a multiple of every ratio.
        window_tokens: tokens of the sliding window.
        device_tokens: tokens of the anchor.
        swa_device_tokens: tokens of the sliding-window device pool.
        draft_layers: layers of the multi-token-prediction draft, packed behind the target's
            sliding-window layers; more than 0 doubles the compressor's state rings.
        nope_head_dim, rope_head_dim: elements of a KV row, stored as fp8 and bf16.
        indexer_head_dim: elements of an indexer key, stored as fp8 with one fp32 scale.
        state_dtype: element type of the compressor states.

    Raises:
        LayoutError: a ratio is unknown or does not divide the page.
    """

    name: str
    compression_ratios: tuple[int, ...]
    page_tokens: int
    window_tokens: int
    device_tokens: int
    swa_device_tokens: int
    draft_layers: int = 0
    nope_head_dim: int = 448
    rope_head_dim: int = 64
    indexer_head_dim: int = 128
    state_dtype: str = "float32"
    host_to_device_ratio: float = 2.0

    def __post_init__(self) -> None:
        unknown = set(self.compression_ratios) - {0, 4, 128}
        uneven = [r for r in self.compression_ratios if r and self.page_tokens % r]
        if unknown or uneven or not self.compression_ratios:
            raise LayoutError(
                f"model {self.name!r} needs compression ratios of 0, 4 or 128 that divide its "
                f"page of {self.page_tokens} tokens, got {sorted(set(self.compression_ratios))}"
            )

    def spec(self) -> ModelSpec:
        pools = [self._anchor(), self._swa()]
        c4_layers = self.compression_ratios.count(4)
        c128_layers = self.compression_ratios.count(128)
        if c4_layers:
            c4_tokens = self.page_tokens // 4
            indexer_bytes = c4_tokens * (self.indexer_head_dim + 4)
            pools += [
                self._from_kv(PoolName.DEEPSEEK_V4_C4, c4_layers, self._kv_row_bytes(c4_tokens)),
                self._from_kv(PoolName.DEEPSEEK_V4_C4_INDEXER, c4_layers, indexer_bytes),
                self._state(
                    PoolName.DEEPSEEK_V4_C4_STATE,
                    c4_layers,
                    self.nope_head_dim + self.rope_head_dim,
                ),
                self._state(
                    PoolName.DEEPSEEK_V4_C4_INDEXER_STATE, c4_layers, self.indexer_head_dim
                ),
            ]
        if c128_layers:
            row_bytes = self._kv_row_bytes(self.page_tokens // 128)
            pools.append(self._from_kv(PoolName.DEEPSEEK_V4_C128, c128_layers, row_bytes))
        return ModelSpec(
            name=self.name,
            page_tokens=self.page_tokens,
            is_mla_model=True,
            pools=tuple(pools),
            host_to_device_ratio=self.host_to_device_ratio,
        )

    def _anchor(self) -> PoolSpec:
        return PoolSpec(
            name=PoolName.KV,
            geometry=LogicalGeometry(),
            page_size=self.page_tokens,
            device_slots=self.device_tokens,
        )

    def _swa(self) -> PoolSpec:
        return PoolSpec(
            name=PoolName.SWA,
            geometry=V4Geometry(
                layers=len(self.compression_ratios) + self.draft_layers,
                row_bytes=self._kv_row_bytes(self.page_tokens),
            ),
            page_size=self.page_tokens,
            policy=PoolHitPolicy.TRAILING_PAGES,
            window_pages=window_pages(self.window_tokens, self.page_tokens),
            device_slots=self.swa_device_tokens,
        )

    def _from_kv(self, name: PoolName, layers: int, row_bytes: int) -> PoolSpec:
        return PoolSpec(
            name=name,
            geometry=V4Geometry(layers=layers, row_bytes=row_bytes),
            page_size=self.page_tokens,
            source=PoolName.KV,
        )

    def _state(self, name: PoolName, layers: int, head_dim: int) -> PoolSpec:
        """A ring of rows a page; a row is KV and score of two overlapping windows."""
        ring = 16 if self.draft_layers else 8
        row_bytes = ring * 2 * 2 * head_dim * dtype_of(self.state_dtype).itemsize
        return PoolSpec(
            name=name,
            geometry=V4Geometry(layers=layers, row_bytes=row_bytes, state=True),
            page_size=self.page_tokens,
            source=PoolName.SWA,
            policy=PoolHitPolicy.TRAILING_PAGES,
            window_pages=window_pages(self.window_tokens, self.page_tokens),
        )

    def _kv_row_bytes(self, tokens: int) -> int:
        """A page of one layer, padded to FlashMLA's 576 bytes (``bytes_per_page_padded``).

        A token is fp8 values, bf16 rotary values, a scale each 64 values, and a byte of padding.
        """
        scales = self.nope_head_dim // 64 + 1
        token_bytes = self.nope_head_dim + 2 * self.rope_head_dim + scales
        return -(-tokens * token_bytes // 576) * 576


def window_pages(window_tokens: int, page_tokens: int) -> int:
    """Pages that a window of tokens may touch when it ends at a page boundary."""
    return max(1, -(-window_tokens // page_tokens))


def with_draft(spec: ModelSpec, draft: MHAGeometry) -> ModelSpec:
    """The model with an MHA draft model beside it (``build_full_draft_pools``).

    The draft pool uses the target's KV slots. Beside an MLA target its bytes still differ
    by rank, since each holds its own heads.
    """
    pool = PoolSpec(
        name=PoolName.DRAFT,
        geometry=draft,
        page_size=spec.page_tokens,
        source=PoolName.KV,
    )
    return replace(spec, pools=(*spec.pools, pool))
