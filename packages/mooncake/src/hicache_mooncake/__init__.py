"""SGLang HiCache storage on Mooncake Store, for hybrid models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_mooncake.backend import MooncakeBackend

__version__ = "0.1.0"

__all__ = ["MooncakeBackend", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the backend when asked for, so that importing the package stays cheap."""
    if name == "MooncakeBackend":
        from hicache_mooncake.backend import MooncakeBackend

        return MooncakeBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
