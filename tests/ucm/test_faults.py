"""What goes wrong under a store: each has the right answer, no exception, and an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from hicache_shared.errors import BackendUnavailableError, ClearError
from hicache_shared.store import Code
from hicache_ucm import folder
from hicache_ucm.folder import Folder
from hicache_ucm.store import UcmStore
from tests.filesystems import read_only, small_tmpfs
from tests.pools import TestPool, hashes
from tests.ucm.ucm_stores import DEADLINE_S, NAMESPACE, block_of, exists, make_pools, opened

pytestmark = [pytest.mark.backend("ucm"), pytest.mark.faults]

OK = int(Code.OK)
KEYS = hashes(8)
WAIT_S = 30.0
"""For events that come at once unless the code is broken."""

ROOT = Path(__file__).parents[2]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")


def put(store: UcmStore, pool: TestPool, keys: list[str] = KEYS) -> list[int]:
    return store.put([pool.pages(keys)], DEADLINE_S)[0]


def get(store: UcmStore, pool: TestPool, keys: list[str] = KEYS) -> list[int]:
    return store.get([pool.pages(keys)], DEADLINE_S)[0]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


# -- disks -----------------------------------------------------------------------------------


@needs_root
def test_a_full_disk_takes_what_fits_and_says_what_it_took() -> None:
    with small_tmpfs(1 << 20) as (folder, capacity_bytes):
        pool = TestPool.make(NAMESPACE, "kv", 16, (100_000,))
        pool.arrays.fill(1)
        store = opened(folder)
        store.open([pool.stored])
        keys = hashes(16)
        try:
            codes = put(store, pool, keys)
            assert set(codes) == {OK, int(Code.NO_SPACE)}
            taken = [i for i, code in enumerate(codes) if code == OK]
            assert len(taken) >= capacity_bytes // 100_000 - 2
            assert exists(store, pool.ask(keys)) == [[i in taken for i in range(16)]]
            stored = [pool.arrays.page(i) for i in range(16)]
            pool.arrays.wipe()
            assert [i for i, code in enumerate(get(store, pool, keys)) if code == OK] == taken
            assert [pool.arrays.page(i) for i in taken] == [stored[i] for i in taken]
            assert not list(folder.rglob("*.tmp"))
            assert not store.healthy()
            block_of(folder, pool, keys[taken[0]]).unlink()
            (missing, *_) = (i for i in range(16) if i not in taken)
            assert put(store, pool, [keys[missing]]) == [OK], "it takes pages when there is room"
            assert store.healthy()
        finally:
            store.close()


@needs_root
def test_a_root_that_turns_read_only_misses_and_stores_nothing() -> None:
    with small_tmpfs(1 << 22) as (folder, _):
        pool = TestPool.make(NAMESPACE, "kv", 16, (4096,))
        store = opened(folder)
        store.open([pool.stored])
        try:
            assert put(store, pool, KEYS[:4]) == [OK] * 4
            with read_only(folder):
                assert put(store, pool, KEYS[4:]) == [int(Code.FAILED)] * 4
                assert exists(store, pool.ask(KEYS)) == [[False] * 8], "UCM's own answer"
                with pytest.raises(ClearError, match="cannot be written"):
                    store.clear(NAMESPACE)
                with pytest.raises(BackendUnavailableError, match="cannot be written"):
                    opened(folder)
            assert exists(store, pool.ask(KEYS)) == [[True] * 4 + [False] * 4]
            assert put(store, pool) == [OK] * 8
        finally:
            store.close()


def test_a_root_that_goes_away_misses_and_clear_says_that_it_failed(
    root: Path, store: UcmStore, pools: dict[str, TestPool]
) -> None:
    kv = pools["kv"]
    put(store, kv)
    away = root.rename(root.with_name("away"))
    assert get(store, kv) == [int(Code.MISSING)] * 8
    assert put(store, kv) == [int(Code.FAILED)] * 8
    assert exists(store, kv.ask(KEYS)) == [[False] * 8]
    with pytest.raises(ClearError, match="root"):
        store.clear(NAMESPACE)
    away.rename(root)
    assert get(store, kv) == [OK] * 8


# -- devices that hang -------------------------------------------------------------------------


@contextmanager
def hanging_block(root: Path, pool: TestPool, key: str) -> Iterator[Callable[[], None]]:
    """A pipe in place of a block: opening it to read waits. Gives what ends that."""
    block = block_of(root, pool, key)
    page, pipe = block.read_bytes(), block.with_name("pipe")
    block.unlink()
    os.mkfifo(block)

    def release() -> None:
        if not pipe.exists():
            block.rename(pipe)
            block.write_bytes(page)
            pipe.open("wb").close()

    try:
        yield release
    finally:
        release()


def test_a_call_in_a_device_that_hangs_waits_and_others_miss_at_once(
    root: Path,
    pools: dict[str, TestPool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its worker may write to its host pages at any time, so they are not given back."""
    kv, indexer = pools["kv"], pools["indexer"]
    store = opened(root, deadline_s=0.2)
    store.open([kv.stored, indexer.stored])
    put(store, kv)
    put(store, indexer)
    # The size of a pipe is 0, where a file's of a device that hangs may be known.
    monkeypatch.setattr(folder, "_size", lambda path: 4096 if "kv_" in path else 1000)
    with ThreadPoolExecutor(1) as threads, hanging_block(root, kv, KEYS[3]) as release:
        held = threads.submit(store.get, [kv.pages(KEYS)], 0.2)
        until(lambda: not store.healthy())
        assert get(store, indexer) == [int(Code.UNAVAILABLE)] * 8
        assert put(store, indexer, hashes(16)) == [int(Code.UNAVAILABLE)] * 16
        assert exists(store, indexer.ask(KEYS)) == [[False] * 8]
        assert not held.done()
        release()
        (codes,) = held.result(WAIT_S)
    assert codes == [OK] * 8
    until(lambda: get(store, indexer) == [OK] * 8)
    assert "does not come back" in caplog.text
    assert "comes back" in caplog.text
    store.close()


def test_a_device_that_hangs_while_pages_are_made_the_newest_is_noticed(
    root: Path, pools: dict[str, TestPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = pools["kv"]
    store = opened(root, deadline_s=0.05, capacity="2gb")
    store.open([kv.stored])
    assert put(store, kv) == [OK] * 8
    monkeypatch.setattr(Folder, "touch", lambda *_: until(lambda: not store.healthy()))
    assert get(store, kv) == [OK] * 8
    assert store.healthy()
    store.close()


# -- processes ---------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from tests.pools import hashes
from tests.ucm.ucm_stores import make_pools, opened

root, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
pools = make_pools()
for pool in pools.values():
    pool.arrays.fill(seed)
store = opened(root)
store.open([pool.stored for pool in pools.values()])
print("ready", flush=True)
sys.stdin.readline()
for turn in range(count):
    keys = hashes(16, start=16 * turn)
    codes = store.put([pool.pages(keys) for pool in pools.values()], 5)
    if any(map(any, codes)):
        sys.exit(f"turn {turn}: {codes}")
    print("turn", turn, flush=True)
store.close()
"""


def writer(root: Path, seed: int, turns: int) -> subprocess.Popen[str]:
    """A process that stores 16 pages of every pool a turn, when told to."""
    environ = {**os.environ, "UCM_LOG_LEVEL": "error", "UCM_LOG_TO_FILE": "false"}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(seed), str(turns)],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", line
    return process


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_two_processes_that_store_the_same_pages_publish_no_mix(root: Path) -> None:
    turns = 30
    running = [writer(root, seed, turns) for seed in (101, 102)]
    for process in running:
        start(process)
    for process in running:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
    for pool, images in images_of(101, 102):
        for turn in range(turns):
            for page, key in enumerate(hashes(16, start=16 * turn)):
                written = block_of(root, pool, key).read_bytes()
                assert written in [image[page] for image in images]


def images_of(*seeds: int) -> list[tuple[TestPool, list[list[bytes]]]]:
    """Each pool, and its pages as they are under each seed."""
    found = []
    for pool in make_pools().values():
        images = []
        for seed in seeds:
            pool.arrays.fill(seed)
            images.append([pool.arrays.page(page) for page in range(16)])
        found.append((pool, images))
    return found


def test_a_writer_that_is_killed_leaves_whole_pages_or_none(
    root: Path, pools: dict[str, TestPool]
) -> None:
    for round_ in range(5):
        process = writer(root, 103, 10_000)
        start(process)
        assert process.stdout is not None
        for _ in range(3 + round_):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate()
    blocks = [path for path in root.rglob("*/*/*") if path.is_file() and len(path.name) == 32]
    sizes = {
        "kv_4096x1": 4096,
        "indexer_1000x1": 1000,
        "layers_512x3": 1536,
        "mamba_200x19": 3800,
    }
    for block in blocks:
        assert block.stat().st_size == sizes[block.parents[1].name]
    store = opened(root)
    store.open([pool.stored for pool in pools.values()])
    for cleaner in store._cleaners:
        cleaner.join()
    assert not list(root.rglob("*.tmp"))
    try:
        for pool, (image,) in images_of(103):
            (name,) = [p for p in pools if p == pool.stored.name]
            codes = get(store, pools[name], hashes(16))
            assert codes == [OK] * 16, "stored before the kill"
            assert [pools[name].arrays.page(i) for i in range(16)] == image
            assert put(store, pools[name], hashes(16, start=10**6)) == [OK] * 16
    finally:
        store.close()
