"""Backends whose keys leave something out, or have in them what they must not have."""

from __future__ import annotations

from dataclasses import replace

from hicache_shared.contract import HiCacheStorageConfig as Config
from hicache_shared.identity import PoolIdentity
from tests.suite.breaking import broken_key

DEPLOYMENT = "test_case_02_another_deployment_never_hits"
TP = "test_case_04_replicated_pools_are_shared_over_ranks_and_sharded_ones_never"
STAGES = "test_case_05_each_stage_and_rank_reads_its_own_bytes"
SHARDS = "test_head_shards_are_shared_between_tp_sizes"
MHA = "mha-page_first"
MLA = "mla-page_first"


@broken_key(
    "The key leaves out which checkpoint the model is.",
    killed_by=f"{DEPLOYMENT}[model_id-{MLA}]",
)
def key_without_model(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, model=replace(identity.model, model=""))


@broken_key(
    "The key leaves out the checkpoint's revision.",
    killed_by=f"{DEPLOYMENT}[revision-{MLA}]",
)
def key_without_revision(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, model=replace(identity.model, revision=""))


@broken_key(
    "The key leaves out the KV cache's dtype: pages of one fp8 format are read as another's.",
    killed_by=f"{DEPLOYMENT}[kv_cache_dtype-{MLA}]",
)
def key_without_dtype(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, model=replace(identity.model, kv_cache_dtype=""))


@broken_key(
    "The key leaves out the operator's namespace.",
    killed_by=f"{DEPLOYMENT}[namespace-{MLA}]",
)
def key_without_namespace(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, model=replace(identity.model, namespace=""))


@broken_key(
    "The key of a sharded pool has the TP rank and not the TP size.",
    killed_by=f"{TP}[to more-{MHA}]",
)
def key_without_tp_size(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, tp=identity.tp and (identity.tp[0], 0))


@broken_key(
    "The key of a sharded pool has the TP size and not the TP rank.",
    killed_by=f"{TP}[to the next-{MHA}]",
)
def key_without_tp_rank(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, tp=identity.tp and (0, identity.tp[1]))


@broken_key(
    "The key of a replicated pool has the TP rank, so that only the rank that wrote it hits.",
    killed_by=f"{TP}[to the next-{MLA}]",
)
def tp_rank_in_a_replicated_pool(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, tp=(config.tp_rank, config.tp_size))


@broken_key(
    "Mamba states, sharded in every model, count as replicated beside an MLA model's KV.",
    killed_by=f"{TP}[to the next-mla-mamba-page_first]",
)
def sharded_states_taken_as_replicated(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, tp=None if config.is_mla_model else identity.tp)


@broken_key(
    "The key leaves out the pipeline stage.",
    killed_by=f"{STAGES}[{MLA}-pp]",
)
def key_without_pp(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, pp=(0, 1))


@broken_key(
    "The key leaves out the context-parallel rank.",
    killed_by=f"{STAGES}[{MLA}-attn_cp]",
)
def key_without_cp(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, cp=(0, 1))


@broken_key(
    "The key leaves out the rank of decode context parallelism.",
    killed_by=f"test_case_05_dcp_ranks_read_their_own_bytes_or_are_refused[{MLA}]",
)
def key_without_dcp(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, dcp=(0, 1))


@broken_key(
    "The key leaves out the type of the pool's elements: bf16 pages are read as fp16.",
    killed_by=f"test_case_02_pools_of_another_shape_never_hit[{MLA}-float16]",
)
def key_without_element_type(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, dtype="")


@broken_key(
    "The key leaves out the memory layout: bytes in one order are read in another.",
    killed_by=f"test_case_02_another_memory_layout_never_hits[{MHA}-page_first_direct]",
)
def key_without_memory_layout(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, memory_layout="")


@broken_key(
    "The key leaves out the pool's name, and what follows from it.",
    killed_by="test_pages_come_back_byte_exact_and_nothing_else_changes[mamba-page_first]",
)
def key_without_the_pool(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, pool="", dtype="", component_bytes=(), page_slots=0, layers=None)


@broken_key(
    "The key leaves out whether a page is in flat form or in that of the pool's buffers.",
    killed_by=(
        "test_flat_kv_and_sidecars_hit_together_and_never_the_pools_own_pages[mla-page_first]"
    ),
)
def key_without_the_form(identity: PoolIdentity, config: Config) -> PoolIdentity:
    return replace(identity, form="", component_bytes=(sum(identity.component_bytes),))


@broken_key(
    "Head shards are numbered within a rank, so that ranks mix theirs up.",
    killed_by=f"{SHARDS}[mha-page_head]",
)
def head_shards_mixed(identity: PoolIdentity, config: Config) -> PoolIdentity:
    shard = identity.head_shard
    return replace(identity, head_shard=shard and (0, shard[1]))
