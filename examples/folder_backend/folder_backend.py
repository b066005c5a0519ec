"""A HiCache backend that keeps each page as a file in a folder."""

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from hicache_shared.backend import HiCacheBackend
from hicache_shared.config import CommonConfig, setting
from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.store import Caps, Code, KeyBatch, PageBatch, PageStore, parts_of


class FolderStore(PageStore):
    caps = Caps(max_components=None)

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[list[bool]]:
        return [[self._file(ask.pool.prefix, key).exists() for key in ask.hashes] for ask in asks]

    def put(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        return [
            [write(self._file(batch.pool.prefix, key), parts) for key, parts in parts_of(batch)]
            for batch in batches
        ]

    def get(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        return [
            [read(self._file(batch.pool.prefix, key), parts) for key, parts in parts_of(batch)]
            for batch in batches
        ]

    def clear(self, namespace: str) -> None:
        folder = self._file(namespace)
        if folder.exists():
            away = folder.rename(self._file(f"cleared-{uuid4().hex}"))
            shutil.rmtree(away)

    def _file(self, *names: str) -> Path:
        return Path(self._folder, *names)


def write(file: Path, parts: list[memoryview]) -> Code:
    if file.exists():
        return Code.OK
    temporary = file.with_suffix(f".{uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(b"".join(parts))
        temporary.rename(file)
    except OSError as error:
        return Code.NO_SPACE if error.errno == errno.ENOSPC else Code.FAILED
    return Code.OK


def read(file: Path, parts: list[memoryview]) -> Code:
    try:
        with file.open("rb", buffering=0) as source:
            if os.fstat(source.fileno()).st_size != sum(map(len, parts)):
                return Code.WRONG_SIZE
            moved = [source.readinto(part) == len(part) for part in parts]
    except FileNotFoundError:
        return Code.MISSING
    except OSError:
        return Code.FAILED
    return Code.OK if all(moved) else Code.FAILED


class FolderConfig(CommonConfig):
    folder: str = setting(env="FOLDER_BACKEND", example="/mnt/kv", description="Where pages go.")


class FolderBackend(HiCacheBackend):
    name = "folder"
    config_type = FolderConfig

    def open_store(self, config: FolderConfig, storage_config: HiCacheStorageConfig) -> FolderStore:
        return FolderStore(config.folder)
