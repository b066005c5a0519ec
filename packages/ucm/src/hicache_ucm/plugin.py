"""What the ``hicache`` command needs to know of this adapter."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from hicache_shared.plugins import BackendPlugin, ServeOptions

DEFAULT_ROOT = "/mnt/kvcache"
"""A place to change: nothing makes this folder."""

LOG_LEVEL_VARIABLE = "UCM_LOG_LEVEL"
"""How much UCM logs. It reads this when the interpreter starts, so it cannot be set later."""


@contextmanager
def serve(options: ServeOptions) -> Iterator[dict[str, Any]]:
    """A temporary folder, in the one that is named if any; it goes when the context ends.

    UCM logs to standard output, and to ``log/`` in the current folder; in this context the
    former goes to standard error if a log level was asked for, and else both go nowhere.

    Raises:
        ConfigError: what is named cannot be a root.
        BackendUnavailableError: UCM is not installed, or the folder cannot be used.
    """
    from hicache_ucm.client import native_module
    from hicache_ucm.folder import check_root

    native_module()
    if options.master is not None:
        launch_config(options.master)
        check_root(Path(options.master), locks=False)
    with (
        tempfile.TemporaryDirectory(prefix="hicache-ucm-", dir=options.master) as folder,
        chdir(folder),
        _quiet(),
    ):
        yield {"root": folder}


def launch_config(root: str | None) -> dict[str, Any]:
    """The keys that name the root.

    Raises:
        ConfigError: that cannot be a root.
    """
    from hicache_shared.config import load
    from hicache_ucm.config import UcmConfig

    extra = {"root": DEFAULT_ROOT if root is None else root}
    load(UcmConfig, extra, environ={})
    return extra


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what native code writes to standard output away from it."""
    sys.stdout.flush()
    kept = os.dup(1)
    wanted = LOG_LEVEL_VARIABLE in os.environ
    elsewhere = os.dup(2) if wanted else os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(elsewhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(elsewhere)


plugin = BackendPlugin(
    name="ucm",
    module_path="hicache_ucm",
    class_name="UcmBackend",
    serve=serve,
    launch_config=launch_config,
    launch_hints=(
        "root: an existing folder on a local disk, or on a file system that all nodes share "
        "(--root); it has to be there on every node before SGLang starts",
        "capacity in the extra config bounds what is kept on disk; without it nothing is removed",
        "UCM_LOG_LEVEL=error UCM_LOG_TO_FILE=false in SGLang's environment keep UCM's log from "
        "its standard output and from log/ in the current folder",
    ),
)
