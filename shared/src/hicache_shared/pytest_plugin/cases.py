"""What is right where others went wrong: one sentence a case of ``docs/cases.md``.

A report shows it below the tests of the case that failed.
"""

from __future__ import annotations

import re

RIGHT: dict[int, str] = {
    1: "pool A serves {1,3}, pool B {1,2}: the answer is 1, restorable [1]",
    2: "another identity never hits; a get that moved other than the page's bytes is False",
    3: "every component comes back byte-exact and nothing outside the page changes",
    4: "rank 1 hits what rank 0 wrote for replicated pools, never for sharded ones",
    5: "each stage and rank reads back its own bytes",
    6: "a hit needs every pool; an unregistered pool is an error that names it",
    7: "v1 get and set answer True without I/O; the sidecars decide the hit",
    8: "one answer a key, in order",
    9: "a fault of the store is an answer",
    10: "sizes come from the pool's own description",
    11: "clear empties this namespace at once and nothing else; where a client cannot delete "
    "(UMBP) the namespace moves to a new epoch of keys, or clear is refused; a failed clear "
    "raises",
    12: "bounded retry; what fits goes in, and only that counts as stored",
    13: "one False, the others True and byte-exact",
    14: "same key, same bytes; a page counts as stored only when it can be read",
    15: "False, in every interleaving of close with calls",
    16: "exists says 0",
    18: "registration is idempotent over storages",
}


_CASE = re.compile(r"test_(?:case_(\d+)_)?(\w+)")


def right_of(test: str) -> str:
    """What a test of the suite wants: its case's sentence, else the claim that its name states."""
    match = _CASE.match(test)
    if match is None:
        return test
    case, claim = match.groups()
    if case is not None and int(case) in RIGHT:
        return f"{RIGHT[int(case)]} (case {int(case)})"
    return claim.replace("_", " ")
