"""How far two runs of one prompt are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One token of a text, and what the model thought of its place.

    Attributes:
        token: its id.
        logprob: of the token, in nats.
        top: the most likely ids and their logprobs.
    """

    token: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True)
class Bounds:
    """How far apart two runs of one prompt may be and still count as the same.

    Attributes:
        kl: mean over the places, in nats.
        logprob: of one chosen token, in nats.
    """

    kl: float = 0.005
    logprob: float = 0.1


@dataclass(frozen=True)
class Difference:
    """Two runs of one prompt, compared at the places before they choose another token.

    Attributes:
        first: the place where they choose another token, or where one of them ends; None where
            their tokens are the same.
        kl: Kullback-Leibler divergence from the reference, the mean over the places, in nats.
        logprob: the largest change of a chosen token's logprob, in nats.
    """

    first: int | None
    kl: float
    logprob: float

    def within(self, bounds: Bounds) -> bool:
        """Whether the runs are the same."""
        return self.first is None and self.kl <= bounds.kl and self.logprob <= bounds.logprob

    def text(self) -> str:
        tokens = "same tokens" if self.first is None else f"other tokens from place {self.first}"
        return f"{tokens}, KL {self.kl:.2g}, logprob {self.logprob:.2g}"


def compare(reference: Sequence[Step], other: Sequence[Step]) -> Difference:
    """The difference of two runs.

    At the place where they choose another token their distributions are still of the same text,
    so it counts too.
    """
    same = 0
    for ours, theirs in zip(reference, other, strict=False):
        if ours.token != theirs.token:
            break
        same += 1
    ends = same == len(reference) == len(other)
    comparable = min(same + (not ends), len(reference), len(other))
    kls = [kl(reference[place].top, other[place].top) for place in range(comparable)]
    moves = [abs(reference[place].logprob - other[place].logprob) for place in range(same)]
    return Difference(
        first=None if ends else same,
        kl=sum(kls) / len(kls) if kls else 0.0,
        logprob=max(moves, default=0.0),
    )


def kl(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Kullback-Leibler divergence of ``other`` from ``reference``, in nats.

    Each gives the logprobs of its most likely ids only. Ids that both give count each, those that
    only the reference gives as one, and all the rest as one; what ``other`` does not tell is taken
    in favour of it. So this is at most the divergence of the whole distributions, and 0 where they
    are the same.
    """
    both = reference.keys() & other.keys()
    sums = [(math.exp(reference[token]), math.exp(other[token])) for token in both]
    p_rest, q_rest = _rest(p for p, _ in sums), _rest(q for _, q in sums)
    p_only = min(p_rest, sum(math.exp(reference[token]) for token in reference.keys() - both))
    untold = _rest(map(math.exp, other.values()))
    q_only = min(untold, q_rest * p_only / max(p_rest, TINY))
    sums += [(p_only, q_only), (p_rest - p_only, q_rest - q_only)]
    return max(0.0, sum(p * math.log(p / max(q, TINY)) for p, q in sums if p > TINY))


TINY = 1e-7
"""Below what is left of a sum of rounded probabilities."""


def _rest(probabilities: Iterable[float]) -> float:
    return max(0.0, 1.0 - sum(probabilities))
