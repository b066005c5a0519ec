"""What ``dynamic`` gives a backend and what it does not, through SGLang's own classes."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_full_draft_pools
from sglang.srt.mem_cache.pool_host.common import ShmHostTensorAllocator
from sglang.srt.mem_cache.storage import StorageBackendFactory

from hicache_shared.errors import LayoutError
from tests.sglang.cache.devices import KINDS
from tests.sglang.cache.serving import Launch, prompt, running
from tests.sglang.cache.trip import PAGES, came_back

LINE = '"interface_v1": 1'


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("hicache_shared")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", ["mha", "deepseek-v4"])
def test_without_interface_v1_one_warning_at_launch_gives_the_line_to_add(
    backend: dict[str, Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(kind, Launch(backend, zero_copy=False)):
        (warning,) = warnings_of(caplog)
        assert f"add {LINE} to --hicache-storage-backend-extra-config" in warning


def test_with_interface_v1_a_launch_gives_no_warning(
    backend: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with running("deepseek-v4", Launch(backend)):
        assert warnings_of(caplog) == []


@pytest.mark.parametrize("kind", ["mha", "dsa"])
def test_a_drafts_pools_that_come_after_the_launch_are_restored(
    backend: dict[str, Any], kind: str
) -> None:
    launch = Launch({**backend, "draft_model_id": "tests/draft"})
    with running(kind, launch) as rank:
        draft = KINDS[kind]()
        specs, entries = build_full_draft_pools(draft_kv_pool=draft.kv, tree_cache=rank.cache)
        for spec, entry in zip(specs, entries, strict=True):
            rank.cache.register_sidecar_pool(spec, entry)
        tokens = prompt(rank.device, PAGES)
        draft.fill(seed=2)
        written = draft.read(draft.rows(rank.compute(tokens)))
        rank.backed_up()

        rank.flush()
        draft.wipe()
        rank.device.allocate(rank.device.page_size)
        assert rank.fetch(tokens) == len(tokens)
        assert draft.read(draft.rows(rank.slots(tokens))) == written


def test_shared_memory_of_the_allocator_setting_is_used(backend: dict[str, Any]) -> None:
    with running("mla", Launch(backend, more={"allocator": "shm"})) as rank:
        pool = rank.cache.host_pool_group.anchor_entry.host_pool
        assert isinstance(pool.allocator, ShmHostTensorAllocator)
        came_back(rank)


def test_prefix_keys_are_taken(backend: dict[str, Any]) -> None:
    more = {"hicache_storage_pass_prefix_keys": True}
    with running("deepseek-v4", Launch(backend, more=more)) as rank:
        came_back(rank)


def test_heads_are_split_where_a_deployment_of_another_size_is_to_share_them(
    backend: dict[str, Any],
) -> None:
    launch = Launch(backend, layout="page_head", more={"tp_lcm_size": 4})
    with running("mha", launch) as rank:
        assert rank.cache.cache_controller.storage_config.should_split_heads
        came_back(rank)


def test_a_backend_detached_and_attached_again_stores_and_restores(backend: dict[str, Any]) -> None:
    launch = Launch(backend)
    with running("deepseek-v4", launch) as rank:
        first = rank.backend
        assert rank.cache.detach_storage_backend()[0]
        extra = json.dumps(launch.extra_config(rank.device.page_size))
        done, message = rank.cache.attach_storage_backend("dynamic", extra, "tests/model")
        assert done, message
        assert rank.backend is not first
        came_back(rank)


def test_after_clear_nothing_is_found(backend: dict[str, Any]) -> None:
    with running("deepseek-v4", Launch(backend)) as rank:
        came_back(rank)
        assert rank.cache.clear_storage_backend()
        rank.flush()
        assert rank.fetch(prompt(rank.device, PAGES)) == 0


def test_a_layout_that_lists_no_addresses_is_refused_at_launch(
    backend: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    create = StorageBackendFactory.create_backend

    def noting(*args: Any) -> Any:
        made.append(create(*args))
        return made[-1]

    monkeypatch.setattr(StorageBackendFactory, "create_backend", noting)
    with (
        pytest.raises(LayoutError, match="use --hicache-mem-layout page_first"),
        running("dsa", Launch(backend, layout="layer_first")),
    ):
        pass
    made[0].close()  # SGLang, whose launch ends here, does not
