"""How a deliberately broken backend is declared, with the test of the suite that must find it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar, cast
from unittest.mock import patch

from hicache_shared import registry
from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.identity import PoolIdentity, pool_identity
from hicache_shared.layout import PoolLayout
from hicache_shared.memory import MemoryStore
from hicache_shared.memory_backend import MemoryBackend
from hicache_shared.testing.reference import MemoryHarness

ASSERTION = ("AssertionError", "Failed")
"""What a failed assert raises, and a ``pytest.raises`` in which nothing was raised."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken backend.

    Attributes:
        name: a few words.
        wrong: what it does wrong, a sentence.
        killed_by: the test that must fail, with the parameters of one of its runs in brackets.
        raises: how an exception may be called that ends that test.
        harness_type: makes the broken backend.
    """

    name: str
    wrong: str
    killed_by: str
    raises: tuple[str, ...]
    harness_type: type[MemoryHarness]

    @property
    def test(self) -> str:
        """The test's name without parameters."""
        return self.killed_by.partition("[")[0]


MUTANTS: list[Mutant] = []

Broken = TypeVar("Broken", bound=type[MemoryBackend] | type[MemoryStore] | type[MemoryHarness])
Patch = Callable[[], AbstractContextManager[object]]
Forget = Callable[[PoolIdentity, HiCacheStorageConfig], PoolIdentity]


class PatchedHarness(MemoryHarness):
    """The reference, with a part of the core replaced while its harness is open."""

    replacing: ClassVar[tuple[Patch]]

    def __enter__(self) -> Self:
        (replacing,) = self.replacing
        self._replaced = replacing()
        self._replaced.__enter__()
        return self

    def close(self) -> None:
        self._replaced.__exit__(None, None, None)


def broken(
    wrong: str, *, killed_by: str, raises: type[Exception] | None = None
) -> Callable[[Broken], Broken]:
    """Declares a broken backend, store or harness; the mutant's name is the class's, in words.

    Args:
        wrong: what it does wrong.
        killed_by: the test that must find it, with parameters.
        raises: the exception that the fault itself is; else the test fails by an assertion.
    """

    def declare(part: Broken) -> Broken:
        if issubclass(part, MemoryHarness):
            harness_type: type[MemoryHarness] = part
        elif issubclass(part, MemoryBackend):
            harness_type = _derived(MemoryHarness, backend_type=part)
        else:
            backend_type = _derived(MemoryBackend, store_type=part)
            harness_type = _derived(MemoryHarness, backend_type=backend_type)
        words = re.sub(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z0-9])(?=[A-Z][a-z])", " ", part.__name__)
        _declare(words, wrong, killed_by, raises, harness_type)
        return part

    return declare


def broken_key(wrong: str, *, killed_by: str) -> Callable[[Forget], Forget]:
    """Declares a backend whose keys are made of the identity that a function gives."""

    def declare(forget: Forget) -> Forget:
        def forgetful(
            layout: PoolLayout, *, config: HiCacheStorageConfig, **given: Any
        ) -> PoolIdentity:
            return forget(pool_identity(layout, config=config, **given), config)

        def replacing() -> AbstractContextManager[object]:
            return patch.object(registry, "pool_identity", forgetful)

        _declare_patch(forget.__name__, wrong, killed_by, None, replacing)
        return forget

    return declare


def broken_core(
    wrong: str, *, killed_by: str, raises: type[Exception] | None = None
) -> Callable[[Patch], Patch]:
    """Declares the reference on a core of which a part is replaced."""

    def declare(replacing: Patch) -> Patch:
        _declare_patch(replacing.__name__, wrong, killed_by, raises, replacing)
        return replacing

    return declare


def _declare_patch(
    name: str, wrong: str, killed_by: str, raises: type[Exception] | None, replacing: Patch
) -> None:
    harness_type = _derived(PatchedHarness, replacing=(replacing,))
    _declare(name.replace("_", " "), wrong, killed_by, raises, harness_type)


def _declare(
    name: str,
    wrong: str,
    killed_by: str,
    raises: type[Exception] | None,
    harness_type: type[MemoryHarness],
) -> None:
    expected = ASSERTION if raises is None else (raises.__name__,)
    MUTANTS.append(Mutant(name.lower(), wrong, killed_by, expected, harness_type))


Base = TypeVar("Base")


def _derived(base: type[Base], **members: object) -> type[Base]:
    return cast(type[Base], type(base.__name__, (base,), members))
