"""Reference host pools over numpy: what a storage backend sees of SGLang, without SGLang."""

from hicache_shared.hostmem import aligned_bytes
from hicache_shared.hostpool.assemble import (
    AssembledModel,
    ModelSpec,
    PoolSpec,
    build,
    host_pages,
    legal_layouts,
)
from hicache_shared.hostpool.base import LEGAL_LAYOUTS, HostPool, SlotPool, page_views
from hicache_shared.hostpool.deepseek_v4 import V4Geometry, V4PagedHostPool, V4StateHostPool
from hicache_shared.hostpool.dsa import DSAIndexerGeometry, DSAIndexerHostPool
from hicache_shared.hostpool.group import HostPoolGroup, PoolEntry
from hicache_shared.hostpool.logical import LogicalGeometry, LogicalHostPool
from hicache_shared.hostpool.mamba import MambaGeometry, MambaHostPool
from hicache_shared.hostpool.memory import Allocate, DType, dtype_of
from hicache_shared.hostpool.mha import AsymmetricMHAHostPool, MHAGeometry, MHAHostPool
from hicache_shared.hostpool.mla import MLAGeometry, MLAHostPool
from hicache_shared.hostpool.models import (
    DeepSeekV4Model,
    DSAModel,
    MambaModel,
    PlainModel,
    SWAModel,
    with_draft,
)
from hicache_shared.hostpool.presets import PRESETS, preset

__all__ = [
    "LEGAL_LAYOUTS",
    "PRESETS",
    "Allocate",
    "AssembledModel",
    "AsymmetricMHAHostPool",
    "DSAIndexerGeometry",
    "DSAIndexerHostPool",
    "DSAModel",
    "DType",
    "DeepSeekV4Model",
    "HostPool",
    "HostPoolGroup",
    "LogicalGeometry",
    "LogicalHostPool",
    "MHAGeometry",
    "MHAHostPool",
    "MLAGeometry",
    "MLAHostPool",
    "MambaGeometry",
    "MambaHostPool",
    "MambaModel",
    "ModelSpec",
    "PlainModel",
    "PoolEntry",
    "PoolSpec",
    "SWAModel",
    "SlotPool",
    "V4Geometry",
    "V4PagedHostPool",
    "V4StateHostPool",
    "aligned_bytes",
    "build",
    "dtype_of",
    "host_pages",
    "legal_layouts",
    "page_views",
    "preset",
    "with_draft",
]
