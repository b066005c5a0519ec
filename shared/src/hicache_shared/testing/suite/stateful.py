"""The part of the suite whose programs hypothesis writes, held to a model of the store.

The model is a dictionary of the bytes that each page was stored with, and the definitions of
:mod:`hicache_shared.testing.oracle`; it asks nothing of the backend under test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache_shared.contract import PoolTransferResult
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.oracle import restorable_prefixes
from hicache_shared.testing.page_bytes import PageBytes
from hicache_shared.testing.rank import KV, MLA_MAMBA, Rank, chain
from hicache_shared.testing.suite.calls import ONE_LAYER
from hicache_shared.testing.suite.fixtures import SuiteFixtures
from hicache_shared.testing.suite.forms import assert_memory

MODELS = ("mla", "swa", "deepseek-v4-flash", MLA_MAMBA)
"""Replicated and alone; sharded with a window; many pools on a logical anchor; of both kinds."""

LENGTH = 6
"""Pages of the one chain that everything is stored of."""

PAGES = 8
"""Host pages of every pool."""

DEPLOYMENTS = ("a", "b")
RANKS = 2
REPLICATED = -1
"""The shard of a page that all ranks hold alike."""


class Page(NamedTuple):
    """A page of one pool, as it has to be told from every other.

    Attributes:
        deployment: one of :data:`DEPLOYMENTS`.
        shard: the rank whose bytes it holds, or :data:`REPLICATED`.
        pool: the pool's name.
        number: of the page in the chain.
    """

    deployment: str
    shard: int
    pool: str
    number: int


class Who(NamedTuple):
    """A rank of a deployment."""

    deployment: str
    tp_rank: int


WHO = st.builds(Who, st.sampled_from(DEPLOYMENTS), st.integers(0, RANKS - 1))
SLOT = st.integers(0, PAGES - 1)
SPAN = st.integers(0, LENGTH - 1).flatmap(
    lambda first: st.integers(first + 1, LENGTH).map(lambda end: range(first, end))
)


class StoreMachine(RuleBasedStateMachine):
    """Ranks of two deployments on one store, in any order of calls, losses and restarts.

    Args:
        harness: makes the backends.
        model: the name of their model.
    """

    def __init__(self, harness: Harness, model: str) -> None:
        super().__init__()
        self._harness = harness
        self._model = model
        self._salt = uuid4().hex[:8]
        self._hashes = chain(LENGTH, self._salt)
        self._ranks: dict[Who, Rank] = {}
        self._closed: list[Rank] = []
        """They keep their memory, since a client that others share may remember it."""
        self._held: dict[Page, bytes] = {}
        """What may be served; where the store keeps what it has, also what must be."""
        self._damaged: set[Page] = set()
        """What is found to be corrupt when it is loaded, and may count as there before."""
        self._objects: dict[Page, list[str]] = {}
        """Names of a page's objects behind the contract, where they could be told."""
        self._clears: Counter[str] = Counter()
        self._loads = 0

    # -- what SGLang does ------------------------------------------------------------------

    @rule(who=WHO, span=SPAN, slot=SLOT)
    def store(self, who: Who, span: range, slot: int) -> None:
        """Store pages of the chain, of every pool that this rank writes."""
        self._store_all(who, span, slot)

    def _store_all(self, who: Who, span: range, slot: int) -> None:
        rank, slots = self._rank(who), slots_from(slot, span)
        names = self._written_by(who, rank)
        pages = {name: [self._page(who, rank, name, number) for number in span] for name in names}
        for name in names:
            for page, place in zip(pages[name], slots, strict=True):
                rank.put_page(name, place, self._bytes_of(page, rank))
        memory = rank.image()
        for name in names:
            self._store(rank, name, pages[name], slots)
        if KV not in rank.pools:
            self._store_anchor(rank, span, slots)
        assert_memory(rank, memory)

    @rule(who=WHO, number=st.integers(0, LENGTH - 1), slot=SLOT)
    def store_one(self, who: Who, number: int, slot: int) -> None:
        """Store one page: its objects become known, so that they can be lost."""
        self._store_all(who, range(number, number + 1), slot)

    @rule(who=WHO, span=SPAN, slot=SLOT)
    def load(self, who: Who, span: range, slot: int) -> None:
        """Load pages of the chain, of every pool, whether or not they are there."""
        self._load_all(who, span, slot)

    def _load_all(self, who: Who, span: range, slot: int) -> None:
        rank = self._rank(who)
        missed = self._load(who, rank, {name: list(span) for name in rank.pools}, slot)
        if self._harness.capabilities.keeps:
            gone = [page for pages in missed.values() for page in pages if page in self._held]
            assert not gone, f"stored and not lost, and yet a miss: {gone}"

    @rule(who=WHO, count=st.integers(1, LENGTH), slot=SLOT)
    def ask(self, who: Who, count: int, slot: int) -> None:
        """Ask for the prefixes that can be restored, and restore all of them."""
        rank = self._rank(who)
        reported = self._ask(rank, count)
        self._assert_legal(who, rank, count, reported)
        if self._harness.capabilities.keeps:
            least = self._legal(who, rank, count, set(self._held))
            assert set(least) <= set(reported), f"prefixes {reported} reported of {least}"
        needed = {
            name: sorted({number for end in reported for number in window(rank, name, end)})
            for name in rank.pools
        }
        for name, missed in self._load(who, rank, needed, slot).items():
            self._missed_after_a_hit(rank, name, count, missed)

    @rule(who=WHO, count=st.integers(1, LENGTH))
    def ask_for_kv(self, who: Who, count: int) -> None:
        """Ask for the leading run of KV alone."""
        rank = self._rank(who)
        hit = rank.backend.batch_exists(self._hashes[:count])
        most = self._run_of_kv(who, rank, count, self._held.keys() | self._damaged)
        assert 0 <= hit <= most, f"{hit} pages of KV reported, {most} stored"
        if self._harness.capabilities.keeps:
            least = self._run_of_kv(who, rank, count, set(self._held))
            assert hit >= least, f"{hit} pages of KV reported, {least} stored"

    @rule(who=WHO)
    def clear(self, who: Who) -> None:
        """Clear a deployment; pages that it stores from now on have other bytes."""
        self._rank(who).backend.clear()
        self._clears[who.deployment] += 1
        for page in self._held.keys() | self._damaged:
            if page.deployment == who.deployment:
                self._is_gone(page)
        self._load_everywhere()

    @precondition(lambda self: self._ranks)
    @rule(choice=st.integers(0, len(DEPLOYMENTS) * RANKS - 1), slot=SLOT)
    def close(self, choice: int, slot: int) -> None:
        """Close one rank, which then never answers wrongly; it is made anew when used.

        SGLang makes no call then, so one may also be an error; another test is about that.
        """
        who = sorted(self._ranks)[choice % len(self._ranks)]
        rank = self._ranks.pop(who)
        self._closed.append(rank)
        rank.backend.close()
        try:
            self._load(who, rank, {name: list(range(LENGTH)) for name in rank.pools}, slot)
            self._assert_legal(who, rank, LENGTH, self._ask(rank, LENGTH))
        except AssertionError:
            raise
        except Exception as error:  # noqa: BLE001 - which errors a backend has, it says itself
            note(f"after close: {error!r}")

    # -- what befalls the store --------------------------------------------------------------

    @precondition(lambda self: self._harness.capabilities.restart and len(self._ranks) > 1)
    @rule()
    def restart(self) -> None:
        """End every engine and let go of the client; what was stored stays."""
        self._close_all()
        self._harness.restart()

    @precondition(lambda self: self._objects)
    @rule(choice=st.integers(0, 63))
    def evict(self, choice: int) -> None:
        """Take a page away, of all pools of its deployment."""
        chosen = self._known(choice)
        for page in sorted(self._objects):
            if (page.deployment, page.number) == (chosen.deployment, chosen.number):
                self._lose(page, self._objects[page])
        self._load_everywhere()

    @precondition(lambda self: self._objects)
    @rule(choice=st.integers(0, 63))
    def drop_one_object(self, choice: int) -> None:
        """Take one object of one page of one pool away."""
        page = self._known(choice)
        self._lose(page, self._objects[page][:1])
        self._load_everywhere()

    @precondition(lambda self: self._harness.capabilities.checksums and self._objects)
    @rule(choice=st.integers(0, 63))
    def corrupt(self, choice: int) -> None:
        """Change one byte of a stored page."""
        page = self._known(choice)
        note(f"corrupted: {page}")
        self._harness.raw_corrupt(self._objects[page][0])
        self._is_gone(page)
        self._damaged.add(page)
        self._load_everywhere()

    def _load_everywhere(self) -> None:
        """Every rank there is finds what is left, and nothing else."""
        for who in sorted(self._ranks):
            self._load_all(who, range(LENGTH), 0)

    def teardown(self) -> None:
        self._close_all()
        self._closed.clear()
        self._harness.forget()

    # -- one call and its answers --------------------------------------------------------------

    def _store(self, rank: Rank, name: str, pages: list[Page], slots: list[int]) -> None:
        absent = [page for page in pages if page not in self._held]
        tell = self._harness.capabilities.raw and len(absent) == 1
        before = set(self._harness.raw_keys()) if tell else set()
        answers = rank.set(name, [self._hashes[page.number] for page in pages], slots)
        assert len(answers) == len(pages), "one answer a key"
        self._harness.settle()
        if self._harness.capabilities.keeps:
            assert all(answers), f"pool {name}: set answered {answers}"
        self._damaged -= set(pages)
        # One that was answered False may be there all the same.
        self._held.update((page, self._bytes_of(page, rank)) for page in pages)
        if tell and (new := sorted(set(self._harness.raw_keys()) - before)):
            self._objects[absent[0]] = new

    def _store_anchor(self, rank: Rank, span: range, slots: list[int]) -> None:
        """Store the KV of a logical anchor, which has no bytes, as SGLang does."""
        answers = rank.set(KV, [self._hashes[number] for number in span], slots)
        assert len(answers) == len(span), "one answer a key"

    def _load(
        self, who: Who, rank: Rank, wanted: dict[str, list[int]], slot: int
    ) -> dict[str, list[Page]]:
        """Load pages of some pools, by their numbers; those of each pool that were a miss."""
        self._loads += 1
        kept = {name: bytes([self._loads % 256]) * rank.page_bytes(name) for name in wanted}
        slots = {name: slots_from(slot, numbers) for name, numbers in wanted.items()}
        for name, places in slots.items():
            for place in places:
                rank.put_page(name, place, kept[name])
        memory = rank.image()
        missed = {}
        for name, numbers in wanted.items():
            pages = [self._page(who, rank, name, number) for number in numbers]
            answers = rank.get(name, [self._hashes[number] for number in numbers], slots[name])
            assert len(answers) == len(pages), "one answer a key"
            for page, place, answer in zip(pages, slots[name], answers, strict=True):
                if answer:
                    self._assert_right(page, rank.page(name, place))
                rank.put_page(name, place, kept[name])
            missed[name] = [page for page, came in zip(pages, answers, strict=True) if not came]
        assert_memory(rank, memory)
        return missed

    def _assert_right(self, page: Page, value: bytes) -> None:
        is_stored, is_same = page in self._held, self._held.get(page) == value
        assert is_stored, f"True for what is not stored: {page}"
        assert is_same, f"True with other bytes: {page}"

    def _ask(self, rank: Rank, count: int) -> list[int]:
        """The prefixes that a hit query reports, in pages."""
        result = rank.backend.batch_exists_v2(self._hashes[:count], rank.questions())
        reported = reported_prefixes(result)
        assert result.kv_hit_pages == max(reported, default=0), f"{result}"
        return reported

    def _missed_after_a_hit(self, rank: Rank, name: str, count: int, missed: list[Page]) -> None:
        """A store may evict between a query and a get, but then says so when asked again."""
        numbers = {page.number for page in missed if page not in self._damaged}
        if not numbers:
            return
        still = [end for end in self._ask(rank, count) if numbers & set(window(rank, name, end))]
        assert not still, f"prefixes {still} are reported and pages {missed} do not come"

    # -- the model -----------------------------------------------------------------------------

    def _page(self, who: Who, rank: Rank, name: str, number: int) -> Page:
        shard = REPLICATED if is_replicated(rank, name) else who.tp_rank
        return Page(who.deployment, shard, name, number)

    def _bytes_of(self, page: Page, rank: Rank) -> bytes:
        """What a page holds: the same for every rank that has it, other after a clear."""
        if page not in self._held:
            names = f"{page}/{self._clears[page.deployment]}".encode()
            return PageBytes(np.random.default_rng(list(names)).bytes(rank.page_bytes(page.pool)))
        return self._held[page]

    def _assert_legal(self, who: Who, rank: Rank, count: int, reported: list[int]) -> None:
        """No prefix is reported of which a page is not there."""
        most = self._legal(who, rank, count, self._held.keys() | self._damaged)
        assert set(reported) <= set(most), f"prefixes {reported} reported of {most}"

    def _legal(self, who: Who, rank: Rank, count: int, there: set[Page]) -> list[int]:
        """The prefixes that can be restored where these pages are there."""
        present = {
            name: {n for n in range(count) if self._page(who, rank, name, n) in there}
            for name in rank.pools
        }
        return restorable_prefixes(count, present, rank.windows)

    def _run_of_kv(self, who: Who, rank: Rank, count: int, there: set[Page]) -> int:
        """The leading run of KV where these pages are there; 0 for a logical anchor."""
        if KV not in rank.pools:
            return 0
        absent = [n for n in range(count) if self._page(who, rank, KV, n) not in there]
        return min(absent, default=count)

    def _known(self, choice: int) -> Page:
        """A page whose objects are known."""
        return sorted(self._objects)[choice % len(self._objects)]

    def _lose(self, page: Page, objects: list[str]) -> None:
        note(f"lost: {page}")
        for key in objects:
            self._harness.raw_delete(key)
        self._is_gone(page)

    def _is_gone(self, page: Page) -> None:
        self._held.pop(page, None)
        self._damaged.discard(page)
        self._objects.pop(page, None)

    # -- ranks -----------------------------------------------------------------------------------

    def _rank(self, who: Who) -> Rank:
        if who not in self._ranks:
            self._ranks[who] = new_rank(self._harness, self._model, who, self._salt)
        return self._ranks[who]

    def _written_by(self, who: Who, rank: Rank) -> list[str]:
        """Pools that SGLang lets this rank write, sidecars first."""
        writes_all = who.tp_rank == 0
        names = [name for name in rank.pools if writes_all or not is_replicated(rank, name)]
        return sorted(names, key=lambda name: name == KV)

    def _close_all(self) -> None:
        for rank in self._ranks.values():
            rank.backend.close()
            self._closed.append(rank)
        self._ranks.clear()


class StatefulSuite(SuiteFixtures):
    """Whatever the order of calls: never other bytes, and no hit that cannot be restored."""

    @pytest.mark.parametrize("model", MODELS)
    def test_no_order_of_calls_and_losses_gives_other_bytes_or_a_false_hit(
        self, harness: Harness, request: pytest.FixtureRequest, model: str
    ) -> None:
        profile = PROFILES[request.config.getoption("--hicache-profile")]
        machine = partial(StoreMachine, harness, model)
        run_state_machine_as_test(machine, settings=profile)  # type: ignore[arg-type]


_COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "print_blob": False,
    "suppress_health_check": list(HealthCheck),
}
PROFILES = {
    "ci": settings(
        **_COMMON,
        derandomize=True,
        max_examples=8,
        stateful_step_count=40,
        phases=[Phase.generate],
    ),
    "nightly": settings(**_COMMON, max_examples=300, stateful_step_count=80),
}
"""By the name that ``--hicache-profile`` takes. A failure prints its steps; only nightly takes
the minutes to look for the fewest of them."""


def new_rank(harness: Harness, model: str, who: Who, salt: str) -> Rank:
    """A rank with a backend of its own, on memory of its own."""
    return Rank.make(
        harness,
        model,
        "page_first",
        layers_div=ONE_LAYER,
        pages=PAGES,
        deployment=f"{salt}-{who.deployment}",
        tp_rank=who.tp_rank,
        tp_size=RANKS,
    )


def is_replicated(rank: Rank, name: str) -> bool:
    """Whether every rank holds the same pages of a pool."""
    return rank.model.is_mla_model and name != "mamba"


def window(rank: Rank, name: str, end: int) -> range:
    """The pages of a pool that the prefix of ``end`` pages needs."""
    return range(max(0, end - rank.windows[name]) if name in rank.windows else 0, end)


def reported_prefixes(result: PoolTransferResult) -> list[int]:
    """As SGLang reads an answer: without a list, every prefix up to the hit."""
    if result.restorable_prefix_pages is None:
        return list(range(1, result.kv_hit_pages + 1))
    return list(result.restorable_prefix_pages)


def slots_from(first: int, pages: Sequence[int]) -> list[int]:
    """A host page for each of some pages, from one on and around."""
    return [(first + i) % PAGES for i in range(len(pages))]
