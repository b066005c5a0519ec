"""Files as UCM lays them out, and the claims that keep two writers apart."""

from __future__ import annotations

import errno
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hicache_shared.errors import BackendUnavailableError
from hicache_ucm.folder import ABSENT, LOCK_FILE, Claims, Folder, check_root
from tests.filesystems import tmpfs_folder

KEYS = [bytes([i]) * 16 for i in range(4)]


def never() -> bool:
    return False


def block(folder: Folder, key: bytes, nbytes: int = 10) -> Path:
    path = Path(folder.blocks(key)[0])
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(nbytes))
    return path


def temporary(folder: Folder, key: bytes) -> Path:
    path = Path(folder.blocks(key)[0] + ".tmp")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"half")
    return path


@pytest.mark.parametrize("digits", [0, 1, 2, 3])
def test_sizes_are_of_the_files_and_absent_where_there_is_none(tmp_path: Path, digits: int) -> None:
    folder = Folder(tmp_path, digits)
    block(folder, KEYS[0], 7)
    block(folder, KEYS[2], 0)
    assert folder.sizes(b"".join(KEYS[:3])) == [7, ABSENT, 0]
    assert folder.sizes(b"") == []


def test_a_claim_excludes_every_other_writer_until_it_is_left(tmp_path: Path) -> None:
    lock = tmp_path / LOCK_FILE
    with Claims(lock) as mine:
        assert mine.claim(KEYS[0])
        assert mine.claim(KEYS[0]), "the same call may ask twice"
        with Claims(lock) as other:
            assert not other.claim(KEYS[0])
            assert other.claim(KEYS[1]), "another key is free"
            assert other.claim(KEYS[0][:6] + KEYS[1][6:]), "so is one that begins alike"
    with Claims(lock) as other:
        assert other.claim(KEYS[0])


def hold(lock: Path, key: bytes, held: Connection) -> None:
    with Claims(lock) as claims:
        held.send(claims.claim(key))
        held.recv()


def test_a_claim_holds_between_processes_and_dies_with_its_process(tmp_path: Path) -> None:
    lock = tmp_path / LOCK_FILE
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=hold, args=(lock, KEYS[0], theirs))
    process.start()
    try:
        assert ours.recv() is True
        with Claims(lock) as claims:
            assert not claims.claim(KEYS[0])
        process.kill()
        process.join()
        with Claims(lock) as claims:
            assert claims.claim(KEYS[0])
    finally:
        process.kill()
        process.join()


def test_temporary_files_go_unless_somebody_is_writing_them(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 2)
    kept = block(folder, KEYS[0])
    stale, busy = temporary(folder, KEYS[1]), temporary(folder, KEYS[2])
    foreign = busy.parent / "note.tmp"
    foreign.write_bytes(b"")
    with Claims(folder.lock) as writer:
        writer.claim(KEYS[2])
        assert folder.remove_stale(folder.lock, never) == 1
    assert [path.exists() for path in (kept, stale, busy, foreign)] == [True, False, True, True]
    assert folder.remove_stale(folder.lock, never) == 1
    assert not busy.exists()


def test_removing_all_leaves_what_is_no_block(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1)
    for key in KEYS[:3]:
        block(folder, key)
    temporary(folder, KEYS[3])
    (tmp_path / ".ucm_gc.members").mkdir()
    member = tmp_path / ".ucm_gc.members" / ("0" * 32)
    member.write_bytes(b"")
    foreign = tmp_path / "0" / "readme"
    foreign.write_bytes(b"")
    assert folder.remove_all() == 4
    assert folder.sizes(b"".join(KEYS)) == [ABSENT] * 4
    assert member.exists()
    assert foreign.exists()


def test_touching_makes_a_block_the_newest(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 2)
    old = block(folder, KEYS[0])
    os.utime(old, (1, 1))
    folder.touch(b"".join(KEYS[:2]))
    assert old.stat().st_mtime > 1


def test_a_root_that_is_missing_or_no_folder_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="make the folder"):
        check_root(tmp_path / "absent", locks=True)
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(BackendUnavailableError, match="is no folder"):
        check_root(file, locks=True)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EINVAL])
def test_a_root_without_locks_is_refused_unless_one_rank_has_it_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("hicache_ucm.folder.fcntl.fcntl", fail)
    with pytest.raises(BackendUnavailableError, match=r'no locks .*"shared": false'):
        check_root(tmp_path, locks=True)
    check_root(tmp_path, locks=False)


def test_a_lock_file_of_another_user_is_no_lack_of_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("hicache_ucm.folder.os.open", fail)
    with pytest.raises(BackendUnavailableError, match="writable for the user"):
        check_root(tmp_path, locks=True)


def test_a_root_on_disk_or_in_memory_is_taken(tmp_path: Path) -> None:
    check_root(tmp_path, locks=True)
    with tmpfs_folder() as folder:
        check_root(folder, locks=True)
