"""The conformance suite: what every backend does, for every model and memory layout.

Each test writes through the contract and, where it can, looks behind it.
"""

from hicache_shared.testing.suite.calls import CallSuite
from hicache_shared.testing.suite.faults import FaultSuite
from hicache_shared.testing.suite.guard import GuardSuite
from hicache_shared.testing.suite.hits import HitSuite
from hicache_shared.testing.suite.identity import IdentitySuite
from hicache_shared.testing.suite.misuse import MisuseSuite
from hicache_shared.testing.suite.pages import PageSuite


class BackendSuite(
    PageSuite, IdentitySuite, HitSuite, CallSuite, MisuseSuite, FaultSuite, GuardSuite
):
    """Subclass it with a ``harness_type``; everything else is inherited."""
