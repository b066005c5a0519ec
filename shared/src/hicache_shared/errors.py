"""Errors of misuse and configuration.

Faults of a store (a dead server, a full disk, a timeout) are *answers*, not
errors: see :class:`hicache_shared.store.Code`. What is raised here is a mistake
of the caller or the operator, and the message says what was expected, what came,
and what to change.
"""


class HiCacheError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(HiCacheError, ValueError):
    """A setting is missing, unknown, of the wrong form, or contradicts another."""


class LayoutError(HiCacheError, ValueError):
    """A host pool has a shape or memory layout that cannot be stored."""


class UnknownPoolError(HiCacheError, LookupError):
    """A call names a pool that was never registered."""


class TransferError(HiCacheError, ValueError):
    """Keys and indices of a transfer do not fit each other or the pool."""


class BackendUnavailableError(HiCacheError, RuntimeError):
    """The native client or its server cannot be had at start."""


class ClearError(HiCacheError, RuntimeError):
    """A clear did not remove everything it was asked to."""
