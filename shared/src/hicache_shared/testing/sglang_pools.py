"""The suite's host pools as objects of SGLang's own classes, over the same memory."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

MODULES = {
    "mha": ("pool_host.mha", "MHATokenToKVPoolHost"),
    "mha_asymmetric": ("pool_host.mha", "AsymmetricMHATokenToKVPoolHost"),
    "mla": ("pool_host.mla", "MLATokenToKVPoolHost"),
    "dsa_indexer": ("pool_host.dsa", "DSAIndexerPoolHost"),
    "mamba": ("pool_host.mamba", "MambaPoolHost"),
    "deepseek_v4_paged": ("memory_pool_host", "DeepSeekV4PagedHostPool"),
    "deepseek_v4_state": ("memory_pool_host", "DeepSeekV4StateHostPool"),
    "logical": ("memory_pool_host", "LogicalHostPool"),
}
"""SGLang 0.5.23's class of each kind of pool, under ``sglang.srt.mem_cache``."""

PROPERTIES = {
    "deepseek_v4_paged": ("item_bytes", "slot_page_size"),
    "deepseek_v4_state": ("state_page_bytes", "swa_page_size"),
}
"""Attributes of SGLang's that are properties of the suite's pools."""

ADDED: dict[str, Any] = {
    "pin_memory": False,
    "allocator": None,
    "slot_state_device_tensors": [],
}
"""Attributes that SGLang's constructors set and the suite's pools lack."""


class SGLangPools:
    """Makes them.

    Args:
        seen: turns an attribute of the suite's pool into SGLang's, arrays into tensors.

    Raises:
        ImportError: SGLang's modules of host pools, which import much more than its storage
            interface does, lack something.
    """

    def __init__(self, seen: Callable[[Any], Any]) -> None:
        self._seen = seen
        self._classes: dict[str, type[Any]] = {}
        for kind, (module, name) in MODULES.items():
            found = importlib.import_module(f"sglang.srt.mem_cache.{module}")
            self._classes[kind] = getattr(found, name)

    def twin(self, pool: Any) -> Any:
        """The pool as SGLang's class has it. Its constructor, which wants device pools, is not
        called: the attributes that it would set are those of ``pool``."""
        pool_class = self._classes[pool.kind]
        twin: Any = object.__new__(pool_class)
        values = vars(pool) | {name: getattr(pool, name) for name in PROPERTIES.get(pool.kind, ())}
        for name, value in values.items():
            if not name.startswith("_"):
                twin.__dict__[name] = self._seen(value)
        twin.__dict__.update(
            ADDED, device="cpu", lock=threading.RLock(), _size_per_token=pool.size_per_token
        )
        return twin
