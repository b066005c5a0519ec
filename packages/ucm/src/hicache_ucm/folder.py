"""The files of one pool, as UCM lays them out: what it does not tell or do itself.

A block is ``<folder>/<first digits>/<32 hex digits>``, written as ``<same>.tmp`` and renamed.
UCM neither checks a block's size, nor locks what it writes, nor removes a block on request.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from hicache_shared.errors import BackendUnavailableError
from hicache_ucm.keys import KEY_BYTES

ABSENT = -1

LOCK_FILE = ".hicache.lock"

TEMPORARY = ".tmp"

_NAME = re.compile(r"([0-9a-f]{32})(\.tmp)?")

_FLOCK = "hhqqi4x"
"""``struct flock`` on 64-bit Linux: type, whence, start, length, pid."""

_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)


class Folder:
    """One pool's folder. Thread-safe.

    Args:
        path: of the folder, which exists.
        digits: hex digits of a key that name the folder below it; UCM's
            ``data_dir_shard_bytes``.
    """

    def __init__(self, path: Path, digits: int) -> None:
        self.path = path
        self.lock = path / LOCK_FILE
        self._digits = digits

    def blocks(self, ids: bytes) -> list[str]:
        """Paths of blocks by their joined keys."""
        names, base, digits = ids.hex(), str(self.path), self._digits
        width = 2 * KEY_BYTES
        cut = [names[i : i + width] for i in range(0, len(names), width)]
        if not digits:
            return [f"{base}/data/{name}" for name in cut]
        return [f"{base}/{name[:digits]}/{name}" for name in cut]

    def sizes(self, ids: bytes) -> list[int]:
        """Bytes of each block, ``ABSENT`` where there is no such file. About 2 us a key."""
        return [_size(path) for path in self.blocks(ids)]

    def touch(self, ids: bytes) -> None:
        """Make blocks the newest, for UCM removes the oldest and reading does not count."""
        for path in self.blocks(ids):
            try:
                os.utime(path)
            except OSError:  # removed meanwhile, or not ours to touch: it stays as old as it was
                continue

    def free_bytes(self) -> int:
        """What the file system has left for files; 0 where it does not tell."""
        try:
            seen = os.statvfs(self.path)
        except OSError:
            return 0
        return seen.f_bavail * seen.f_frsize

    def remove_stale(self, lock: Path, stop: Callable[[], bool]) -> int:
        """Remove temporary files whose writer is gone; how many.

        Args:
            lock: where writers keep their claims.
            stop: asked between files; ends the search.

        Raises:
            OSError: the folder or the lock file cannot be read or written.
        """
        removed = 0
        for path in self._files():
            if stop():
                break
            name = os.path.basename(path)
            if name.endswith(TEMPORARY):
                with Claims(lock) as claims:  # one at a time: writers want these keys meanwhile
                    if claims.claim(bytes.fromhex(name.removesuffix(TEMPORARY))):
                        removed += _remove(path)
        return removed

    def remove_all(self) -> int:
        """Remove every block and temporary file; how many.

        Raises:
            OSError: one cannot be removed, or a folder cannot be read.
        """
        return sum(_remove(path) for path in self._files())

    def _files(self) -> Iterator[str]:
        """Paths of all blocks and temporary files, and of nothing else."""
        with os.scandir(self.path) as entries:
            folders = [e.path for e in entries if e.is_dir() and not e.name.startswith(".")]
        for folder in folders:
            with os.scandir(folder) as files:
                yield from [file.path for file in files if _NAME.fullmatch(file.name)]


class Claims:
    """What one call may write: locks on keys in a lock file, until it is left.

    UCM's writers of one key share one temporary file, so two at a time publish a mix of both.
    A claim is a lock on one byte of a file, at a place that the key gives: the kernel drops it
    when its process dies, and it holds between nodes where the file system's locks do. Locks
    belong to the opened file, so that threads of one process exclude each other too.

    Raises:
        OSError: the lock file cannot be opened.
    """

    def __init__(self, lock: Path) -> None:
        self._file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def claim(self, key: bytes) -> bool:
        """Whether the key may be written; False while another writes it.

        Raises:
            OSError: the file system has no locks.
        """
        place = int.from_bytes(key[:7])
        lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
        except OSError as error:
            if error.errno in _HELD_BY_ANOTHER:
                return False
            raise
        return True


def is_block(name: str) -> bool:
    """Whether a file of that name is a page, and no temporary file."""
    found = _NAME.fullmatch(name)
    return found is not None and found[2] is None


def check_root(root: Path, *, locks: bool) -> None:
    """That pages can be kept there.

    Raises:
        BackendUnavailableError: there is no such folder, it is read-only, or it has no locks.
    """
    try:
        is_folder = stat.S_ISDIR(os.stat(root).st_mode)
    except OSError as error:
        raise BackendUnavailableError(
            f"root {str(root)!r} cannot be used ({error.strerror}); make the folder, or mount "
            "what it is on. It is not made here, since that might fill the wrong disk"
        ) from error
    if not is_folder:
        raise BackendUnavailableError(f"root {str(root)!r} is no folder")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise BackendUnavailableError(
            f"root {str(root)!r} cannot be written to, and UCM finds no page on what it cannot "
            "write; make it writable, or mount it so"
        )
    if locks:
        _check_locks(root)


def _check_locks(root: Path) -> None:
    try:
        with Claims(root / LOCK_FILE) as claims:
            claims.claim(bytes(KEY_BYTES))
    except PermissionError as error:
        raise BackendUnavailableError(
            f"root {str(root)!r}: {LOCK_FILE} in it cannot be written ({error.strerror}); all that "
            "is in the root must be writable for the user that this runs as"
        ) from error
    except OSError as error:
        raise BackendUnavailableError(
            f"root {str(root)!r}: its file system gives no locks ({error.strerror}), so two "
            "processes could write one page at the same time; mount it with locks, or, if one "
            'rank alone uses this root, set "shared": false'
        ) from error


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # also where it cannot be looked at: then it cannot be read either
        return ABSENT


def _remove(path: str) -> bool:
    """Whether the file was there to remove."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
