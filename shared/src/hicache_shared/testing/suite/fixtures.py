"""What all parts of the suite share: pairs of model and memory layout, and fixtures."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn, TypeVar

import pytest

from hicache_shared.errors import BackendUnavailableError
from hicache_shared.hostpool import PRESETS, legal_layouts, preset
from hicache_shared.pytest_plugin.report import NOT_SUPPORTED
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.rank import FLAT_KV, MLA_MAMBA, Rank, chain, spec_of

LEGAL_PAIRS = [(model, layout) for model in PRESETS for layout in legal_layouts(preset(model))]

TRAILING_PAIRS = [p for p in LEGAL_PAIRS if any(q.window_pages for q in preset(p[0]).pools)]
LOGICAL_PAIRS = [p for p in LEGAL_PAIRS if preset(p[0]).pools[0].geometry.kind == "logical"]
PAGE_HEAD_PAIRS = [p for p in LEGAL_PAIRS if p[1] == "page_head"]
MLA_MAMBA_PAIRS = [(MLA_MAMBA, layout) for layout in legal_layouts(spec_of(MLA_MAMBA))]
FLAT_PAIRS = [
    p
    for p in LEGAL_PAIRS
    if preset(p[0]).pools[0].geometry.kind != "logical" and p[0] != "mha-asymmetric"
]
"""Models whose KV has a flat form."""

SIDECAR_PAIRS = [p for p in LEGAL_PAIRS if len(preset(p[0]).pools) > 1]
"""Models with pools beside the KV."""

ONE_LAYOUT_PAIRS = [(model, "page_first") for model in PRESETS]
ONE_LAYOUT_SIDECAR_PAIRS = [p for p in SIDECAR_PAIRS if p[1] == "page_first"]
TWO_PAIRS = [("mla", "page_first"), ("deepseek-v4-flash", "page_first")]
"""Where what is claimed hardly depends on the pools: one alone, and many on a logical anchor."""

MHA_PAIR = ("mha", "page_first")
"""One pool, of which every rank has its own part."""

NewRank = Callable[..., Rank]

NO_FLAT_FORM = "mha-asymmetric"
"""A model whose KV has no flat pages, so that it needs zero copy."""

REQUIRE = "HICACHE_REQUIRE_BACKEND"


class SuiteFixtures:
    """The harness of the class, and ranks and page hashes for each test.

    Attributes:
        harness_type: makes the harness, once for all tests of a class.
    """

    harness_type: ClassVar[type[Harness]]

    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls) -> Iterator[Harness]:
        """The harness; where its client or server is not there, the tests skip or fail."""
        harness_type = cls.harness_type
        for package in harness_type.requires:
            if importlib.util.find_spec(package) is None:
                _absent(f"package {package!r}, which {harness_type.name} needs, is not installed")
        try:
            harness = harness_type()
        except BackendUnavailableError as error:
            _absent(str(error))
        with harness:
            yield harness

    @pytest.fixture(params=LEGAL_PAIRS, ids="-".join)
    def pair(self, request: pytest.FixtureRequest) -> tuple[str, str]:
        """A model and a memory layout."""
        pair: tuple[str, str] = request.param
        return pair

    @pytest.fixture
    def new_rank(self, harness: Harness, pair: tuple[str, str]) -> Iterator[NewRank]:
        """Makes ranks, of the pair unless said; their backends are closed after the test."""
        if pair[0] == NO_FLAT_FORM:
            needs(harness, "zero_copy")
        ranks: list[Rank] = []

        def make(**changes: Any) -> Rank:
            if changes.get("extra") == FLAT_KV:
                needs(harness, "flat")
            wanted = {"model": pair[0], "layout": pair[1], **changes}
            layouts = harness.capabilities.layouts
            if layouts and wanted["layout"] not in layouts:
                not_supported(f"{harness.name} does not go with layout {wanted['layout']!r}")
            ranks.append(Rank.make(harness, **wanted))
            return ranks[-1]

        yield make
        for rank in ranks:
            rank.backend.close()
        harness.forget()

    @pytest.fixture
    def rank(self, new_rank: NewRank) -> Rank:
        return new_rank()

    @pytest.fixture
    def keys(self, request: pytest.FixtureRequest) -> list[str]:
        """Eight page hashes that no other test uses."""
        return chain(8, request.node.nodeid)


def needs(harness: Harness, capability: str) -> None:
    """Skip, saying so, where a harness does not offer what a test needs."""
    if not getattr(harness.capabilities, capability):
        not_supported(f"the harness of {harness.name} has no {capability!r}")


def not_supported(what: str) -> NoReturn:
    """Skip a test that does not apply to a backend; reports do not count it as passed."""
    pytest.skip(f"{NOT_SUPPORTED}: {what}")


Made = TypeVar("Made")


def allowed(make: Callable[[], Made], what: str) -> Made:
    """What a backend may refuse, by an error of any kind that says why.

    Skips as not supported where it does.
    """
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - which errors a backend has, it says itself
        if not str(error):
            pytest.fail(f"{what}: refused by {error!r}, which does not say why")
        not_supported(f"{what}: refused: {error}")


def _absent(why: str) -> NoReturn:
    """Skip, or fail where the backend is required."""
    if os.environ.get(REQUIRE):
        pytest.fail(f"{why}, and {REQUIRE} is set", pytrace=False)
    pytest.skip(f"{why}; set {REQUIRE}=1 to fail instead")
