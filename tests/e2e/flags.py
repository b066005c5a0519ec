"""SGLang's flags for one of our backends and a storage that is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hicache_shared.cli.launch import EXTRA_CONFIG_FLAG, MEMORY_FLAGS, Identity
from hicache_shared.plugins import find

WRITE_ALL_AND_WAIT = (
    *("--hicache-write-policy", "write_through"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)
"""Every page is written, not those that are used often; a prompt waits for its pages, however long.
So what comes from the storage is certain."""


def storage_flags(backend: str, identity: Identity, extra_config: Mapping[str, Any]) -> list[str]:
    """Those that ``hicache launch-args`` prints, and what makes a run repeatable.

    Args:
        backend: our name of it.
        identity: of the model.
        extra_config: where the storage is.
    """
    plugin = find(backend)
    config = {
        "backend_name": plugin.name,
        "module_path": plugin.module_path,
        "class_name": plugin.class_name,
        "interface_v1": 1,
        **identity.settings(),
        **extra_config,
    }
    words = (word for flag in (*identity.flags(), *MEMORY_FLAGS) for word in flag)
    return [*words, *WRITE_ALL_AND_WAIT, EXTRA_CONFIG_FLAG, json.dumps(config)]
