"""How many tokens of a prompt come from which tier, and how many should.

The rules are SGLang 0.5.23's: ``Req._compute_max_prefix_len`` (the last token is always computed),
``prefetch_from_storage`` (whole pages, and none below the threshold), and
``get_cached_tokens_details`` (the tiers of an answer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

PREFETCH_THRESHOLD = 256
"""SGLang's default for ``prefetch_threshold``, in tokens."""


@dataclass(frozen=True)
class Cached:
    """Tokens of one prompt that were not computed anew.

    Attributes:
        device, host, storage: tokens from each tier.
        backend: the class of the storage backend, as SGLang names it; None where it names none,
            which it does when nothing was cached.
    """

    device: int = 0
    host: int = 0
    storage: int = 0
    backend: str | None = None

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Self:
        """From ``meta_info`` of an answer.

        Raises:
            AccountingError: the tiers do not add up to ``cached_tokens``.
        """
        details = meta.get("cached_tokens_details") or {}
        cached = cls(
            device=int(details.get("device", 0)),
            host=int(details.get("host", 0)),
            storage=int(details.get("storage") or 0),
            backend=details.get("storage_backend"),
        )
        total = int(meta.get("cached_tokens", 0))
        if cached.total != total:
            raise AccountingError(
                f"SGLang counts {total} cached tokens, and its tiers {cached.total}: {details}"
            )
        return cached


class AccountingError(ValueError):
    """An answer contradicts itself."""


@dataclass(frozen=True)
class Rule:
    """What an engine can restore of a prompt that it has computed once.

    Attributes:
        page: tokens a page.
        threshold: prompts with fewer tokens in whole pages are not looked up in the storage.
        states: for a model with recurrent states (Mamba), the tokens between two places where a
            state is kept: the larger of its chunk and the page. SGLang keeps one state a prefill,
            at its last such place, and restores no prefix that ends elsewhere. 0 for other models.
    """

    page: int
    threshold: int = PREFETCH_THRESHOLD
    states: int = 0

    def restorable(self, tokens: int) -> int:
        """Tokens of a prompt's prefix that need not be computed, all of them being stored."""
        if not self.states:
            return (tokens - 1) // self.page * self.page
        kept = tokens // self.states * self.states
        return kept if kept < tokens else 0

    def from_storage(self, tokens: int) -> int:
        """Those that come from the storage where device and host have none of them."""
        whole_pages = (tokens - 1) // self.page * self.page
        return self.restorable(tokens) if whole_pages >= self.threshold else 0
