"""``sgl_kernel.kvcacheio`` in Python: the copies between device and host pools, on the CPU.

Names and parameters are those of the kernels that SGLang 0.5.23 calls; each moves the bytes that
its kernel moves. In the names ``lf`` is a pool with a buffer a layer, ``pf`` one with a buffer for
all layers, and ``ph`` one that is ordered by page and head. Sizes are in bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Rows:
    """Evenly spaced rows in memory.

    Attributes:
        address: of row 0.
        stride: from a row to the next.
    """

    address: int
    stride: int

    def view(self, rows: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The first ``nbytes`` of each row, writable."""
        memory = (ctypes.c_uint8 * (self.stride * (rows - 1) + nbytes)).from_address(self.address)
        flat = np.frombuffer(memory, np.uint8)
        return np.lib.stride_tricks.as_strided(flat, (rows, nbytes), (self.stride, 1))


def copy(source: Rows, source_rows: Any, target: Rows, target_rows: Any, nbytes: int) -> None:
    """Copy ``nbytes`` of each of ``source_rows`` to the same place in ``target_rows``."""
    taken, filled = source_rows.reshape(-1).numpy(), target_rows.reshape(-1).numpy()
    if not len(taken):
        return
    rows = source.view(int(taken.max()) + 1, nbytes)[taken]
    target.view(int(filled.max()) + 1, nbytes)[filled] = rows


def addresses(pointers: Any) -> list[int]:
    """Of a tensor of addresses, one a layer."""
    return [int(address) for address in pointers.reshape(-1).tolist()]


# One buffer a page, in layer after layer.


def transfer_kv_all_layer_mla(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, item_size: int, **_: Any
) -> None:
    for source, target in zip(addresses(src_layers), addresses(dst_layers), strict=True):
        copy(Rows(source, item_size), src_indices, Rows(target, item_size), dst_indices, item_size)


def transfer_kv_per_layer_mla(
    src: Any, dst: Any, src_indices: Any, dst_indices: Any, item_size: int, **_: Any
) -> None:
    source, target = Rows(src.data_ptr(), item_size), Rows(dst.data_ptr(), item_size)
    copy(source, src_indices, target, dst_indices, item_size)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Any,
    dst: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    dst_layout_dim: int,
    **_: Any,
) -> None:
    for layer, source in enumerate(addresses(src_layers)):
        target = Rows(dst.data_ptr() + layer * item_size, dst_layout_dim)
        copy(Rows(source, item_size), src_indices, target, dst_indices, item_size)


def transfer_kv_per_layer_mla_pf_lf(
    src: Any,
    dst: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    source = Rows(src.data_ptr() + layer_id * item_size, src_layout_dim)
    copy(source, src_indices, Rows(dst.data_ptr(), item_size), dst_indices, item_size)


def transfer_kv_mamba_lf_pf(src_ptrs: Any, **how: Any) -> None:
    transfer_kv_all_layer_mla_lf_pf(src_layers=src_ptrs, **how)


def transfer_kv_mamba_pf_lf(**how: Any) -> None:
    transfer_kv_per_layer_mla_pf_lf(**how)


# K and V.


def transfer_kv_all_layer(
    src_k_layers: Any, dst_k_layers: Any, src_v_layers: Any, dst_v_layers: Any, **how: Any
) -> None:
    transfer_kv_all_layer_mla(src_layers=src_k_layers, dst_layers=dst_k_layers, **how)
    transfer_kv_all_layer_mla(src_layers=src_v_layers, dst_layers=dst_v_layers, **how)


def transfer_kv_per_layer(src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, **how: Any) -> None:
    transfer_kv_per_layer_mla(src=src_k, dst=dst_k, **how)
    transfer_kv_per_layer_mla(src=src_v, dst=dst_v, **how)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Any, dst_k: Any, src_v_layers: Any, dst_v: Any, **how: Any
) -> None:
    transfer_kv_all_layer_mla_lf_pf(src_layers=src_k_layers, dst=dst_k, **how)
    transfer_kv_all_layer_mla_lf_pf(src_layers=src_v_layers, dst=dst_v, **how)


def transfer_kv_per_layer_pf_lf(src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, **how: Any) -> None:
    transfer_kv_per_layer_mla_pf_lf(src=src_k, dst=dst_k, **how)
    transfer_kv_per_layer_mla_pf_lf(src=src_v, dst=dst_v, **how)


# K and V by page, head, token, layer.


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Any,
    dst_k: Any,
    src_v_layers: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    nbytes = item_size // head_num
    for layers, host in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, address in enumerate(addresses(layers)):
            for head in range(head_num):
                source = Rows(address + head * nbytes, item_size)
                target, rows = _by_head(host, dst_indices, layer, head, page_size, head_num, nbytes)
                copy(source, src_indices, target, rows, nbytes)


def transfer_kv_per_layer_ph_lf(
    src_k: Any,
    dst_k: Any,
    src_v: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    nbytes = item_size // head_num
    for host, device in ((src_k, dst_k), (src_v, dst_v)):
        for head in range(head_num):
            source, rows = _by_head(host, src_indices, layer_id, head, page_size, head_num, nbytes)
            target = Rows(device.data_ptr() + head * nbytes, item_size)
            copy(source, rows, target, dst_indices, nbytes)


def _by_head(
    host: Any, slots: Any, layer: int, head: int, page_size: int, heads: int, nbytes: int
) -> tuple[Rows, Any]:
    """Rows of a layer in a ``page_head`` buffer, and which of them a head's tokens are."""
    layers = host.shape[-2]
    rows = (slots // page_size * heads + head) * page_size + slots % page_size
    return Rows(host.data_ptr() + layer * nbytes, layers * nbytes), rows


# By tensors instead of addresses.


def transfer_kv_direct(
    src_layers: Iterable[Any],
    dst_layers: Iterable[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: list[Any], dst_ptrs: list[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    pages = (dst_indices[::page_size] // page_size).tolist()
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, source in enumerate(src_ptrs):
        host, layer = dst_ptrs[i // layers], i % layers
        taken = source[src_indices].reshape(len(pages), *host.shape[2:])
        for page, rows in zip(pages, taken, strict=True):
            host[page, layer] = rows


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: list[Any],
    dst_ptrs: list[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    pages = (src_indices[::page_size] // page_size).tolist()
    for host, target in zip(src_ptrs, dst_ptrs, strict=True):
        slots = dst_indices.reshape(len(pages), page_size)
        for page, into in zip(pages, slots, strict=True):
            target[into] = host[page, layer_id].reshape(target[into].shape)


OPERATIONS: dict[str, Callable[..., None]] = {
    name: value for name, value in list(globals().items()) if name.startswith("transfer_kv_")
}
"""By the name that SGLang's modules import them under."""
