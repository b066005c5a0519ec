"""Writes down what SGLang calls of a storage backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock


def _transfers(transfers: Sequence[Any]) -> str:
    return "".join(
        f"\n    {transfer.name:29s} {_of(transfer.keys, 'key'):8s} "
        f"{_of(transfer.host_indices, 'slot'):11s} {transfer.hit_policy.value:14s} "
        f"{'its own' if transfer.indices_from_pool is None else transfer.indices_from_pool}"
        for transfer in transfers
    )


def _of(things: Any, word: str) -> str:
    if things is None:
        return f"no {word}s"
    return f"{len(things)} {word}" + "s" * (len(things) != 1)


def _class(value: Any) -> str:
    return type(value).__name__


DESCRIPTIONS: dict[str, Callable[..., str]] = {
    "__init__": lambda config, kwargs: f"{_class(config)}, {kwargs}",
    "register_mem_pool_host": _class,
    "register_mem_host_pool_v2": lambda pool, name: f"{_class(pool)}, {name}",
    "on_host_pools_registered": lambda: "",
    "batch_exists_v2": lambda keys, transfers, extra_info: (
        f"{_of(keys, 'key')}{_transfers(transfers or ())}"
    ),
    "batch_get_v2": lambda transfers, extra_info: _transfers(transfers),
    "batch_set_v2": lambda transfers, extra_info: _transfers(transfers),
    "batch_exists": lambda keys, extra_info: _of(keys, "key"),
    "batch_get_v1": lambda keys, slots, extra_info: f"{_of(keys, 'key')}, {_of(slots, 'slot')}",
    "batch_set_v1": lambda keys, slots, extra_info: f"{_of(keys, 'key')}, {_of(slots, 'slot')}",
    "clear": lambda: "",
    "close": lambda: "",
}
"""By method, what a line says of its arguments."""


@contextmanager
def recorded(backend_class: type) -> Iterator[list[str]]:
    """The calls of every backend of a class, one text each, in their order."""
    calls: list[str] = []

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{name}({DESCRIPTIONS[name](*args, **kwargs)})")
            return method(self, *args, **kwargs)

        return call

    noted: dict[str, Any] = {
        name: noting(name, getattr(backend_class, name)) for name in DESCRIPTIONS
    }
    with mock.patch.multiple(backend_class, **noted):
        yield calls
