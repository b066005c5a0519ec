"""The conformance suite: what every backend does, for every model and memory layout.

Each test writes through the contract and, where it can, looks behind it.
"""

from hicache_shared.testing.suite.answers import AnswerSuite
from hicache_shared.testing.suite.calls import CallSuite
from hicache_shared.testing.suite.closing import CloseSuite
from hicache_shared.testing.suite.deployments import DeploymentSuite
from hicache_shared.testing.suite.drafts import DraftSuite
from hicache_shared.testing.suite.faults import FaultSuite
from hicache_shared.testing.suite.guard import GuardSuite
from hicache_shared.testing.suite.hits import HitSuite
from hicache_shared.testing.suite.identity import IdentitySuite
from hicache_shared.testing.suite.long import LongSuite
from hicache_shared.testing.suite.losses import LossSuite
from hicache_shared.testing.suite.misuse import MisuseSuite
from hicache_shared.testing.suite.pages import PageSuite
from hicache_shared.testing.suite.policies import PolicySuite
from hicache_shared.testing.suite.processes import ProcessSuite
from hicache_shared.testing.suite.servers import ServerSuite
from hicache_shared.testing.suite.stateful import StatefulSuite
from hicache_shared.testing.suite.threads import ThreadSuite
from hicache_shared.testing.suite.untouched import UntouchedSuite


class BackendSuite(
    PageSuite,
    UntouchedSuite,
    IdentitySuite,
    DeploymentSuite,
    DraftSuite,
    HitSuite,
    PolicySuite,
    CallSuite,
    AnswerSuite,
    LongSuite,
    ThreadSuite,
    ProcessSuite,
    MisuseSuite,
    FaultSuite,
    CloseSuite,
    LossSuite,
    StatefulSuite,
    ServerSuite,
    GuardSuite,
):
    """Subclass it with a ``harness_type``; everything else is inherited."""
