"""A backend that is wrong in one place does not pass for one that is right."""

from __future__ import annotations

import pytest

from tests.sglang.cache.serving import Launch, running
from tests.sglang.cache.trip import came_back

FAULTS = [
    ("SwapsPages", "mha", r"other bytes came back to \['k', 'v'\]"),
    ("StoresNotAll", "deepseek-v4", "not all of it came from storage"),
    ("FillsNotAll", "deepseek-v4", r"other bytes came back to \['c128'\]"),
    ("ForgetsAPool", "deepseek-v4", r"other bytes came back to \['c128'\]"),
]


@pytest.mark.parametrize(("class_name", "kind", "seen"), FAULTS)
def test_a_trip_shows_what_a_backend_does_wrong(class_name: str, kind: str, seen: str) -> None:
    backend = {
        "backend_name": "broken",
        "module_path": "tests.sglang.cache.broken",
        "class_name": class_name,
    }
    with running(kind, Launch(backend)) as rank, pytest.raises(AssertionError, match=seen):
        came_back(rank)
