"""SGLang HiCache storage on UMBP of ``mori``, for hybrid models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_umbp.backend import UmbpBackend

__version__ = "0.1.0"

__all__ = ["UmbpBackend", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the backend when asked for, so that importing the package stays cheap."""
    if name == "UmbpBackend":
        from hicache_umbp.backend import UmbpBackend

        return UmbpBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
