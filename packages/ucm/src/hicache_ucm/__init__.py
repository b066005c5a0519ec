"""SGLang HiCache storage on UCM's PosixStore, for hybrid models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_ucm.backend import UcmBackend

__version__ = "0.1.0"

__all__ = ["UcmBackend", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the backend when asked for, so that importing the package stays cheap."""
    if name == "UcmBackend":
        from hicache_ucm.backend import UcmBackend

        return UcmBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
