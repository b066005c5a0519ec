"""Backends that SGLang believes and must not, each in one way; they pass no test."""

from __future__ import annotations

from typing import Any

from hicache_shared.contract import PoolTransfer
from hicache_shared.memory_backend import MemoryBackend

POOL = "deepseek_v4_c128"


class SwapsPages(MemoryBackend):
    """Takes the first two pages of a get for each other."""

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> Any:
        return super().batch_get_v1([keys[1], keys[0], *keys[2:]], host_indices, extra_info)


class StoresNotAll(MemoryBackend):
    """Says that a pool was stored which was not."""

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> Any:
        rest = [transfer for transfer in transfers if transfer.name != POOL]
        return _as_if(transfers, super().batch_set_v2(rest, extra_info))


class FillsNotAll(MemoryBackend):
    """Says that a pool was filled which was not."""

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> Any:
        rest = [transfer for transfer in transfers if transfer.name != POOL]
        return _as_if(transfers, super().batch_get_v2(rest, extra_info))


class ForgetsAPool(MemoryBackend):
    """Leaves a pool's pages as they are and out of its answer, which SGLang takes for success."""

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> Any:
        rest = [transfer for transfer in transfers if transfer.name != POOL]
        return super().batch_get_v2(rest, extra_info)


def _as_if(transfers: list[PoolTransfer], answers: dict[str, list[bool]]) -> dict[str, list[bool]]:
    return {t.name: answers.get(t.name, [True] * len(t.keys or ())) for t in transfers}
