"""Python imports this at the start of every process of an engine that runs on a CPU."""

from tests.sglang import stand_ins

stand_ins.install()
