"""Run in a network namespace of its own: a master and two nodes of a distributed store.

The client of a master listens on all interfaces. Prints what was seen, as JSON.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
import time
from typing import Any

from hicache_shared.errors import ClearError
from hicache_umbp.client import quiet
from hicache_umbp.server import UmbpMaster
from hicache_umbp.store import UmbpStore
from tests.pools import TestPool, hashes
from tests.umbp.umbp_stores import exists, new_store

N = 8
SIOCSIFFLAGS = 0x8914
UP_AND_RUNNING = 0x41
WAIT_S = 60.0


def loopback_up() -> None:
    with socket.socket() as anything:
        fcntl.ioctl(anything, SIOCSIFFLAGS, struct.pack("16sh", b"lo", UP_AND_RUNNING))


def node(master: UmbpMaster, number: int) -> tuple[UmbpStore, list[TestPool]]:
    store, _ = new_store(
        {
            "master_address": master.address,
            "node_address": "127.0.0.1",
            "node_id": f"node{number}",
            "peer_service_port": 9600 + number,
            "io_engine_host": "",  # no RDMA device here
            "dram_capacity_bytes": "64mb",
        }
    )
    pools = [
        TestPool.make("hc1/dist", "kv", 2 * N, (4096,)),
        TestPool.make("hc1/dist", "mamba", 2 * N, (3000, 17)),
    ]
    store.open([pool.stored for pool in pools])
    for seed, pool in enumerate(pools):
        pool.arrays.fill(10 * number + seed)
    return store, pools


def clear(store: UmbpStore) -> str:
    try:
        store.clear("hc1/dist")
    except ClearError as error:
        return str(error)
    return ""


def until(true: Any) -> bool:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return False


def main() -> None:
    quiet()
    loopback_up()
    seen: dict[str, Any] = {}
    targets = list(range(N, 2 * N))
    with UmbpMaster(options={"UMBP_ROUTE_PUT_NODE_AFFINITY": "local"}) as master:
        (one, pools), (two, others) = node(master, 1), node(master, 2)
        asks = [pool.ask(hashes(N)) for pool in pools]
        whole = [[True] * N] * 2
        seen["put"] = one.put([pool.pages(hashes(N)) for pool in pools], 5.0)
        seen["own"] = exists(one, *asks) == whole
        seen["known to the other"] = until(lambda: exists(two, *asks) == whole)
        seen["get"] = one.get([pool.pages(hashes(N), targets) for pool in pools], 5.0)
        seen["exact"] = all(
            pool.arrays.contents(targets) == pool.arrays.contents(list(range(N))) for pool in pools
        )
        seen["get of the other"] = two.get([pool.pages(hashes(N), targets) for pool in others], 5.0)
        seen["clear"] = clear(one)
        master.kill()
        fresh = [pool.pages(hashes(N, 500)) for pool in pools]
        seen["dead"] = [one.put(fresh, 2.0), exists(one, *asks), one.healthy()]
        master.restart()
        good = [[0] * N] * 2
        seen["back"] = until(lambda: one.put(fresh, 2.0) == good)
        one.close()
        two.close()
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
