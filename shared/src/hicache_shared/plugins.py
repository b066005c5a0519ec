"""How the ``hicache`` command finds backends without depending on any adapter.

An adapter's distribution names a :class:`BackendPlugin` in the entry-point group
``hicache.backends``; ``memory`` is in this package. Importing a plugin must be cheap: the
native client, SGLang and torch are imported when a backend is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from hicache_shared.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    from hicache_shared.contract import HiCacheStorage, HiCacheStorageConfig

GROUP = "hicache.backends"
"""The entry-point group that adapters announce themselves in."""

INSTALL: Mapping[str, str] = {
    "ucm": "pip install 'hicache-ucm[cu129]' (Python 3.12)",
    "mooncake": "pip install 'hicache-mooncake[client]'",
    "umbp": "pip install 'hicache-umbp[client]'",
}
"""How to install each adapter that has a distribution of its own."""

PREFERENCE = ("ucm", "mooncake", "umbp", "memory")
"""Which backend a command takes where none is named: the first of these that is installed."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What a command needs of a backend's server.

    Attributes:
        store_bytes: bytes that will be stored at the same time.
        master: where a store is to be used: ``host:port`` of a running server, or a folder.
            None lets the plugin make one for the while.
    """

    store_bytes: int
    master: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendPlugin:
    """One backend, as the command sees it.

    Attributes:
        name: what ``--backend`` calls it.
        module_path, class_name: the class that SGLang loads.
        serve: while the context lasts there is a server; gives the extra config to use it.
            Raises ConfigError or BackendUnavailableError.
        launch_config: keys of the extra config that ``launch-args`` adds to SGLang's own,
            from what ``--master`` or ``--root`` gave, if anything.
        launch_hints: what the operator should look at before using these keys.
    """

    name: str
    module_path: str
    class_name: str
    serve: Callable[[ServeOptions], AbstractContextManager[dict[str, Any]]]
    launch_config: Callable[[str | None], dict[str, Any]]
    launch_hints: tuple[str, ...] = ()

    def make(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        """A backend, imported and made as SGLang's dynamic factory does it."""
        backend_class = getattr(importlib.import_module(self.module_path), self.class_name)
        backend: HiCacheStorage = backend_class(config, {})
        return backend


@contextmanager
def _serve_memory(options: ServeOptions) -> Iterator[dict[str, Any]]:
    if options.master is not None:
        raise ConfigError("backend 'memory' has no server; leave --master and --root out")
    yield {"shelf": f"hicache-{uuid4().hex}"}


MEMORY = BackendPlugin(
    name="memory",
    module_path="hicache_shared.memory_backend",
    class_name="MemoryBackend",
    serve=_serve_memory,
    launch_config=lambda master: {"shelf": "default"},
    launch_hints=("memory is for tests: nothing outlives the engine's process",),
)


def installed() -> tuple[str, ...]:
    """Names of the installed backends, the preferred ones first."""
    names = {MEMORY.name, *(entry.name for entry in _entries())}
    ranked = [name for name in PREFERENCE if name in names]
    return (*ranked, *sorted(names.difference(PREFERENCE)))


def find(name: str) -> BackendPlugin:
    """The backend of that name.

    Raises:
        ConfigError: no backend is known by that name.
        BackendUnavailableError: it is known and not installed, or does not load.
    """
    if name == MEMORY.name:
        return MEMORY
    for entry in _entries():
        if entry.name == name:
            return _load(entry)
    if name in INSTALL:
        raise BackendUnavailableError(f"backend {name!r} is not installed: {INSTALL[name]}")
    have = installed()
    others = [f"; {other}: {how}" for other, how in INSTALL.items() if other not in have]
    raise ConfigError(f"unknown backend {name!r}; installed are {', '.join(have)}{''.join(others)}")


def _entries() -> list[EntryPoint]:
    return list(entry_points(group=GROUP))


def _load(entry: EntryPoint) -> BackendPlugin:
    try:
        plugin = entry.load()
    except (ImportError, AttributeError) as error:
        raise BackendUnavailableError(
            f"backend {entry.name!r} is installed and does not load ({entry.value}): {error}"
        ) from error
    if not isinstance(plugin, BackendPlugin):
        raise BackendUnavailableError(
            f"backend {entry.name!r}: {entry.value} is no BackendPlugin but a "
            f"{type(plugin).__name__}; its version does not fit this hicache-shared"
        )
    return plugin
