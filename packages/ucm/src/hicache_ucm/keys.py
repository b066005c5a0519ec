"""The 16 bytes that UCM calls a page by."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 16
_HASH_CHARS = 64


def block_ids(digest: bytes, hashes: Sequence[str]) -> bytes:
    """The keys of pages, 16 bytes each, joined.

    A key is made of every bit of the page hash and of the pool's digest: the two halves of
    SGLang's sha256 and the digest, by exclusive or. That is 43 ns a page where a hash would
    be 430. Page hashes of another form are hashed.

    Args:
        digest: 16 bytes over everything that must match for bytes to be interchangeable.
        hashes: page hashes; SGLang's are 64 lower-case hex digits.
    """
    if set(map(len, hashes)) == {_HASH_CHARS} and (raw := _unhex("".join(hashes))) is not None:
        halves = np.frombuffer(raw, dtype=np.uint64).reshape(-1, 2, 2)
        return (halves[:, 0] ^ halves[:, 1] ^ np.frombuffer(digest, dtype=np.uint64)).tobytes()
    if len(hashes) == 1:
        return hashlib.blake2b(hashes[0].encode(), key=digest, digest_size=KEY_BYTES).digest()
    # A key may not depend on the form of its neighbours.
    return b"".join(block_ids(digest, [page]) for page in hashes)


def _unhex(text: str) -> bytes | None:
    """The bytes of lower-case hex digits; None where it is anything else."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return None
    # ``fromhex`` also takes capitals and skips spaces: two texts, one key.
    return raw if raw.hex() == text else None
