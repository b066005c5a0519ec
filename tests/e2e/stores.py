"""The storage of each backend, for a while, and access to it behind the contract.

Needs the distributions of this repository, unlike the rest of ``tests.e2e``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hicache_shared.plugins import find


class Raw(Protocol):
    """Objects by their key."""

    def raw_keys(self, prefix: str = "") -> list[str]: ...
    def raw_get(self, key: str) -> bytes | None: ...
    def raw_put(self, key: str, data: bytes, /) -> None: ...


@dataclass(frozen=True)
class Storage:
    """A storage that is there.

    Attributes:
        extra_config: what the backend is told of it.
        raw: its objects; None where they lie in the engine's own processes, and go with them.
    """

    extra_config: dict[str, Any]
    raw: Raw | None

    @property
    def lasts(self) -> bool:
        """Whether it outlives an engine."""
        return self.raw is not None


@contextmanager
def mooncake(folder: Path, nbytes: int) -> Iterator[Storage]:
    """A master, and the pages in this process: the engines give it no memory."""
    from hicache_mooncake.server import MooncakeMaster
    from hicache_mooncake.testing import RawMooncake

    with (
        MooncakeMaster() as master,
        RawMooncake(master.address, master.admin_address, segment_bytes=nbytes) as raw,
    ):
        extra = {
            **find("mooncake").launch_config(master.address),
            "protocol": "tcp",
            "local_hostname": "127.0.0.1",
            "global_segment_size": 0,
            # Engines keep all cores of a small machine busy, and the master waits for one.
            "deadline_s": 9,
        }
        yield Storage(extra, raw)


@contextmanager
def ucm(folder: Path, nbytes: int) -> Iterator[Storage]:
    """A folder, which grows as it must."""
    from hicache_ucm.testing import RawUcm

    root = folder / "ucm"
    root.mkdir()
    yield Storage(find("ucm").launch_config(str(root)), RawUcm(root))


@contextmanager
def umbp(folder: Path, nbytes: int) -> Iterator[Storage]:
    """Embedded: in the memory of each rank."""
    yield Storage({"dram_capacity_bytes": nbytes}, None)


STORAGES: dict[str, Callable[[Path, int], AbstractContextManager[Storage]]] = {
    "mooncake": mooncake,
    "ucm": ucm,
    "umbp": umbp,
}


def corrupt(raw: Raw, key: str) -> None:
    """Replace every byte of an object; its size stays."""
    page = raw.raw_get(key)
    if page is None:
        raise KeyError(key)
    # As bf16: numbers around 3, where a page has such from -5 to 5.
    raw.raw_put(key, b"\x40" * len(page))


def kv_keys(raw: Raw) -> set[str]:
    """Keys of the pages of the KV pools, of all ranks."""
    return {key for key in raw.raw_keys() if re.search("/kv[-_]", key)}
