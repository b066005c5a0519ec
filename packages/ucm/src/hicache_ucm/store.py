"""``PageStore`` over UCM: a PosixStore a pool, all of them at work in one call."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache_shared.errors import BackendUnavailableError, ClearError
from hicache_shared.store import Caps, Code, KeyBatch, PageBatch, Presence, StoredPool
from hicache_ucm.client import NativeError, NativeModule
from hicache_ucm.config import UcmConfig
from hicache_ucm.folder import Folder, check_root
from hicache_ucm.health import Health
from hicache_ucm.keys import KEY_BYTES
from hicache_ucm.opening import Opener
from hicache_ucm.pool import Part, PoolStore, rounds
from hicache_ucm.reading import read
from hicache_ucm.writing import Writer

logger = logging.getLogger(__name__)

LOOKUP_KEYS = 256
"""Keys of one native lookup, which holds the GIL: 0.2 to 0.6 ms. More at once are no faster."""

FEW_KEYS = 128
"""Keys that are asked about at once for all pools: a second question costs 0.1 ms, as much."""

MOST_PARTS = 100
"""Parts that a page of unequal components is cut into; beyond it, copying is as fast."""

CLEAR_ROUNDS = 8


class UcmStore:
    """Pages in UCM, one block each.

    See :class:`hicache_shared.store.PageStore` for what holds of every method, save one: a
    call that is in a file system which hangs comes back when that does, however late, since
    until then a worker may write to the call's host pages. Other calls meanwhile answer
    "missing" at once.

    Raises:
        BackendUnavailableError: the root cannot be used.
    """

    caps = Caps(max_components=None, max_unequal_parts=MOST_PARTS, together=FEW_KEYS)

    def __init__(self, module: NativeModule, config: UcmConfig) -> None:
        self._config = config
        check_root(Path(config.root), locks=config.shared)
        self._opener = Opener(module, config)
        self._pools: dict[StoredPool, PoolStore] = {}
        self._closing = threading.Event()
        self._health = Health(config.root, config.deadline_s)
        self._private = None if config.shared else tempfile.TemporaryDirectory(prefix="hicache-")
        self._lock = None if self._private is None else Path(self._private.name) / "lock"
        self._writer = Writer(self._health, self._closing, private_lock=self._lock)
        self._cleaners: list[threading.Thread] = []

    def open(self, pools: Sequence[StoredPool]) -> None:
        """Open a native store for each pool, and clean up after dead writers.

        Raises:
            ConfigError, BackendUnavailableError: with what to change.
        """
        opened = self._opener.open(pools)
        self._pools = {**self._pools, **dict(zip(pools, opened, strict=True))}
        folders = {pool.folder.path: pool.folder for pool in opened}
        cleaner = threading.Thread(
            target=self._clean,
            args=(list(folders.values()),),
            name="hicache-ucm-clean",
            daemon=True,  # the interpreter waits for others before it closes what is open
        )
        self._cleaners.append(cleaner)
        cleaner.start()

    def register(self, pool: StoredPool) -> None:
        self.open([pool])

    def register_memory(self, address: int, nbytes: int) -> None:
        """Nothing to do: UCM reads and writes any memory."""

    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> Sequence[Presence]:
        """Whether each page has a block; one of another size is only noticed by a get."""
        until = time.monotonic() + deadline_s
        if self._health.hangs():
            return [np.zeros(len(ask.hashes), dtype=np.bool_) for ask in asks]
        with self._health.running():
            return [self._present(ask, until) for ask in asks]

    def get(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        return self._move(batches, deadline_s, lambda parts, _: read(parts, self._health))

    def put(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        return self._move(batches, deadline_s, self._writer.write)

    def clear(self, namespace: str) -> None:
        """Remove every page under ``namespace``, of pools that are not open here too.

        Raises:
            ClearError: a page cannot be removed, or pages keep coming.
        """
        home = Path(self._config.root) / namespace
        try:
            check_root(Path(self._config.root), locks=False)
        except BackendUnavailableError as error:
            raise ClearError(f"UCM could not clear {home}: {error}") from error
        try:
            for _ in range(CLEAR_ROUNDS):
                with os.scandir(home) as entries:
                    paths = [Path(entry.path) for entry in entries if entry.is_dir()]
                # UCM's own number of digits may differ in each; the walk does not need it.
                if not sum(Folder(path, 0).remove_all() for path in paths):
                    return
        except FileNotFoundError as error:
            if not home.exists():
                return  # nothing was ever stored
            raise ClearError(f"UCM could not clear {home}: {error}") from error
        except OSError as error:
            raise ClearError(f"UCM could not clear {home}: {error}; pages may remain") from error
        raise ClearError(
            f"{home} still had pages after {CLEAR_ROUNDS} removals; if another deployment of this "
            "namespace is writing, stop it, and clear again"
        )

    def healthy(self) -> bool:
        return self._health.good()

    def close(self) -> None:
        """End UCM's threads."""
        self._closing.set()
        for cleaner in self._cleaners:
            cleaner.join()
        for native in self._opener.natives():
            native.close()
        self._pools = {}
        if self._private is not None:
            self._private.cleanup()

    def _move(
        self,
        batches: Sequence[PageBatch],
        deadline_s: float,
        move: Callable[[list[Part], float], list[list[int]]],
    ) -> list[list[int]]:
        """Move batches in rounds, until the deadline; a code a page."""
        if self._health.hangs():
            return [[int(Code.UNAVAILABLE)] * len(batch.hashes) for batch in batches]
        until = time.monotonic() + deadline_s
        codes: list[list[int]] = [[] for _ in batches]
        pools = [self._pools[batch.pool] for batch in batches]
        for parts in rounds(pools, batches):
            if time.monotonic() >= until:
                break
            for answer, moved in zip(codes, move(parts, until), strict=True):
                answer += moved
        for answer, batch in zip(codes, batches, strict=True):
            answer += [int(Code.TIMEOUT)] * (len(batch.hashes) - len(answer))
        return codes

    def _present(self, ask: KeyBatch, until: float) -> npt.NDArray[np.bool_]:
        pool = self._pools[ask.pool]
        ids = pool.ids(ask.hashes)
        seen = np.zeros(len(ask.hashes), dtype=np.bool_)
        for start in range(0, len(seen), LOOKUP_KEYS):
            if time.monotonic() >= until:
                break
            some = ids[KEY_BYTES * start : KEY_BYTES * (start + LOOKUP_KEYS)]
            try:
                seen[start : start + LOOKUP_KEYS] = pool.native.lookup(some)
            except NativeError as error:
                self._health.saw("lookup", f"pool {pool.name!r}: {error}")
                return seen
        self._health.saw("lookup", None)
        return seen

    def _clean(self, folders: Sequence[Folder]) -> None:
        """Remove what writers that died have left; in a thread, since it reads whole folders."""
        for folder in folders:
            try:
                removed = folder.remove_stale(self._lock or folder.lock, self._closing.is_set)
            except OSError as error:
                logger.warning("UCM: %s was not cleaned of stale files: %s", folder.path, error)
                continue
            if removed:
                logger.info("UCM: %d stale temporary files removed in %s", removed, folder.path)
