"""The one configuration loader of every adapter.

A setting comes from the extra config (``--hicache-storage-backend-extra-config``), else
from the environment, else from the adapter's configuration file, else from its default;
key by key. Everything that is wrong is reported at once, with where it came from.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from hicache_shared.errors import ConfigError

SGLANG_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "allocator",
        "file_storage_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
        "enable_metadata_cache",
        "metadata_ttl",
    }
)
"""Keys of the extra config that SGLang itself reads or adds (0.5.23); not ours to judge."""

CONFIG_FILE_KEY = "config_file"
"""The key of the extra config that names the configuration file."""

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])i?)?b?", re.IGNORECASE | re.ASCII)
_MOST_BYTES = 2**63 - 1


def parse_bytes(value: object) -> int:
    """A number of bytes from an int or from text: ``"512mb"``, ``"4g"``, ``"0.5 GiB"``.

    Units are binary (1 kb = 1024 bytes), as in SGLang's in-tree adapters; letter case and
    the trailing ``b`` or ``ib`` do not matter.

    Raises:
        ValueError: the value is negative, fractional, 2**63 or more, or not a size at all.
    """
    expected = "expected bytes as a whole number or text with a unit (k, m, g, t; 1k = 1024)"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(expected)
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip())
        if found is None:
            raise ValueError(expected)
        unit = (found[2] or "").lower()
        number = Decimal(found[1]) * _UNITS[unit]
        if not unit and number % 1:
            raise ValueError(f"{expected}; a fraction needs a unit")
        value = int(number)
    if value > _MOST_BYTES:
        raise ValueError(f"{expected}, at most 2**63 - 1")
    if not value >= 0 or value != int(value):
        raise ValueError(f"{expected}, not negative")
    return int(value)


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


ByteSize = Annotated[int, BeforeValidator(parse_bytes)]
"""Bytes, 0 allowed; see :func:`parse_bytes`."""

PositiveByteSize = Annotated[int, Field(gt=0), BeforeValidator(parse_bytes)]
Number = Annotated[float, BeforeValidator(_no_bool)]
Count = Annotated[int, BeforeValidator(_no_bool)]


def setting(
    default: Any = ...,
    *,
    env: str | tuple[str, ...],
    example: Any,
    description: str,
    per_node: bool = False,
    **limits: Any,
) -> Any:
    """A documented field of a configuration.

    Args:
        default: the value where nothing is given.
        env: the environment variable of the setting; the first of several that is set wins.
        example: a good value, shown in error messages.
        per_node: the value differs by machine, while SGLang sends one extra config to all
            of them; so extra config and environment must not disagree.
        limits: pydantic's constraints (``gt``, ``le``, ...).
    """
    names = (env,) if isinstance(env, str) else env
    extra: dict[str, Any] = {"env": list(names), "per_node": per_node}
    return Field(
        default, description=description, examples=[example], json_schema_extra=extra, **limits
    )


class CommonConfig(BaseModel):
    """Settings of every adapter."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    config_file_env: ClassVar[str | None] = None
    """The environment variable that names the adapter's configuration file."""

    namespace: str = setting(
        "",
        env="HICACHE_NAMESPACE",
        example="team-a",
        description="The operator's own name that keeps deployments apart on a shared server.",
    )
    model_id: str | None = setting(
        None,
        env="HICACHE_MODEL_ID",
        example="deepseek-ai/DeepSeek-V4-Flash",
        description="What the checkpoint is. Without it the served model name stands in, and "
        "two checkpoints served under one name would share pages.",
    )
    revision: str | None = setting(
        None,
        env="HICACHE_REVISION",
        example="5f0a2c1",
        description="The checkpoint's revision; pages of another revision are never read.",
    )
    kv_cache_dtype: str | None = setting(
        None,
        env="HICACHE_KV_CACHE_DTYPE",
        example="fp8_e4m3",
        description="SGLang's --kv-cache-dtype. SGLang does not tell it to a backend, and keeps "
        "fp8 pages as uint8.",
    )
    draft_model_id: str | None = setting(
        None,
        env="HICACHE_DRAFT_MODEL_ID",
        example="deepseek-ai/DeepSeek-V4-Flash-MTP",
        description="The checkpoint of the draft model under speculative decoding, where its KV "
        "has pools of its own.",
    )
    deadline_s: Number = setting(
        5.0,
        env="HICACHE_DEADLINE_S",
        example=5.0,
        description="Seconds after which a call gives up; at least 0.05, for a call to get "
        "anywhere, and at most 10, since SGLang waits that long for its storage threads.",
        ge=0.05,
        le=10,
    )
    drain_s: Number = setting(
        8.0,
        env="HICACHE_DRAIN_S",
        example=8.0,
        description="Seconds that closing waits for calls still running.",
        ge=0,
        le=60,
    )


@dataclass(frozen=True, slots=True)
class SettingDoc:
    """What documentation says of one setting."""

    name: str
    env: tuple[str, ...]
    default: Any
    """``...`` where the setting must be given."""
    example: Any
    description: str


def settings_of(config_type: type[CommonConfig]) -> list[SettingDoc]:
    """Every setting of a configuration, for documentation and the command line."""
    return [
        SettingDoc(
            name=name,
            env=_env_names(info),
            default=... if info.is_required() else info.default,
            example=(info.examples or [None])[0],
            description=info.description or "",
        )
        for name, info in config_type.model_fields.items()
    ]


C = TypeVar("C", bound=CommonConfig)


def load(
    config_type: type[C],
    extra_config: Mapping[str, Any] | None,
    environ: Mapping[str, str] = os.environ,
) -> C:
    """The configuration: extra config over environment over file, key by key.

    A ``None`` in the extra config or the file, and an empty environment variable, count as
    not given. The file is JSON, or TOML where its name ends so.

    Raises:
        ConfigError: all that is wrong, one line a problem.
    """
    problems: list[str] = []
    extra = _checked_keys(config_type, extra_config or {}, "extra config", problems)
    path = extra.pop(CONFIG_FILE_KEY, None) or environ.get(config_type.config_file_env or "")
    file_text = f"file {path}"
    from_file = _checked_keys(
        config_type, _read_file(path, problems) if path else {}, file_text, problems
    )
    from_file.pop(CONFIG_FILE_KEY, None)
    values: dict[str, Any] = dict(from_file)
    origins = dict.fromkeys(from_file, file_text)
    for name, info in config_type.model_fields.items():
        variable = next((v for v in _env_names(info) if environ.get(v)), None)
        if variable is not None:
            values[name] = environ[variable]
            origins[name] = f"environment variable {variable}"
        if name not in extra:
            continue
        if variable is not None and _is_per_node(info) and extra[name] != environ[variable]:
            problems.append(
                f"{name}: the extra config says {extra[name]!r} and environment variable "
                f"{variable} says {environ[variable]!r}; SGLang sends one extra config to all "
                "nodes, so leave it out there and set the variable on each node"
            )
        values[name] = extra[name]
        origins[name] = "extra config"
    try:
        config = config_type.model_validate(values)
    except ValidationError as error:
        problems += [_problem(config_type, e, origins) for e in error.errors(include_url=False)]
    if problems:
        raise ConfigError(
            f"{config_type.__name__}: {len(problems)} problem(s)\n  " + "\n  ".join(problems)
        )
    return config


def _checked_keys(
    config_type: type[CommonConfig], given: Any, origin: str, problems: list[str]
) -> dict[str, Any]:
    """The known keys that have a value; each unknown one becomes a problem."""
    if not isinstance(given, Mapping):
        problems.append(f"{origin}: expected keys and values, got {type(given).__name__}")
        return {}
    known = [*config_type.model_fields, CONFIG_FILE_KEY]
    kept = {}
    for key, value in given.items():
        if key in known:
            if value is not None:
                kept[key] = value
        elif key not in SGLANG_KEYS:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0)
            problems.append(f"{key}: unknown key (from {origin}); the nearest known is {near[0]!r}")
    return kept


def _read_file(path: Any, problems: list[str]) -> Any:
    try:
        text = Path(path).read_text(encoding="utf-8")
        return tomllib.loads(text) if str(path).endswith(".toml") else json.loads(text)
    except (OSError, TypeError, ValueError, RecursionError) as error:
        problems.append(f"file {path}: cannot be read as a configuration: {error}")
        return {}


def _problem(config_type: type[CommonConfig], error: Any, origins: dict[str, str]) -> str:
    """One pydantic error in our words."""
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    info = config_type.model_fields[name]
    example = f"for example {name}={(info.examples or [None])[0]!r}"
    if error["type"] == "missing":
        variables = " or ".join(_env_names(info))
        return (
            f"{name}: not given; set it in the extra config, in environment variable "
            f"{variables}, or in the configuration file; {example}"
        )
    message = message.replace("Input should be", "expected")
    return f"{name}: {error['input']!r} (from {origins[name]}) is wrong: {message}; {example}"


def _env_names(info: FieldInfo) -> tuple[str, ...]:
    extra = info.json_schema_extra
    names = extra.get("env", []) if isinstance(extra, dict) else []
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def _is_per_node(info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    return isinstance(extra, dict) and extra.get("per_node") is True
