"""What must match for bytes to be interchangeable, and the key prefix made of it.

A key reads ``hc1/<namespace>-<16 hex>/<pool>-<32 hex>/<page hash>``. The words are for
people who read logs; the hex digits decide. Two deployments whose bytes may differ get
different digests, and a different digest is a miss.

SGLang's page hashes say nothing of model, dtype, layout or ranks, and what SGLang passes
holds neither the KV dtype (fp8 pools are stored as uint8) nor the checkpoint, so the
operator can complete the identity with ``model_id``, ``revision``, ``kv_cache_dtype``.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass

from hicache_shared.contract import HiCacheStorageConfig, PoolName, dcp_place
from hicache_shared.errors import LayoutError
from hicache_shared.layout import Access, PoolLayout

SCHEMA = 1
"""Version of the key schema. A change of what is in a key, or of its form, raises it."""

MAX_KEY_CHARS = 192
"""No key is longer, whatever the names of model and pools are."""

_SLUG_CHARS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What all pools of a deployment share; its digest scopes a clear.

    Attributes:
        namespace: the operator's own name to keep deployments apart; may be empty.
        model: ``model_id`` where given, else the name the model is served under.
        revision: of the checkpoint; empty where not given.
        kv_cache_dtype: as in ``--kv-cache-dtype``; empty where not given.
    """

    namespace: str
    model: str
    revision: str
    kv_cache_dtype: str

    def text(self) -> str:
        """The part of every key that names this deployment, without a trailing slash."""
        words = f"{self.namespace}.{self.model}" if self.namespace else self.model
        return f"hc{SCHEMA}/{_slug(words)}-{_digest(asdict(self)).hex()[:16]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolIdentity:
    """Everything that must match for a page of one pool.

    ``tp`` is None for pools that every tensor-parallel rank holds alike; that is a property
    of the pool, not of the model. ``head_shard`` takes its place where a page's heads are
    split over objects, so that deployments of different TP sizes share them.

    Attributes:
        model: the deployment.
        pool: the pool's name.
        form: ``pages`` for the pool's own buffers in order, ``flat`` for its flat form.
        page_tokens: tokens a page of the anchor pool; page hashes are chained over these.
        draft_model: of the draft pools, whose checkpoint is another than the model's; else
            empty.
    """

    model: ModelIdentity
    pool: str
    form: str
    memory_layout: str
    dtype: str
    format_tag: str | None
    page_tokens: int
    page_slots: int
    component_bytes: tuple[int, ...]
    layers: tuple[int, int] | None
    tp: tuple[int, int] | None
    head_shard: tuple[int, int] | None
    pp: tuple[int, int]
    cp: tuple[int, int]
    dcp: tuple[int, int]
    draft_model: str

    def digest(self) -> bytes:
        """16 bytes over every field and the schema version."""
        return _digest(asdict(self))

    def prefix(self) -> str:
        """What the pool's keys begin with, with a trailing slash."""
        return f"{self.model.text()}/{_slug(self.pool)}-{self.digest().hex()}/"


def pool_identity(
    layout: PoolLayout,
    *,
    model: ModelIdentity,
    config: HiCacheStorageConfig,
    page_tokens: int,
    draft_model: str = "",
) -> PoolIdentity:
    """The identity of one layout on this rank."""
    sharded = is_rank_sharded(layout, config) and layout.head_shard is None
    return PoolIdentity(
        model=model,
        pool=layout.name,
        form="flat" if layout.access is Access.STAGED else "pages",
        memory_layout=layout.memory_layout,
        dtype=layout.dtype,
        format_tag=layout.format_tag,
        page_tokens=page_tokens,
        page_slots=layout.page_slots,
        component_bytes=layout.component_bytes,
        layers=layout.layers,
        tp=(config.tp_rank, config.tp_size) if sharded else None,
        head_shard=layout.head_shard,
        pp=(config.pp_rank, config.pp_size),
        cp=(config.attn_cp_rank, config.attn_cp_size),
        dcp=dcp_place(config),
        draft_model=draft_model if layout.name in DRAFT_POOLS else "",
    )


DRAFT_POOLS = frozenset({"draft", "draft_indexer", "draft_swa"})


def is_rank_sharded(layout: PoolLayout, config: HiCacheStorageConfig) -> bool:
    """Whether each tensor-parallel rank holds other bytes of this pool.

    ``is_mla_model`` says so of the primary pool and of the sidecars of its kind. Mamba
    states are sharded in every model, and so is any pool that holds attention heads: an
    MHA draft beside an MLA target has this rank's.
    """
    return not config.is_mla_model or layout.name == PoolName.MAMBA or layout.per_head


@dataclass(frozen=True, slots=True)
class HeadShards:
    """How a rank's page is split over objects by attention heads."""

    factor: int
    first: int
    count: int


def head_shards(pool_layout: str, per_head: bool, config: HiCacheStorageConfig) -> HeadShards:
    """The head shards of a pool on this rank; a count of 1 means that keys name none.

    With ``tp_lcm_size`` set, pages in ``page_head`` layout are addressed by head shards out
    of that number, also where a rank holds just one, so that TP 2 and TP 4 share.

    Raises:
        LayoutError: ``tp_lcm_size`` is no multiple of the TP size.
    """
    lcm = config.tp_lcm_size
    if lcm is None or lcm == 1 or config.is_mla_model or pool_layout != "page_head" or not per_head:
        return HeadShards(1, 0, 1)
    factor, rest = divmod(lcm, config.tp_size)
    if rest:
        raise LayoutError(f"tp_lcm_size {lcm} is no multiple of the TP size {config.tp_size}")
    return HeadShards(factor, config.tp_rank * factor, lcm)


def _digest(record: object) -> bytes:
    text = json.dumps([SCHEMA, record], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "_", words.lower())[:_SLUG_CHARS]
