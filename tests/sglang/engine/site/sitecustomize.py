"""Python imports this at the start of every process of an engine that runs on a CPU."""

import ctypes
import signal
import sys

from tests.sglang import stand_ins

PR_SET_PDEATHSIG = 1

if any("spawn_main" in word for word in sys.orig_argv):
    # A rank. SGLang lets it end with its parent only once it runs: a test that is killed while
    # ranks start would leave them behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

stand_ins.install()
