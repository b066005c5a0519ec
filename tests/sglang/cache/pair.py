"""Two ranks of one tensor-parallel model, a process each, that agree over gloo on loopback."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.sglang import stand_ins

RANKS = 2
PATIENCE_S = 300
"""Importing SGLang twice at once takes a while."""


@dataclass(frozen=True)
class Task:
    """A prompt's trip, by both ranks at once.

    Attributes:
        backend: extra config.
        kind: of model.
        pages: of the prompt.
        lost: by rank and pool, pages that the rank's store does not take.
        fails: share of the calls that SGLang's injector fails, on each rank for itself.
    """

    backend: dict[str, Any]
    kind: str
    pages: int
    lost: tuple[dict[str, set[int]], dict[str, set[int]]] = ({}, {})
    fails: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Of one rank.

    Attributes:
        fetched: pages that came from storage to the host.
        loaded: pages that came to the device.
        right: whether the bytes of those are the ones written.
    """

    fetched: int
    loaded: int
    right: bool


class Pair:
    """The two processes. A task goes to both, and each answers an outcome."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            arguments = (rank, folder / "rendezvous", theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that its end is seen here
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, task: Task) -> list[Outcome]:
        """Both outcomes, in the order of the ranks.

        Raises:
            RuntimeError: a rank failed; its traceback.
            TimeoutError: a rank does not answer.
        """
        for connection in self._connections:
            connection.send(task)
        answers = [_answer_of(connection) for connection in self._connections]
        failures = [answer for answer in answers if isinstance(answer, str)]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [answer for answer in answers if isinstance(answer, Outcome)]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()


def _answer_of(connection: Connection) -> Outcome | str:
    if not connection.poll(PATIENCE_S):
        raise TimeoutError("a rank does not answer")
    answer: Outcome | str = connection.recv()
    return answer


@contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    both = Pair(folder)
    try:
        yield both
    finally:
        both.close()


def serve(rank: int, rendezvous: Path, connection: Connection) -> None:
    """A rank's process: answer tasks until the other end is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    stand_ins.install()
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS
    )
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(_answer(task, rank))


def _answer(task: Task, rank: int) -> Outcome | str:
    import traceback

    try:
        return _trip(task, rank)
    except Exception:  # noqa: BLE001  goes to the test as it is
        return traceback.format_exc()


def _trip(task: Task, number: int) -> Outcome:
    import torch.distributed
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_parallel

    from tests.sglang.cache.serving import Launch, Rank, prompt

    fails = task.fails or None
    with (
        get_parallel().override(tp_rank=number, pp_rank=0),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(fails),
    ):
        rank = Rank(task.kind, Launch(task.backend, ranks=RANKS), torch.distributed.group.WORLD)
        lose(rank.backend, task.lost[number])
        device, size = rank.device, rank.device.page_size
        replicated = rank.cache.cache_controller.storage_config.is_mla_model
        device.fill(seed=0 if replicated else number)
        tokens = prompt(device, task.pages)
        slots = rank.compute(tokens)
        written = [
            device.read(device.rows(slots[: pages * size])) for pages in range(1, task.pages + 1)
        ]
        rank.backed_up()

        # Else a rank that need not write asks before the other one has.
        torch.distributed.barrier()
        rank.flush()
        device.allocate(size)
        fetched = rank.fetch(tokens) // size
        found = rank.on_device(tokens)
        loaded = found.tokens // size
        right = not loaded or found.bytes == written[loaded - 1]
        rank.close()
        return Outcome(fetched, loaded, right)


def lose(backend: Any, lost: dict[str, set[int]]) -> None:
    """Let a backend refuse some pages of each pool, by their number since the launch."""
    set_v1, set_v2, taken = backend.batch_set_v1, backend.batch_set_v2, 0

    def kept(name: str, keys: Sequence[str]) -> list[int]:
        refused = lost.get(name, set())
        return [i for i in range(len(keys)) if taken + i not in refused]

    def batch_set_v1(keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        nonlocal taken
        chosen = kept("kv", keys)
        slots = host_indices.reshape(len(keys), -1)[chosen].reshape(-1)
        stored = set_v1([keys[i] for i in chosen], slots, extra_info)
        taken += len(keys)  # the KV of a node is set after its sidecars
        return _spread(stored, chosen, len(keys))

    def batch_set_v2(transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        chosen = [kept(str(transfer.name), transfer.keys) for transfer in transfers]
        fewer = [
            replace(
                transfer,
                keys=[transfer.keys[i] for i in pages],
                host_indices=transfer.host_indices.reshape(len(transfer.keys), -1)[pages].flatten(),
            )
            for transfer, pages in zip(transfers, chosen, strict=True)
        ]
        stored = set_v2(fewer, extra_info)
        return {
            transfer.name: _spread(stored[transfer.name], pages, len(transfer.keys))
            for transfer, pages in zip(transfers, chosen, strict=True)
        }

    backend.batch_set_v1, backend.batch_set_v2 = batch_set_v1, batch_set_v2


def _spread(stored: Sequence[bool], chosen: Sequence[int], count: int) -> list[bool]:
    """Answers about the chosen of so many pages; False about the others."""
    answers = dict(zip(chosen, stored, strict=True))
    return [answers.get(i, False) for i in range(count)]
