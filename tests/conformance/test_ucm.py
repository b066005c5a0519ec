"""The suite on UCM's real PosixStore, on a memory file system and on a disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.testing import BackendSuite, Capabilities, ElsewhereSpec, Holding
from hicache_shared.testing.harness import IDENTITY_FIELDS, RawHarness, with_extra
from hicache_ucm import UcmBackend
from hicache_ucm.client import Addresses, NativeError, NativeModule, NativeStore
from hicache_ucm.config import UcmConfig
from hicache_ucm.store import UcmStore
from hicache_ucm.testing import RawUcm
from tests.filesystems import fill, small_tmpfs, tmpfs_folder

pytestmark = pytest.mark.backend("ucm")

MAY_MOUNT = os.geteuid() == 0
"""A file system of little space has to be mounted."""


class WatchedNative(NativeStore):
    """A native store whose calls raise while it is ``broken``, and can be held."""

    def __init__(self, native: NativeStore, watch: Watch) -> None:
        self._watched = native
        self._watch = watch

    def lookup(self, ids: bytes) -> npt.NDArray[np.bool_]:
        self._watch.pass_by()
        return self._watched.lookup(ids)

    def load(self, ids: bytes, addresses: Addresses) -> int:
        self._watch.pass_by()
        return self._watched.load(ids, addresses)

    def dump(self, ids: bytes, addresses: Addresses) -> int:
        self._watch.pass_by()
        return self._watched.dump(ids, addresses)

    def wait(self, task: int) -> None:
        try:
            self._watched.wait(task)
        except NativeError:
            self._watch.failed()
            raise

    def close(self) -> None:
        self._watched.close()


class Watch:
    """What a harness does to the native stores of its backends.

    After a task that failed it removes the file that is named as ``ballast``.
    """

    def __init__(self) -> None:
        self.broken = False
        self.holding = Holding()
        self.ballast: Path | None = None
        self.refused = Event()

    def pass_by(self) -> None:
        if self.broken:
            raise NativeError("-50002")
        self.holding.pass_by()

    def failed(self) -> None:
        if self.ballast is not None:
            self.ballast.unlink()
            self.ballast = None
            self.refused.set()


class WatchedModule(NativeModule):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def open(
        self, folder: Path, *, tensor_bytes: int, tensors: int, settings: Mapping[str, Any]
    ) -> NativeStore:
        native = super().open(folder, tensor_bytes=tensor_bytes, tensors=tensors, settings=settings)
        return WatchedNative(native, self._watch)


class UcmHarness(RawHarness):
    """A root of UCM's own inside a folder, which it removes at the end."""

    name = "ucm"
    capabilities = Capabilities(
        raw=True,
        limited=MAY_MOUNT,
        faults=True,
        hold=True,
        relief=MAY_MOUNT,
        restart=True,
        keeps=True,
        processes=True,
        zero_copy=True,
        flat=True,
        identity=IDENTITY_FIELDS,
    )
    requires = ("ucm",)
    distributions = ("hicache-ucm", "uc-manager-cuda-cu129")

    def __init__(self, folder: AbstractContextManager[Path]) -> None:
        self._stack = ExitStack()
        self._root = root = self._stack.enter_context(folder) / "root"
        root.mkdir()
        self._raw = RawUcm(root)
        self._watch = Watch()
        self._small: Path | None = None

    def make(self, config: HiCacheStorageConfig) -> UcmBackend:
        return self._watched(config, self._root)

    def make_own(self, config: HiCacheStorageConfig) -> UcmBackend:
        return UcmBackend(_rooted(config, self._root), {})

    @contextmanager
    def make_limited(
        self, config: HiCacheStorageConfig, wanted_bytes: int
    ) -> Iterator[tuple[UcmBackend, int]]:
        with small_tmpfs(wanted_bytes) as (folder, capacity_bytes):
            backend = self._watched(config, folder)
            self._small = folder
            try:
                yield backend, capacity_bytes
            finally:
                self._small = None
                backend.close()

    @contextmanager
    def relieve(self) -> Iterator[Event]:
        watch = self._watch
        if self._small is None:
            raise RuntimeError("no limited store is open")
        watch.refused.clear()
        watch.ballast = self._small / "ballast"
        fill(watch.ballast)
        try:
            yield watch.refused
        finally:
            watch.ballast = None

    @contextmanager
    def fault(self) -> Iterator[None]:
        """UCM refuses, and the root is gone, as where its file system was unmounted."""
        away = self._root.with_name(self._root.name + ".away")
        self._root.rename(away)
        self._watch.broken = True
        try:
            yield
        finally:
            self._watch.broken = False
            away.rename(self._root)

    def hold(self) -> AbstractContextManager[Event]:
        return self._watch.holding.hold()

    def elsewhere(self, config: HiCacheStorageConfig) -> ElsewhereSpec:
        return ElsewhereSpec(
            "hicache_ucm:UcmBackend", _rooted(config, self._root).extra_config or {}
        )

    def forget(self) -> None:
        for path in self._root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @property
    def raw(self) -> RawUcm:
        return self._raw

    def close(self) -> None:
        self._stack.close()

    def _watched(self, config: HiCacheStorageConfig, root: Path) -> UcmBackend:
        watch = self._watch

        class Watched(UcmBackend):
            def open_store(self, config: UcmConfig, storage_config: object) -> UcmStore:
                return UcmStore(WatchedModule(watch), config)

        return Watched(_rooted(config, root), {})


def _rooted(config: HiCacheStorageConfig, root: Path) -> HiCacheStorageConfig:
    # Few folders, as each test makes and removes them for each pool.
    ours = {"root": str(root), "data_dir_shard_bytes": 0}
    return with_extra(config, ours)


class TmpfsHarness(UcmHarness):
    name = "ucm on tmpfs"

    def __init__(self) -> None:
        super().__init__(tmpfs_folder())


class DiskHarness(UcmHarness):
    name = "ucm on disk"

    def __init__(self) -> None:
        super().__init__(disk_folder())


@contextmanager
def disk_folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="hicache-ucm-") as folder:
        yield Path(folder)


class TestTmpfs(BackendSuite):
    harness_type = TmpfsHarness


class TestDisk(BackendSuite):
    harness_type = DiskHarness
