"""SGLang's flags for a backend."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from hicache_shared.plugins import BackendPlugin

MEMORY_FLAGS = (
    ("--enable-hierarchical-cache",),
    ("--hicache-mem-layout", "page_first"),
    ("--hicache-io-backend", "kernel"),
    ("--hicache-storage-backend", "dynamic"),
)
"""The layout that every pool can be stored in, and the only way of copying that goes with it
(SGLang 0.5.23 changes the layout of ``page_first`` with ``direct``)."""

EXTRA_CONFIG_FLAG = "--hicache-storage-backend-extra-config"


@dataclass(frozen=True, slots=True)
class Identity:
    """What SGLang does not tell a backend about the model; None where not given."""

    model_path: str | None = None
    revision: str | None = None
    kv_cache_dtype: str | None = None

    def settings(self) -> dict[str, str]:
        """The keys of the extra config that say it."""
        given = {
            "model_id": self.model_path,
            "revision": self.revision,
            "kv_cache_dtype": self.kv_cache_dtype,
        }
        return {key: value for key, value in given.items() if value is not None}

    def flags(self) -> list[tuple[str, ...]]:
        """SGLang's own flags that say it."""
        given = {
            "--model-path": self.model_path,
            "--revision": self.revision,
            "--kv-cache-dtype": self.kv_cache_dtype,
        }
        return [(flag, value) for flag, value in given.items() if value is not None]

    def hint(self) -> str | None:
        """What is missing, and what it would be good for."""
        missing = [
            key for key in ("model_id", "revision", "kv_cache_dtype") if key not in self.settings()
        ]
        if not missing:
            return None
        return (
            f"not in the extra config: {', '.join(missing)}. Pages are kept apart by them, and "
            "a backend is not told them: give --model-path, --revision, --kv-cache-dtype"
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """Flags of SGLang's server, each with its value, and what to look at before using them."""

    backend: str
    flags: tuple[tuple[str, ...], ...]
    extra_config: dict[str, Any]
    hints: tuple[str, ...]

    def shell_text(self) -> str:
        """One flag a line, quoted for a shell and continued over the lines."""
        return " \\\n".join(shlex.join(flag) for flag in self.flags)

    def as_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "flags": [word for flag in self.flags for word in flag],
            "extra_config": self.extra_config,
            "hints": list(self.hints),
        }


def launch(plugin: BackendPlugin, identity: Identity, master: str | None) -> Launch:
    """The flags that make SGLang load a backend, zero-copy."""
    extra_config = {
        "backend_name": plugin.name,
        "module_path": plugin.module_path,
        "class_name": plugin.class_name,
        "interface_v1": 1,
        **plugin.launch_config(master),
        **identity.settings(),
    }
    hint = identity.hint()
    return Launch(
        backend=plugin.name,
        flags=(*identity.flags(), *MEMORY_FLAGS, (EXTRA_CONFIG_FLAG, json.dumps(extra_config))),
        extra_config=extra_config,
        hints=((hint,) if hint else ()) + plugin.launch_hints,
    )
