"""What changes between two looks at a page, who holds it, and how often that is said."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from hicache_shared.store import Code
from hicache_ucm import folder
from hicache_ucm.folder import LOCK_FILE, TEMPORARY, Claims
from hicache_ucm.keys import block_ids
from hicache_ucm.store import UcmStore
from tests.pools import TestPool
from tests.ucm.ucm_stores import DEADLINE_S, block_of, exists

pytestmark = pytest.mark.backend("ucm")

OK, MISSING, FAILED = int(Code.OK), int(Code.MISSING), int(Code.FAILED)
KEYS = [sha256(bytes([page])).hexdigest() for page in range(8)]
"""Real ones: a claim is by the first bytes of a key."""
ROOT = Path(__file__).parents[2]


def put(store: UcmStore, *pools: TestPool, deadline_s: float = DEADLINE_S) -> list[list[int]]:
    return store.put([pool.pages(KEYS) for pool in pools], deadline_s)


def get(store: UcmStore, *pools: TestPool) -> list[list[int]]:
    return store.get([pool.pages(KEYS) for pool in pools], DEADLINE_S)


def key_of(pool: TestPool, page: int) -> bytes:
    return block_ids(pool.stored.digest, [KEYS[page]])


def look_before(monkeypatch: pytest.MonkeyPatch, *pools: TestPool) -> None:
    """Sizes are as they were when every page was there, whole."""
    sizes = {pool.stored.name: pool.stored.layout.page_bytes for pool in pools}
    monkeypatch.setattr(folder, "_size", lambda path: sizes[Path(path).parts[-3].split("_")[0]])


def test_pages_that_go_while_they_are_read_are_misses_and_the_others_whole(
    root: Path,
    store: UcmStore,
    pools: dict[str, TestPool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Removed by whoever makes room, or cut short; no fault of the file system."""
    put(store, *pools.values())
    look_before(monkeypatch, *pools.values())
    for pool in pools.values():
        block_of(root, pool, KEYS[0]).unlink()
        os.truncate(block_of(root, pool, KEYS[5]), 100)
        stored = [pool.arrays.page(i) for i in range(8)]
        pool.arrays.wipe()
        codes = [MISSING, *[OK] * 4, MISSING, OK, OK]
        assert get(store, pool) == [codes]
        for page, code in enumerate(codes):
            assert code != OK or pool.arrays.page(page) == stored[page]
        assert pool.arrays.gaps_untouched()
    assert store.healthy()
    assert not caplog.records


def test_a_page_that_cannot_be_read_is_said_once_until_all_can(
    root: Path,
    store: UcmStore,
    pools: dict[str, TestPool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Beside other pools that are well, before it and after it."""
    put(store, *pools.values())
    block = block_of(root, pools["indexer"], KEYS[2])
    kept = block.rename(block.with_name("kept"))
    block.mkdir()
    with monkeypatch.context() as patched:
        look_before(patched, *pools.values())
        for _ in range(3):
            codes = get(store, *pools.values())
            assert codes == [[OK] * 8, [OK, OK, FAILED, *[OK] * 5], [OK] * 8, [OK] * 8]
        assert not store.healthy()
    assert caplog.text.count("reading on") == 1
    block.rmdir()
    kept.rename(block)
    assert get(store, *pools.values()) == [[OK] * 8] * 4
    assert store.healthy()
    assert caplog.text.count("works again") == 1


def test_a_page_that_cannot_be_stored_is_said_once(
    root: Path, store: UcmStore, pools: dict[str, TestPool], caplog: pytest.LogCaptureFixture
) -> None:
    """UCM says that it is stored, and cannot give the file its name."""
    indexer = pools["indexer"]
    put(store, indexer)
    block = block_of(root, indexer, KEYS[2])
    block.unlink()
    block.mkdir()
    for turn in range(3):
        block_of(root, indexer, KEYS[turn + 4]).unlink()
        assert put(store, indexer) == [[OK, OK, FAILED, *[OK] * 5]]
    assert caplog.text.count("writing on") == 1
    assert "works again" not in caplog.text


def test_a_page_that_another_holds_is_not_written_until_it_lets_go(
    root: Path, store: UcmStore, pools: dict[str, TestPool]
) -> None:
    kv = pools["kv"]
    (home,) = root.glob("*/*/kv_*")
    with Claims(home / LOCK_FILE) as other:
        assert other.claim(key_of(kv, 3))
        codes = [*[OK] * 3, int(Code.TIMEOUT), *[OK] * 4]
        assert put(store, kv, deadline_s=0.1) == [codes]
        assert exists(store, kv.ask(KEYS)) == [[code == OK for code in codes]]
    assert put(store, kv) == [[OK] * 8]
    assert store.healthy()


def test_looking_for_stale_files_holds_up_no_writer_of_them(
    root: Path, store: UcmStore, pools: dict[str, TestPool]
) -> None:
    kv = pools["kv"]
    for cleaner in store._cleaners:
        cleaner.join()  # the store's own search would find the files first
    (home,) = root.glob("*/*/kv_*")
    own = folder.Folder(home, 2)
    for page in range(3):
        path = Path(own.blocks(key_of(kv, page))[0])
        path.with_name(path.name + TEMPORARY).write_bytes(b"half")
    answers = []

    def between_files() -> bool:
        answers.append(put(store, kv, deadline_s=0.1))
        return False

    own.remove_stale(own.lock, between_files)
    assert answers
    assert all(codes == [[OK] * 8] for codes in answers)


LEFT_OPEN = """
import sys, threading
from pathlib import Path
from hicache_shared.hostpool import build, preset
from hicache_shared.testing.harness import storage_config
from hicache_shared.testing.rank import register
from hicache_ucm import UcmBackend
from hicache_ucm.folder import Folder

def search(self, lock, stop):
    while not stop():
        threading.Event().wait(0.01)
    return 0

Folder.remove_stale = search
model = build(preset("mla"), pages=2, layout="page_first", layers_div=16)
backend = UcmBackend(storage_config(is_mla_model=True, extra={"root": sys.argv[1]}), {})
register(backend, model)
"""


def test_an_interpreter_that_ends_does_not_wait_for_the_search_of_stale_files(root: Path) -> None:
    """It joins threads before it closes the backends that are left open."""
    command = [sys.executable, "-c", LEFT_OPEN, str(root)]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode == 0
