"""What the answers to a prompt show, and the exit code of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum

from tests.e2e.accounting import Cached, Rule
from tests.e2e.divergence import Bounds, Difference


class Verdict(Enum):
    """What one prompt shows."""

    FROM_STORAGE = "from storage"
    """The same output, and as many tokens from the storage as expected."""
    NOT_FROM_STORAGE = "not from storage"
    """The same output, but not from the storage, or not as much, or from another backend."""
    DIFFERS = "differs"
    """Another output than without a cache."""
    UNREPEATABLE = "unrepeatable"
    """The engine does not repeat this prompt without the storage, so it says nothing about it."""


class ExitCode(IntEnum):
    """Of a run. 0 to 3 mean what they mean for every verb of ``hicache``."""

    GOOD = 0
    DIFFERS = 1
    USAGE = 2
    NO_ENGINE = 3
    NOT_FROM_STORAGE = 4
    INCONCLUSIVE = 5


@dataclass(frozen=True)
class Judged:
    """One prompt's verdict at one time of a run.

    Attributes:
        when: "after a flush", "after a restart", ...
        why: what led to the verdict.
        counts: whether tokens from the storage were expected at all.
    """

    prompt: str
    when: str
    verdict: Verdict
    why: str
    counts: bool


@dataclass(frozen=True)
class Judge:
    """Turns what was seen into verdicts.

    Attributes:
        rule: how many tokens are expected.
        bounds: what counts as the same output.
        backend: the class that SGLang must name; None leaves it open.
    """

    rule: Rule
    bounds: Bounds
    backend: str | None

    def verdict(
        self, tokens: int, controls: Iterable[Difference], seen: Difference, cached: Cached
    ) -> tuple[Verdict, str]:
        """The verdict on one prompt of ``tokens`` tokens.

        Args:
            controls: its runs without the storage, against the reference.
            seen: its run with the storage, against the reference.
            cached: where that run had its tokens from.
        """
        for control in controls:
            if not control.within(self.bounds):
                return Verdict.UNREPEATABLE, f"without the storage: {control.text()}"
        if not seen.within(self.bounds):
            return Verdict.DIFFERS, f"{seen.text()}; {self._account(tokens, cached)}"
        named = cached.backend == self.backend or self.backend is None or not cached.total
        expected = Cached(storage=self.rule.from_storage(tokens), backend=cached.backend)
        if cached != expected or not named:
            return Verdict.NOT_FROM_STORAGE, self._account(tokens, cached)
        return Verdict.FROM_STORAGE, f"{self._account(tokens, cached)}; {seen.text()}"

    def _account(self, tokens: int, cached: Cached) -> str:
        counts = f"storage {cached.storage}, host {cached.host}, device {cached.device}"
        wanted = f"expected {self.rule.from_storage(tokens)} from storage"
        return f"{counts} by {cached.backend}; {wanted} by {self.backend or 'any backend'}"


def exit_code(judged: Iterable[Judged]) -> ExitCode:
    """The worst finding. A run in which no prompt was restored from the storage proves nothing,
    however many are the same without it."""
    found = list(judged)
    verdicts = {each.verdict for each in found}
    if Verdict.DIFFERS in verdicts:
        return ExitCode.DIFFERS
    if Verdict.NOT_FROM_STORAGE in verdicts:
        return ExitCode.NOT_FROM_STORAGE
    if not any(each.verdict is Verdict.FROM_STORAGE and each.counts for each in found):
        return ExitCode.INCONCLUSIVE
    return ExitCode.GOOD
