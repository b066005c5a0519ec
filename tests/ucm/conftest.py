"""A real store on a disk; ``tests.backends`` says when its absence is a skip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_ucm.store import UcmStore
from tests.pools import TestPool
from tests.ucm.ucm_stores import make_pools, opened


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def pools() -> dict[str, TestPool]:
    return make_pools()


@pytest.fixture
def store(root: Path, pools: dict[str, TestPool]) -> Iterator[UcmStore]:
    made = opened(root)
    made.open([pool.stored for pool in pools.values()])
    yield made
    made.close()
