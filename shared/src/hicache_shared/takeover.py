"""Opt-in: our backends under the names of SGLang's in-tree ones.

``HICACHE_ADAPTERS_OVERRIDE=mooncake,mori`` makes ``--hicache-storage-backend mooncake`` load
``MooncakeBackend`` and ``mori`` load the UMBP backend, so that users keep their flags, SGLang's
host allocator for the name, and what SGLang allows to that name alone. Off by default.

This package holds the entry point, not the adapters: there is one plugin to name in
``SGLANG_PLUGINS``, and an adapter that the variable names and nobody installed is noticed.

SGLang runs plugins early in each of its processes and goes on when one raises. So nothing is
imported here before the variable is set, and a wrong variable puts :class:`RefusedBackend` under
the names: SGLang's own backends are never used in silence where ours were asked for.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from hicache_shared import plugins
from hicache_shared.errors import ConfigError, HiCacheError

log = logging.getLogger(__name__)

VARIABLE = "HICACHE_ADAPTERS_OVERRIDE"
"""In-tree names to take over, separated by commas."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is loaded under an in-tree name.

    Attributes:
        backend: our name of it (``hicache.backends``).
        module_path, class_name: the class; made as ``cls(storage_config, host_pool)``.
    """

    backend: str
    module_path: str
    class_name: str


ADAPTERS = {
    "mooncake": Adapter("mooncake", "hicache_mooncake", "MooncakeBackend"),
    "mori": Adapter("umbp", "hicache_umbp.in_tree", "MoriBackend"),
}
"""The in-tree names that can be taken over."""

REFUSED = Adapter("", "hicache_shared.refused", "RefusedBackend")
"""What stands under every such name while the variable is wrong."""


def chosen(text: str) -> dict[str, Adapter]:
    """The adapters that the variable's text names, by in-tree name.

    Raises:
        ConfigError: a name that cannot be taken over.
        BackendUnavailableError: an adapter is not installed, or does not load.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in ADAPTERS]
    if wrong:
        raise ConfigError(
            f"{VARIABLE}={text}: {', '.join(map(repr, wrong))} cannot be taken over; it takes "
            f"SGLang's names {', '.join(ADAPTERS)}, separated by commas"
        )
    for name in names:
        plugins.find(ADAPTERS[name].backend)
    return {name: ADAPTERS[name] for name in names}


def register() -> None:
    """Put the chosen adapters into SGLang's factory: an entry point of ``sglang.srt.plugins``."""
    text = os.environ.get(VARIABLE, "")
    if not text.strip():
        return
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    try:
        adapters = chosen(text)
    except HiCacheError as error:
        log.error("%s. Storage backends %s are refused until then", error, ", ".join(ADAPTERS))
        adapters = dict.fromkeys(ADAPTERS, REFUSED)
    else:
        # A warning, since SGLang sets up its logging after its plugins: less would not be seen.
        loaded = ", ".join(
            f"{name} as {a.module_path}.{a.class_name}" for name, a in adapters.items()
        )
        log.warning("%s: SGLang loads storage backend %s", VARIABLE, loaded)
    for name, adapter in adapters.items():
        StorageBackendFactory.register_backend(name, adapter.module_path, adapter.class_name)
