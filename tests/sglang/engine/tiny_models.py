"""Models of a few layers with random weights, as files that SGLang loads.

``python -m tests.sglang.engine.tiny_models FOLDER`` writes all of them. The weights are wide
(``initializer_range``): with usual ones the next token hardly depends on the KV before it, and a
wrong page would not show.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        **COMMON,
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
    # Layers with a window of 64 tokens between layers with all.
    "sliding-window": {
        **COMMON,
        "model_type": "mellum",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 64,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense"] * 4,
        "mlp_only_layers": [0, 1, 2, 3],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    # Layers whose state is the last inputs of a short convolution, in Mamba's pools.
    "short-convolution": {
        **COMMON,
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
    },
}

MODULES = {"llama": "llama", "sliding-window": "mellum", "short-convolution": "lfm2"}
"""SGLang's module of each; an engine imports all of them where it is not told otherwise."""


def write(name: str, folder: Path) -> None:
    """Write one model's configuration and weights; the same bytes each time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODELS[name])
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder / name)


if __name__ == "__main__":
    for each in MODELS:
        write(each, Path(sys.argv[1]))
