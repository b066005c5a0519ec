"""The suite on UCM's own adapter for SGLang (``ucm.integration.sglang``, loaded as ``dynamic``)."""

from __future__ import annotations

import importlib
import shutil
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import SimpleNamespace
from typing import Any

from hicache_shared.testing import BackendSuite, Capabilities
from tests.peers.peer import FilesHarness, replaced

STORE = {
    "posix_io_engine": "psync",
    "io_direct": False,
    "posix_data_trans_concurrency": 4,
    "data_dir_shard_bytes": 1,
    "posix_lookup_concurrency": 1,
    "timeout_ms": 0,
    "store_health": {"enabled": False},
}
"""Settings of PosixStore that suit any page size and file system, as hicache-ucm has them."""


class UcmAdapterHarness(FilesHarness):
    name = "UnifiedCacheStore"
    kind = "dynamic"
    pattern = "[0-9a-f]" * 32
    capabilities = Capabilities(raw=True, restart=True, zero_copy=True, layouts=("page_first",))
    requires = ("sglang", "torch", "ucm")
    distributions = ("sglang", "uc-manager-cuda-cu129")

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._parent = Path(self._stack.enter_context(TemporaryDirectory(prefix="ucm_adapter_")))
        connector: Any = importlib.import_module("ucm.integration.sglang.ucm_connector")
        # It asks for the rank in a process group, which exists in an engine only.
        group = SimpleNamespace(local_rank=0)
        self._stack.enter_context(replaced(connector, "get_world_group", lambda: group))
        self.extra_config = {
            "backend_name": "unifiedcache",
            "module_path": "ucm.integration.sglang.unifiedcache_store",
            "class_name": "UnifiedCacheStore",
            "interface_v1": 1,
        }
        self.forget()

    def forget(self) -> None:
        """Go on in another folder: a process has one model a folder, as an engine has."""
        for before in self._parent.iterdir():
            shutil.rmtree(before)
        self.folder = Path(mkdtemp(dir=self._parent))
        self.extra_config["kv_connector_extra_config"] = {
            "ucm_connector_name": "UcmPipelineStore",
            "ucm_connector_config": {"storage_backends": str(self.folder), **STORE},
        }

    def close(self) -> None:
        self._stack.close()


class TestUcmAdapter(BackendSuite):
    harness_type = UcmAdapterHarness
