"""UCM's PosixStore, thinly: found and told apart from its namesake, codes instead of text.

What is known of the native store's behaviour is in this file and in ``folder``; what to do
about it is the adapter's store's affair.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_shared.errors import BackendUnavailableError

INSTALL = (
    "pip install 'hicache-ucm[cu129]' on Python 3.12 (or [cu130], [cann901-a2], [cann901-a3], "
    "[cann910-a2], [cann910-a3]: exactly one); its PosixStore needs no GPU"
)

BUILDS = tuple(
    f"uc-manager-{build}"
    for build in (
        "cuda-cu129",
        "cuda-cu130",
        "cann901-a2",
        "cann901-a3",
        "cann910-a2",
        "cann910-a3",
    )
)
"""Distributions that hold UCM, as its selector ``uc-manager`` 0.8.1 knows them."""

SOURCE = "uc-manager"
"""What is built from source; where a build is installed, this is its selector, without code."""

NAMESAKE = "ucm"
"""Another program, whose import package has the same name."""

OLDEST = (0, 8, 1)
"""Before it, a lookup stops at the first page that is missing."""

_RELEASE = re.compile(r"\d+(\.\d+)*")

NO_TIMEOUT = 0
"""UCM's ``timeout_ms``. A task that UCM gives up on has a worker that still writes into host
memory, and nothing tells when it ends. Without a timeout ``wait`` returns when it is over, and
closing takes a millisecond in place of three seconds with the interpreter stopped."""

NOT_FOUND = -50005
"""UCM's code for a block that is absent or too short, and for a folder that is."""

Addresses = npt.NDArray[np.uint64]
"""``uint64[pages, chunks]``, C-contiguous, since UCM ignores strides."""


class NativeError(Exception):
    """The native store refused; ``code`` is UCM's, 0 where its text names none.

    Only this adapter sees it: :class:`~hicache_ucm.store.UcmStore` turns it into a code a page.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        first = text.split(",", 1)[0].strip()
        self.code = int(first) if first.removeprefix("-").isdigit() else 0


class NativeModule:
    """The parts of UCM that are used: the binding and the library of the PosixStore.

    Raises:
        BackendUnavailableError: UCM is not installed, is too old, does not load, or ``ucm``
            is the other program of that name.
    """

    def __init__(self) -> None:
        _check_distribution()
        spec = importlib.util.find_spec("ucm")
        folder = Path((spec.origin if spec else None) or "").parent
        self._library = folder / "store" / "posix" / "libposixstore.so"
        try:
            # The binding has symbols of this library and does not load it by itself.
            metrics = folder / "shared" / "metrics" / "libmetrics.so"
            if metrics.exists():
                ctypes.CDLL(str(metrics), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
            binding = importlib.import_module("ucm.store.pipeline.ucmpipelinestore")
        except (ImportError, OSError) as error:
            raise BackendUnavailableError(
                f"UCM is installed and does not load ({error}); it has builds for Python 3.12 on "
                f"glibc 2.28 or newer; install it: {INSTALL}"
            ) from error
        self._pipeline: Any = binding.PipelineStore

    def open(
        self, folder: Path, *, tensor_bytes: int, tensors: int, settings: Mapping[str, Any]
    ) -> NativeStore:
        """A PosixStore over one folder, of blocks of ``tensors`` parts of equal size.

        Raises:
            NativeError: UCM refuses the settings or the folder.
        """
        block_bytes = tensor_bytes * tensors
        native = self._pipeline()
        config = {
            "store_pipeline": "Posix",
            "storage_backends": [str(folder)],
            "device_id": 0,  # any number from 0 on; below it nothing can be moved
            "tensor_size": tensor_bytes,
            "shard_size": block_bytes,  # with several shards a block, a torn one can be seen
            "block_size": block_bytes,
            "timeout_ms": NO_TIMEOUT,
            # Two errors of the operating system would make it refuse everything for 300 s.
            "store_health": {"enabled": False},
            **settings,
        }
        try:
            native.Stack("Posix", str(self._library), config)
        except RuntimeError as error:
            raise NativeError(str(error)) from error
        return NativeStore(native)


@functools.cache
def native_module() -> NativeModule:
    """UCM, looked for once a process.

    Raises:
        BackendUnavailableError: see :class:`NativeModule`.
    """
    return NativeModule()


class NativeStore:
    """One PosixStore. Thread-safe. Keys are 16 bytes each, joined.

    ``lookup``, ``load`` and ``dump`` hold the GIL while they run; ``wait`` does not.
    """

    def __init__(self, native: Any) -> None:
        self._native = native

    def lookup(self, ids: bytes) -> npt.NDArray[np.bool_]:
        """``bool[keys]``: whether there is a block, of whatever size. About 1.5 us a key.

        Raises:
            NativeError: the folder cannot be read.
        """
        try:
            return np.frombuffer(self._native.Lookup(ids), dtype=np.bool_)
        except RuntimeError as error:
            raise NativeError(str(error)) from error

    def load(self, ids: bytes, addresses: Addresses) -> int:
        """Begin to read blocks into memory; the task to wait for.

        A block that is too long is read as if it were not.

        Raises:
            NativeError: refused.
        """
        try:
            task: int = self._native.Load(ids, _first_shards(ids), addresses)
        except RuntimeError as error:
            raise NativeError(str(error)) from error
        return task

    def dump(self, ids: bytes, addresses: Addresses) -> int:
        """Begin to write blocks, in place of those that are there; the task to wait for.

        Raises:
            NativeError: refused.
        """
        try:
            task: int = self._native.Dump(ids, _first_shards(ids), addresses)
        except RuntimeError as error:
            raise NativeError(str(error)) from error
        return task

    def wait(self, task: int) -> None:
        """Return when the task is over and nothing touches its memory any more; once a task.

        Raises:
            NativeError: one page failed. Others may have been moved or not.
        """
        try:
            self._native.Wait(task)
        except RuntimeError as error:
            raise NativeError(str(error)) from error

    def close(self) -> None:
        """End its threads. No call may be made after, nor while it runs."""
        self._native = None


def _first_shards(ids: bytes) -> array[int]:
    return array("Q", bytes(len(ids) // 2))  # 8 zero bytes a key of 16


def _check_distribution() -> None:
    """That ``ucm`` is UCM, and new enough.

    Raises:
        BackendUnavailableError: it is not.
    """
    versions = _installed([*BUILDS, NAMESAKE])
    if not versions and importlib.util.find_spec("ucm") is not None:
        versions = _installed([SOURCE])
    ours = sorted(set(versions) - {NAMESAKE})
    if not ours and importlib.util.find_spec("ucm") is None:
        raise BackendUnavailableError(f"UCM is not installed: {INSTALL}")
    if not ours:
        raise BackendUnavailableError(
            "the installed package 'ucm' is another program of that name, or a build that is not "
            f"known here ({', '.join(BUILDS)}); pip uninstall ucm, then {INSTALL}"
        )
    if len(versions) > 1:
        raise BackendUnavailableError(
            f"{', '.join(sorted(versions))} overwrite each other's files in the package 'ucm'; "
            f"uninstall all of them, then {INSTALL}"
        )
    release = _RELEASE.match(versions[ours[0]])
    if release is None or tuple(map(int, release[0].split("."))) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BackendUnavailableError(
            f"{ours[0]} {versions[ours[0]]} is too old: {oldest} is needed, since before it a "
            f"lookup stops at the first missing page; {INSTALL}"
        )


def _installed(names: Sequence[str]) -> dict[str, str]:
    """Versions of those of these distributions that are installed.

    They are asked for by name: to look whose files ``ucm`` is takes seconds in an environment
    as large as SGLang's.
    """
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
