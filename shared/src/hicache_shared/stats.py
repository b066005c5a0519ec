"""What a backend counts: pages and bandwidth for SGLang, misses with their reason for people."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from hicache_shared.contract import StorageMetrics, new_storage_metrics
from hicache_shared.store import Code

GIB = 1 << 30
_REASONS = {int(code): code.name.lower() for code in Code}


@dataclass(frozen=True, slots=True)
class Moved:
    """What one call moved: pages of all its pools together, their bytes, and seconds."""

    pages: int
    nbytes: int
    seconds: float


class Stats:
    """Counters of one backend. Thread-safe.

    Args:
        keep_samples: whether to keep a sample a call for :meth:`drain`. SGLang drains at each
            scheduler step when metrics are on, and never otherwise.
    """

    def __init__(self, *, keep_samples: bool) -> None:
        self._lock = threading.Lock()
        self.sampling = keep_samples
        self._reasons: Counter[tuple[str, str, str]] = Counter()
        self._slow_paths: Counter[str] = Counter()
        self._prefetched: list[Moved] = []
        self._backed_up: list[Moved] = []

    def got(self, moved: Moved) -> None:
        self._sample(self._prefetched, moved)

    def put(self, moved: Moved) -> None:
        self._sample(self._backed_up, moved)

    def refused(self, operation: str, pool: str, codes: list[int]) -> None:
        """Count the pages of a call that were not moved, by reason."""
        reasons = Counter(code for code in codes if code != Code.OK)
        with self._lock:
            for code, pages in reasons.items():
                reason = _REASONS.get(code, f"code_{code}")
                self._reasons[operation, pool, reason] += pages

    def slow_path(self, what: str, pages: int) -> None:
        with self._lock:
            self._slow_paths[what] += pages

    def reasons(self) -> dict[tuple[str, str, str], int]:
        """Pages not moved since start, by (operation, pool, reason)."""
        with self._lock:
            return dict(self._reasons)

    def slow_paths(self) -> dict[str, int]:
        """Pages that took a slower path since start, by path."""
        with self._lock:
            return dict(self._slow_paths)

    def drain(self) -> StorageMetrics:
        """A fresh record of the calls since the last drain, in SGLang's own type."""
        with self._lock:
            prefetched, self._prefetched = self._prefetched, []
            backed_up, self._backed_up = self._backed_up, []
        metrics = new_storage_metrics()
        metrics.prefetch_pgs.extend(moved.pages for moved in prefetched)
        metrics.backup_pgs.extend(moved.pages for moved in backed_up)
        metrics.prefetch_bandwidth.extend(_gib_per_s(moved) for moved in prefetched)
        metrics.backup_bandwidth.extend(_gib_per_s(moved) for moved in backed_up)
        return metrics

    def _sample(self, samples: list[Moved], moved: Moved) -> None:
        if not self.sampling or not moved.pages:
            return
        with self._lock:
            samples.append(moved)


def _gib_per_s(moved: Moved) -> float:
    return moved.nbytes / GIB / moved.seconds if moved.seconds > 0 else 0.0
