"""A backend of which only the class is known: any ``HiCacheStorage``, by dotted name."""

from __future__ import annotations

import importlib
import json
from importlib.metadata import packages_distributions
from typing import Any, ClassVar, cast

from hicache_shared.contract import HiCacheStorage, HiCacheStorageConfig
from hicache_shared.errors import ConfigError
from hicache_shared.testing.harness import Capabilities, Harness, storage_config, with_extra


class NamedClassHarness(Harness):
    """Makes backends as SGLang's ``dynamic`` factory does: ``cls(config, {})``.

    There is no way behind the contract, so every capability is off but one of ``zero_copy``,
    which ``"interface_v1": 1`` in the extra config turns on, as in SGLang, and ``flat``.
    """

    backend_class: ClassVar[type[HiCacheStorage]]
    extra_config: ClassVar[dict[str, Any]]

    def make(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        return self.backend_class(with_extra(config, self.extra_config), {})  # type: ignore[call-arg]


def harness_of(dotted: str, extra_config: dict[str, Any]) -> type[NamedClassHarness]:
    """A harness of ``package.module:Class``.

    Raises:
        ConfigError: there is no such class, it is no ``HiCacheStorage``, or it lacks methods.
    """
    module_name, _, class_name = dotted.partition(":")
    if not (module_name and class_name):
        raise ConfigError(f"expected package.module:Class, got {dotted!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{module_name} cannot be imported ({type(error).__name__}: {error}); it has to be "
            "installed, on PYTHONPATH, or in this folder"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(f"{module_name} has no {class_name}; give package.module:Class")
    if not (isinstance(found, type) and issubclass(found, HiCacheStorage)):
        raise ConfigError(
            f"{dotted} is not a subclass of {HiCacheStorage.__module__}.HiCacheStorage, "
            "so SGLang's dynamic factory would refuse it"
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{dotted} is abstract: define {', '.join(missing)}")
    zero_copy = bool(extra_config.get("interface_v1"))
    members = {
        "name": class_name,
        "backend_class": found,
        "extra_config": extra_config,
        "capabilities": Capabilities(zero_copy=zero_copy, flat=not zero_copy),
        "distributions": tuple(packages_distributions().get(module_name.split(".")[0], ())),
    }
    return cast(
        type[NamedClassHarness], type(f"{class_name}Harness", (NamedClassHarness,), members)
    )


def try_out(harness_type: type[NamedClassHarness]) -> None:
    """Make one backend and close it, so that one that cannot be made is told once.

    Raises:
        ConfigError: what making or closing it raised.
    """
    config = storage_config(is_mla_model=True, identity=harness_type.capabilities.identity)
    step = "made by cls(HiCacheStorageConfig, {})"
    try:
        backend: Any = harness_type().make(config)
        step = "closed"
        backend.close()
    except Exception as error:
        extra_config = with_extra(config, harness_type.extra_config).extra_config
        raise ConfigError(
            f"{harness_type.name} cannot be {step}: {type(error).__name__}: {error}; "
            f"its extra config was {json.dumps(extra_config)}"
        ) from error
