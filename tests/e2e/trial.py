"""A run: prompts are written, forgotten, and restored from the storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.e2e.client import Answer
from tests.e2e.divergence import Difference, compare
from tests.e2e.prompts import Prompt
from tests.e2e.verdict import Judge, Judged


class Engine(Protocol):
    """An engine as a run needs it; ``client.Client`` is one."""

    def generate(self, tokens: Sequence[int], count: int, *, salt: str | None = None) -> Answer: ...

    def score(
        self, tokens: Sequence[int], text: Sequence[int], *, salt: str | None = None
    ) -> Answer: ...

    def flush(self, timeout_s: float) -> None: ...


class NotNewError(ValueError):
    """A prompt was known before its first run, which therefore is no reference."""


@dataclass(frozen=True)
class Reference:
    """A prompt without the storage.

    Attributes:
        greedy: its first run.
        scored: that run's text, scored under a salt of its own.
        controls: runs that had nothing from the storage either, against the first.
    """

    prompt: Prompt
    greedy: Answer
    scored: Answer
    controls: tuple[Difference, ...]


@dataclass
class Trial:
    """One run over some prompts.

    Attributes:
        engine: the engine.
        judge: of its answers.
        prompts: new to the storage.
        count: tokens to generate.
        drain_s: how long writes may be under way.
        restart: restarts the engine with what its storage keeps, and waits for it; None to leave
            that out.
        tell: hears each verdict.
    """

    engine: Engine
    judge: Judge
    prompts: Sequence[Prompt]
    count: int
    drain_s: float
    restart: Callable[[], None] | None = None
    tell: Callable[[Judged], None] = lambda judged: None
    judged: list[Judged] = field(default_factory=list)

    def run(self) -> list[Judged]:
        """All verdicts, in order.

        Raises:
            NotNewError: a prompt had been stored before.
            EngineError: no answer, a refusal, or writes that did not end.
        """
        references = [self._reference(prompt) for prompt in self.prompts]
        self.engine.flush(self.drain_s)
        self._restore(references, "greedy, after a flush")
        self.engine.flush(self.drain_s)
        self._rescore(references)
        if self.restart is not None:
            self.restart()
            self._restore(references, "greedy, after a restart")
        return self.judged

    def _reference(self, prompt: Prompt) -> Reference:
        first = self.engine.generate(prompt.tokens, self.count)
        if first.cached.total:
            raise NotNewError(
                f"{prompt.name}: the first run had {first.cached}; give another --seed"
            )
        scored = self.engine.score(prompt.tokens, first.tokens, salt=f"{prompt.name}, scored")
        apart = self.engine.generate(prompt.tokens, self.count, salt=f"{prompt.name}, again")
        # From the device's own cache: the same shapes as a run from the storage.
        again = self.engine.generate(prompt.tokens, self.count)
        controls = [apart] if again.cached.storage else [apart, again]
        differences = (compare(first.steps, control.steps) for control in controls)
        return Reference(prompt, first, scored, tuple(differences))

    def _restore(self, references: Sequence[Reference], when: str) -> None:
        for reference in references:
            answer = self.engine.generate(reference.prompt.tokens, self.count)
            self._conclude(reference, when, reference.greedy, answer)

    def _rescore(self, references: Sequence[Reference]) -> None:
        for reference in references:
            answer = self.engine.score(reference.prompt.tokens, reference.greedy.tokens)
            self._conclude(reference, "teacher-forced, after a flush", reference.scored, answer)

    def _conclude(self, reference: Reference, when: str, wanted: Answer, answer: Answer) -> None:
        tokens = len(reference.prompt.tokens)
        seen = compare(wanted.steps, answer.steps)
        verdict, why = self.judge.verdict(tokens, reference.controls, seen, answer.cached)
        counts = self.judge.rule.from_storage(tokens) > 0
        judged = Judged(reference.prompt.name, when, verdict, why, counts)
        self.judged.append(judged)
        self.tell(judged)
