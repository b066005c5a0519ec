"""The suite's host pools as objects of SGLang's own classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hicache_shared.hostpool import build, page_views, preset
from hicache_shared.layout import is_logical
from hicache_shared.testing.suite.fixtures import LEGAL_PAIRS, NO_FLAT_FORM
from hicache_shared.testing.tensors import TorchTensors

torch = pytest.importorskip("torch")

PAGES = 6


@pytest.fixture(scope="module")
def tensors() -> TorchTensors:
    return TorchTensors()


@pytest.mark.parametrize(("model", "layout"), LEGAL_PAIRS)
def test_a_pool_of_sglangs_class_has_the_addresses_and_flat_pages_of_the_suites(
    tensors: TorchTensors, model: str, layout: str
) -> None:
    assembled = build(preset(model), pages=PAGES, layout=layout, layers_div=12)
    for entry in assembled.group.entries:
        pool = entry.host_pool
        twin = tensors.pool(pool)
        assert type(twin).__module__.startswith("sglang.")
        assert (twin.page_size, twin.size, twin.layout) == (pool.page_size, pool.size, layout)
        if is_logical(pool):
            assert twin.kv_buffer is None
            assert twin.get_data_page(0).numel() == 0
            continue
        fill(pool)
        slots = np.arange(pool.page_size, 4 * pool.page_size)
        assert plain(twin.get_page_buffer_meta(torch.from_numpy(slots))) == plain(
            pool.get_page_buffer_meta(slots)
        )
        if (model, str(entry.name)) != (NO_FLAT_FORM, "kv"):
            move_flat(tensors, pool, twin)


def fill(pool: Any) -> None:
    generator = np.random.default_rng(1)
    for page in range(PAGES):
        for view in page_views(pool, page):
            view[:] = generator.integers(0, 256, view.nbytes, dtype=np.uint8)


def plain(meta: Any) -> tuple[list[int], list[int]]:
    addresses, sizes = meta
    return list(addresses), list(sizes)


def move_flat(tensors: TorchTensors, pool: Any, twin: Any) -> None:
    """Page 1 to page 4, by SGLang's methods."""
    page = twin.get_data_page(pool.page_size, flat=True)
    empty = twin.get_dummy_flat_data_page()
    assert (page.dtype, page.numel()) == (empty.dtype, empty.numel())
    assert tensors.plain(page).tobytes() == pool.get_data_page(pool.page_size).tobytes()
    twin.set_from_flat_data_page(4 * pool.page_size, page)
    moved, source = page_views(pool, 4), page_views(pool, 1)
    assert all(map(np.array_equal, moved, source))
