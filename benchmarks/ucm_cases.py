"""The models whose pools the benchmark of UCM moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hicache_shared.hostpool import (
    MambaGeometry,
    MambaModel,
    MHAGeometry,
    ModelSpec,
    SWAModel,
    preset,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table for each number of pages.

    Attributes:
        name: what the row is called.
        model: the model whose pools are moved.
        pools: those moved in one call; KV goes by v1.
        tp_size: ranks that attention heads and states are split over.
        peer_model: what the peer moves, where it cannot move ``model``; None is the same.
        peer_pools: its pools; empty is the same.
    """

    name: str
    model: ModelSpec
    pools: tuple[str, ...]
    tp_size: int = 1
    peer_model: ModelSpec | None = None
    peer_pools: tuple[str, ...] = ()


def cases() -> Iterator[Case]:
    v4 = preset("deepseek-v4-flash")
    sidecars = tuple(str(pool.name) for pool in v4.pools[1:])
    yield Case(name="V4 Flash, all pools", model=v4, pools=sidecars)
    for name in sidecars:
        yield Case(name=f"V4 Flash, {name.removeprefix('deepseek_v4_')}", model=v4, pools=(name,))
    yield Case(name="MHA, Llama-3.1-8B", model=preset("mha"), pools=("kv",))
    yield Case(name="MLA, DeepSeek-V2-Lite", model=preset("mla"), pools=("kv",))

    qwen = preset("mamba")
    states = qwen.pools[1].geometry
    assert isinstance(states, MambaGeometry)
    half = replace(qwen.pools[1], geometry=replace(states, temporal_dtype="bfloat16"))
    bf16 = replace(qwen, pools=(qwen.pools[0], half))
    yield Case(name="Mamba, Qwen3-Next TP8, bf16", model=bf16, pools=("mamba",), tp_size=8)
    yield Case(name="Mamba, Qwen3-Next TP8, fp32", model=qwen, pools=("mamba",), tp_size=8)
    # Nemotron-H-8B: 24 layers, 128 heads of 64, states of 128, 8 groups, kernel 4.
    nemotron = MambaGeometry(layers=24, temporal_shape=(128, 64, 128), conv_shapes=((10240, 3),))
    yield Case(
        name="Mamba, Nemotron-H-8B TP8", model=mamba_model(nemotron), pools=("mamba",), tp_size=8
    )

    # MiMo-V2-Flash's full-attention layers, and a head size made up to share almost no divisor.
    for name, v_head_dim in (("K 192 V 128", 128), ("K 192 V 127", 127)):
        keys_values = MHAGeometry(layers=9, head_num=4, head_dim=192, v_head_dim=v_head_dim)
        yield Case(
            name=f"Asymmetric K/V, {name}",
            model=asymmetric_model(keys_values),
            pools=("swa",),
            peer_model=mamba_model(staged_alike(keys_values)),
            peer_pools=("mamba",),
        )


PAGE_TOKENS = 64


def mamba_model(states: MambaGeometry) -> ModelSpec:
    """Recurrent states beside a KV pool that is not moved."""
    return MambaModel(
        name="mamba",
        kv=MHAGeometry(layers=1, head_num=8, head_dim=64),
        states=states,
        page_tokens=PAGE_TOKENS,
        device_tokens=PAGE_TOKENS,
        device_states=1,
    ).spec()


def asymmetric_model(keys_values: MHAGeometry) -> ModelSpec:
    """Sliding-window K and V of unequal size beside a KV pool that is not moved."""
    return SWAModel(
        name="asymmetric",
        kv=MHAGeometry(layers=1, head_num=8, head_dim=64),
        swa=keys_values,
        window_tokens=PAGE_TOKENS,
        page_tokens=PAGE_TOKENS,
        device_tokens=PAGE_TOKENS,
        swa_device_tokens=PAGE_TOKENS,
    ).spec()


def staged_alike(keys_values: MHAGeometry) -> MambaGeometry:
    """States of the sizes of a page's K and V.

    The peer refuses a sidecar of unequal K and V, and as primary KV cuts the page in half,
    which reads and writes beyond its pools. Its staging, which it has for Mamba alone, is
    what carries unequal components.
    """
    row = PAGE_TOKENS * keys_values.head_num
    return MambaGeometry(
        layers=keys_values.layers,
        temporal_shape=(row, keys_values.head_dim),
        conv_shapes=((row, keys_values.v_dim),),
        temporal_dtype=keys_values.dtype,
        conv_dtype=keys_values.dtype,
    )
