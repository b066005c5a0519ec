"""The short convolution of Mamba-like layers, in torch, on the CPU.

Names and parameters are those of ``sglang.srt.layers.attention.mamba.causal_conv1d``, 0.5.23, whose
own are Triton and CUDA kernels. A state is the last ``width - 1`` inputs of a sequence.
"""

from __future__ import annotations

from typing import Any


def causal_conv1d_fn(
    x: Any,
    weight: Any,
    bias: Any = None,
    query_start_loc: Any = None,
    cache_indices: Any = None,
    has_initial_state: Any = None,
    conv_states: Any = None,
    activation: str | None = "silu",
    **_: Any,
) -> Any:
    """Over whole sequences: ``x`` is [dim, tokens of all], states [slots, dim, width - 1]."""
    import torch

    out = torch.empty_like(x)
    ends = query_start_loc.tolist()
    for place, slot in enumerate(cache_indices.tolist()):
        begin, end = ends[place], ends[place + 1]
        state = conv_states[slot]
        before = state if has_initial_state[place] else torch.zeros_like(state)
        inputs = torch.cat([before, x[:, begin:end]], dim=1)
        out[:, begin:end] = _convolve(inputs, weight, bias, activation)
        conv_states[slot] = inputs[:, -state.shape[1] :]
    return out


def causal_conv1d_update(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    cache_seqlens: Any = None,
    conv_state_indices: Any = None,
    **_: Any,
) -> Any:
    """Over a token a sequence: ``x`` is [sequences, dim]."""
    import torch

    out = torch.empty_like(x)
    for place, slot in enumerate(conv_state_indices.tolist()):
        inputs = torch.cat([conv_state[slot], x[place].unsqueeze(1)], dim=1)
        out[place] = _convolve(inputs, weight, bias, activation)[:, -1]
        conv_state[slot] = inputs[:, 1:]
    return out


def _convolve(inputs: Any, weight: Any, bias: Any, activation: str | None) -> Any:
    from torch.nn import functional

    summed = functional.conv1d(
        inputs.float().unsqueeze(0),
        weight.float().unsqueeze(1),
        None if bias is None else bias.float(),
        groups=weight.shape[0],
    ).squeeze(0)
    done = functional.silu(summed) if activation else summed
    return done.to(inputs.dtype)


OPERATIONS = {each.__name__: each for each in (causal_conv1d_fn, causal_conv1d_update)}
