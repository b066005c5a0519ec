"""Every deliberately broken backend."""

from tests.suite.breaking import MUTANTS, Mutant
from tests.suite.mutants import calls, faults, harness, hits, keys, pages

__all__ = ["MUTANTS", "Mutant", "calls", "faults", "harness", "hits", "keys", "pages"]
