"""Bytes of pages that a failed comparison can show: a diff of megabytes takes minutes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


class PageBytes(bytes):
    """Bytes that show as their number and the beginning of their SHA-256."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes {hashlib.sha256(self).hexdigest()[:12]}>"

    def __add__(self, other: Any) -> PageBytes:
        return PageBytes(bytes(self) + other)


def bytes_of(array: Any) -> PageBytes:
    """The bytes of an array or of a CPU tensor that numpy can see."""
    return PageBytes(np.asarray(array).tobytes())
