"""What SGLang finds under its in-tree names while ``HICACHE_ADAPTERS_OVERRIDE`` is wrong."""

from __future__ import annotations

import os
from typing import Any

from hicache_shared import takeover
from hicache_shared.contract import HiCacheStorage
from hicache_shared.errors import ConfigError


class RefusedBackend(HiCacheStorage):
    """A backend that cannot be made, so that no other takes its place in silence."""

    def __new__(cls, *_: Any) -> RefusedBackend:
        """Raises ConfigError or BackendUnavailableError, with what to change."""
        takeover.chosen(os.environ.get(takeover.VARIABLE, ""))
        raise ConfigError(f"{takeover.VARIABLE} was wrong when SGLang started; start it again")
