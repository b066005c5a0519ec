"""Pages go from a GPU through pinned host pools to each backend, and come back byte-exact.

Needs torch and a CUDA GPU, no SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from hicache_shared.backend import HiCacheBackend
from hicache_shared.contract import rank_config
from hicache_shared.hostpool import build
from hicache_shared.plugins import ServeOptions, find
from hicache_shared.testing.rank import LAYERS_DIV, Rank, chain, spec_of
from tests.gpu.pages import DevicePages, PinnedMemory

BACKENDS = [
    pytest.param(name, marks=pytest.mark.backend(name))
    for name in ("mooncake", "ucm", "umbp", "memory")
]
MODELS = [
    ("deepseek-v4-flash", "page_first"),
    ("deepseek-v4-flash", "layer_first"),
    ("deepseek-v3.2", "page_first"),
    ("mamba", "page_first"),
    ("swa", "page_first"),
    ("mha", "page_head"),
]
COUNT = 4
STORE_BYTES = 512 << 20


@contextmanager
def stored_by(backend: str, model: str, layout: str, memory: PinnedMemory) -> Iterator[Rank]:
    """A rank whose pools lie in ``memory`` and are registered with a backend of its own."""
    plugin = find(backend)
    spec = spec_of(model)
    assembled = build(
        spec,
        pages=2 * COUNT,
        layout=layout,
        layers_div=LAYERS_DIV.get(model, 12),
        allocate=memory,
    )
    with plugin.serve(ServeOptions(STORE_BYTES)) as extra:
        named = {"model_id": model, "revision": "1", "kv_cache_dtype": "auto"}
        config = rank_config(
            model,
            is_mla_model=spec.is_mla_model,
            is_page_first_layout=layout.startswith("page_first"),
            extra_config={**extra, **named, "namespace": f"gpu-{uuid4().hex[:12]}"},
        )
        store = plugin.make(config)
        assert isinstance(store, HiCacheBackend)
        try:
            yield Rank(store, assembled, config)
        finally:
            store.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("model", "layout"), MODELS)
def test_pages_of_a_device_come_back_byte_exact(
    device: str, backend: str, model: str, layout: str
) -> None:
    memory = PinnedMemory(device)
    with stored_by(backend, model, layout, memory) as rank:
        assert memory.all_pinned() or not device.startswith("cuda")
        keys = chain(COUNT, salt=uuid4().hex)
        written, read = list(range(COUNT)), list(range(2 * COUNT - 1, COUNT - 1, -1))
        pages, original = (DevicePages(rank, device, COUNT) for _ in range(2))
        for each in (pages, original):
            each.fill(seed=1)

        pages.to_host(written)
        rank.set_everywhere(keys, written)
        rank.set_anchor(keys)
        rank.fill(seed=2)
        pages.wipe()
        assert not any(any(same) for same in pages.equal(original).values())

        assert rank.hit(keys) == COUNT
        for name in rank.pools:
            assert rank.get(name, keys, read) == [True] * COUNT, name
        pages.from_host(read)
        assert pages.equal(original) == dict.fromkeys(rank.pools, [True] * COUNT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_that_was_not_stored_stays_what_it_was_on_the_device(
    device: str, backend: str
) -> None:
    with stored_by(backend, "mha", "page_first", PinnedMemory(device)) as rank:
        keys, pages = chain(COUNT, salt=uuid4().hex), list(range(COUNT))
        before, after = (DevicePages(rank, device, COUNT) for _ in range(2))
        before.fill(seed=3)
        before.to_host(pages)
        assert rank.get("kv", keys, pages) == [False] * COUNT
        after.from_host(pages)
        assert after.equal(before) == {"kv": [True] * COUNT}
