"""A backend that is sound, described by a harness that is not."""

from __future__ import annotations

from hicache_shared.testing.harness import Harness
from hicache_shared.testing.reference import MemoryHarness
from tests.suite.breaking import broken


@broken(
    "The harness says that it can hold a call in the store, and has no way to.",
    killed_by="test_the_harness_has_what_it_says_it_has",
)
class CapabilityWithoutItsMethod(MemoryHarness):
    name = "capability without its method"
    hold = Harness.hold
