"""Models by name, with the geometry that their makers published.

Device capacities are small on purpose: presets are for tests, which give the pages.
"""

from __future__ import annotations

from hicache_shared.errors import ConfigError
from hicache_shared.hostpool.assemble import ModelSpec
from hicache_shared.hostpool.dsa import DSAIndexerGeometry
from hicache_shared.hostpool.mamba import MambaGeometry
from hicache_shared.hostpool.mha import MHAGeometry
from hicache_shared.hostpool.mla import MLAGeometry
from hicache_shared.hostpool.models import (
    DeepSeekV4Model,
    DSAModel,
    MambaModel,
    PlainModel,
    SWAModel,
)


def _deepseek_v4_flash() -> ModelSpec:
    """DeepSeek-V4-Flash with its one-layer multi-token-prediction draft.

    43 layers (two of the window alone, then 4 and 128 in turn, 4 last), page 256. The row
    sizes are SGLang's: 584 B a token padded to 576 B a page, and state rings of 16 rows as
    with speculative decoding (``get_compress_state_ring_size``).
    """
    return DeepSeekV4Model(
        name="deepseek-v4-flash",
        compression_ratios=(0, 0, *(4, 128) * 20, 4),
        page_tokens=256,
        window_tokens=128,
        device_tokens=16 * 256,
        swa_device_tokens=8 * 256,
        draft_layers=1,
    ).spec()


def _deepseek_v3_2() -> ModelSpec:
    """DeepSeek-V3.2-Exp: 61 layers, latent 512 + 64 in bf16, indexer 128 fp8 and a scale.

    From the model's ``config.json`` (``kv_lora_rank``, ``qk_rope_head_dim``,
    ``index_head_dim``); page 64, the only one its indexer kernels take.
    """
    return DSAModel(
        name="deepseek-v3.2",
        kv=MLAGeometry(layers=61, kv_lora_rank=512, qk_rope_head_dim=64),
        indexer=DSAIndexerGeometry(layers=61),
        page_tokens=64,
        device_tokens=16 * 64,
    ).spec()


def _mamba() -> ModelSpec:
    """Qwen3-Next-80B-A3B: 12 full-attention and 36 gated-delta-net layers.

    From transformers' ``Qwen3NextConfig``: 2 KV heads of 256; 32 value heads and 16 key
    heads of 128, convolution kernel 4. So a temporal state of 32 x 128 x 128 in fp32, and
    3 columns of 2 x 16 x 128 + 32 x 128 = 8192 channels in bf16.
    """
    return MambaModel(
        name="mamba",
        kv=MHAGeometry(layers=12, head_num=2, head_dim=256),
        states=MambaGeometry(layers=36, temporal_shape=(32, 128, 128), conv_shapes=((8192, 3),)),
        page_tokens=64,
        device_tokens=16 * 64,
        device_states=16,
    ).spec()


def _swa() -> ModelSpec:
    """gpt-oss-20b: 24 layers, sliding and full in turn, 8 KV heads of 64, window 128.

    From the model's ``config.json`` (transformers' ``GptOssConfig``).
    """
    layers = MHAGeometry(layers=12, head_num=8, head_dim=64)
    return SWAModel(
        name="swa",
        kv=layers,
        swa=layers,
        window_tokens=128,
        page_tokens=64,
        device_tokens=16 * 64,
        swa_device_tokens=8 * 64,
    ).spec()


def _mha() -> ModelSpec:
    """Llama-3.1-8B: 32 layers, 8 KV heads of 128, from the model's ``config.json``."""
    return PlainModel(
        name="mha",
        kv=MHAGeometry(layers=32, head_num=8, head_dim=128),
        page_tokens=64,
        device_tokens=16 * 64,
    ).spec()


def _mla() -> ModelSpec:
    """DeepSeek-V2-Lite: 27 layers, latent 512 + 64, from the model's ``config.json``."""
    return PlainModel(
        name="mla",
        kv=MLAGeometry(layers=27, kv_lora_rank=512, qk_rope_head_dim=64),
        page_tokens=64,
        device_tokens=16 * 64,
    ).spec()


def _mha_asymmetric() -> ModelSpec:
    """The full-attention layers of MiMo-V2-Flash: 4 KV heads, K of 192 and V of 128.

    From transformers' ``MiMoV2FlashConfig``; 9 of its 48 layers (the first and each sixth)
    attend to everything. Its sliding-window layers are left out here.
    """
    return PlainModel(
        name="mha-asymmetric",
        kv=MHAGeometry(layers=9, head_num=4, head_dim=192, v_head_dim=128),
        page_tokens=64,
        device_tokens=16 * 64,
    ).spec()


_SPECS = {
    "deepseek-v4-flash": _deepseek_v4_flash,
    "deepseek-v3.2": _deepseek_v3_2,
    "mamba": _mamba,
    "swa": _swa,
    "mha": _mha,
    "mla": _mla,
    "mha-asymmetric": _mha_asymmetric,
}

PRESETS = tuple(_SPECS)
"""Names that :func:`preset` knows."""


def preset(name: str) -> ModelSpec:
    """The pools of a well-known model.

    Raises:
        ConfigError: there is no preset of that name.
    """
    if name not in _SPECS:
        raise ConfigError(f"unknown model {name!r}; known are {', '.join(PRESETS)}")
    return _SPECS[name]()
