"""SGLang's own failure injector between its controller and our backends, much in flight at once.

The injector delays each call at random, and answers some itself as a failed one. How much comes
back is chance; that it is right is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector

from tests.sglang.cache.serving import Launch, Rank, prompt, running

PROMPTS, PAGES = 4, 3
FAILS, DELAY_S = 0.15, 0.01
ROUNDS, MOST_ROUNDS = 3, 50
"""Few, and as many as it takes until something came back and something did not."""


@pytest.fixture
def injected() -> Iterator[None]:
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(FAILS),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(DELAY_S),
    ):
        yield


def prompts(rank: Rank, start: int) -> list[list[int]]:
    """Prompts that share nothing."""
    return [prompt(rank.device, PAGES, start=start + 10_000 * i) for i in range(PROMPTS)]


def written(rank: Rank, tokens: list[int]) -> list[dict[str, list[bytes]]]:
    """A prompt computed, and what the device has of its first pages, for each number of them."""
    slots = rank.compute(tokens)
    size = rank.device.page_size
    return [
        rank.device.read(rank.device.rows(slots[: pages * size])) for pages in range(1, PAGES + 1)
    ]


@pytest.mark.usefixtures("injected")
@pytest.mark.parametrize("kind", ["mha", "dsa", "swa", "deepseek-v4"])
def test_what_comes_back_under_faults_is_right(backend: dict[str, Any], kind: str) -> None:
    whole = short = 0
    with running(kind, Launch(backend)) as rank:
        assert isinstance(rank.backend, HiCacheStorageFailureInjector)
        for turn in range(MOST_ROUNDS):
            if turn >= ROUNDS and whole and short:
                break
            rank.device.fill(seed=turn)
            asked = prompts(rank, start=1_000_000 * (turn + 1))
            expected = [written(rank, tokens) for tokens in asked]
            rank.backed_up()

            rank.flush()
            requests = [rank.request(tokens) for tokens in asked]
            for request in requests:
                rank.start_prefetch(request)
            for request in requests:
                rank.end_prefetch(request)
            for tokens, pages in zip(asked, expected, strict=True):
                rank.load_back(tokens)
                found = rank.on_device(tokens)
                if found.tokens:
                    assert found.bytes == pages[found.tokens // rank.device.page_size - 1]
                whole += found.tokens == len(tokens)
                short += found.tokens < len(tokens)
            rank.flush()
    assert whole
    assert short


@pytest.mark.parametrize("kind", ["mha", "dsa", "swa", "deepseek-v4"])
def test_backups_and_prefetches_that_overlap_do_not_disturb_each_other(
    backend: dict[str, Any], kind: str
) -> None:
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(DELAY_S),
        running(kind, Launch(backend)) as rank,
    ):
        rank.device.fill(seed=1)
        first = prompts(rank, start=1_000_000)
        expected = [written(rank, tokens)[-1] for tokens in first]
        rank.backed_up()

        rank.flush()
        rank.device.fill(seed=2)
        requests = [rank.request(tokens) for tokens in first]
        for request in requests[:2]:
            rank.start_prefetch(request)
        second = prompts(rank, start=2_000_000)[:2]
        later = [written(rank, tokens)[-1] for tokens in second]  # they are backed up meanwhile
        for request in requests[2:]:
            rank.start_prefetch(request)
        for request, tokens in zip(requests, first, strict=True):
            assert rank.end_prefetch(request) == len(tokens)
        rank.backed_up()
        for tokens, pages in zip(second, later, strict=True):
            assert rank.on_device(tokens).bytes == pages

        rank.flush()
        for tokens, pages in zip([*first, *second], [*expected, *later], strict=True):
            assert rank.fetch(tokens) == len(tokens)
            assert rank.on_device(tokens).bytes == pages
            rank.flush()
