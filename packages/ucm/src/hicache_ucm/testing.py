"""Reading and writing behind the contract: block files by their path below the root."""

from __future__ import annotations

from pathlib import Path

from hicache_ucm.folder import is_block


class RawUcm:
    """The files of a root, knowing nothing of pools, namespaces or page sizes.

    A key is the path of a block, relative to the root. Thread-safe.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def raw_keys(self, prefix: str = "") -> list[str]:
        """All blocks whose key begins with ``prefix``, in order; no temporary files."""
        found = (str(path.relative_to(self._root)) for path in self._root.rglob("*/*/*"))
        return sorted(key for key in found if is_block(Path(key).name) and key.startswith(prefix))

    def raw_get(self, key: str) -> bytes | None:
        """The block's bytes, None where there is none."""
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None

    def raw_put(self, key: str, value: bytes) -> None:
        """Write a block, over another of that key if there is one."""
        (self._root / key).write_bytes(value)

    def raw_delete(self, key: str) -> None:
        (self._root / key).unlink(missing_ok=True)
