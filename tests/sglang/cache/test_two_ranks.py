"""Two tensor-parallel ranks restore the same prefix, one that is legal on both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.sglang.cache.pair import Outcome, Pair, Task, pair

PAGES = 4


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("ranks")) as both:
        yield both


def both(pages: int) -> list[Outcome]:
    return [Outcome(pages, pages, right=True)] * 2


@pytest.mark.parametrize("kind", ["mha", "swa"])
def test_both_ranks_restore_what_both_have(backend: dict[str, Any], ranks: Pair, kind: str) -> None:
    assert ranks.run(Task(backend, kind, PAGES)) == both(PAGES)


def test_a_page_that_one_rank_lacks_ends_the_prefix_on_both(
    backend: dict[str, Any], ranks: Pair
) -> None:
    assert ranks.run(Task(backend, "mha", PAGES, ({}, {"kv": {2}}))) == both(2)


def test_ranks_agree_on_a_prefix_that_is_legal_on_both_not_on_the_shorter_of_their_longest(
    backend: dict[str, Any], ranks: Pair
) -> None:
    """One can restore 1, 2 and 3 pages, the other 1, 2 and 4: three would lack a window."""
    assert ranks.run(Task(backend, "swa", PAGES, ({"swa": {3}}, {"swa": {2}}))) == both(2)


def test_pages_that_all_ranks_hold_alike_are_written_by_one_and_read_by_both(
    backend: dict[str, Any], ranks: Pair
) -> None:
    task = Task(backend, "deepseek-v4", PAGES, ({"deepseek_v4_c4": {2}}, {}))
    if backend["backend_name"] == "umbp":  # embedded, it is its rank's own
        with pytest.raises(RuntimeError, match="private to its rank"):
            ranks.run(task)
    else:
        assert ranks.run(task) == both(2)


@pytest.mark.parametrize("kind", ["mha", "swa"])
def test_ranks_agree_where_calls_of_each_fail_at_random(
    backend: dict[str, Any], ranks: Pair, kind: str
) -> None:
    for attempt in range(4):
        task = Task({**backend, "revision": f"{attempt}"}, kind, PAGES, fails=0.2)
        first, second = ranks.run(task)
        assert first == second
        assert first.right
