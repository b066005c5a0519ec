"""One loader: precedence, sizes, and errors that say what to change."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hicache_shared.config import (
    SGLANG_KEYS,
    ByteSize,
    CommonConfig,
    PositiveByteSize,
    load,
    parse_bytes,
    setting,
    settings_of,
)
from hicache_shared.errors import ConfigError


class Sample(CommonConfig):
    config_file_env: ClassVar[str | None] = "SAMPLE_CONFIG"

    address: str = setting(env="SAMPLE_ADDRESS", example="10.0.0.1:5", description="where")
    size: ByteSize = setting(1024, env="SAMPLE_SIZE", example="4gb", description="how much")
    part: PositiveByteSize = setting(1, env="SAMPLE_PART", example="1mb", description="not none")
    deep: bool = setting(
        False, env=("SAMPLE_DEEP", "OLD_SAMPLE_DEEP"), example=True, description="how"
    )
    host: str = setting(
        "localhost", env="SAMPLE_HOST", example="node1", description="which", per_node=True
    )


ADDRESS = {"address": "a:1"}


def problem_of(extra: Any, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Sample, extra, environ or {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512mb", 512 * 2**20),
        ("4g", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        ("0.5gb", 2**29),
        ("1tb", 2**40),
        ("1073741824", 2**30),
        ("64K", 2**16),
        ("7b", 7),
        (" 1 MB ", 2**20),
        ("0", 0),
        (4096, 4096),
        (1e9, 10**9),
    ],
)
def test_sizes_parse_with_binary_units(text: object, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        -1,
        "-1",
        "-4gb",
        "",
        "gb",
        "4xb",
        "4 gb!",
        "1.5",
        "4ib",
        1.5,
        float("nan"),
        float("inf"),
        True,
        None,
        [],
        "1e3",
        "nan",
        "9999999tb",
        "٤gb",
    ],
)
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected bytes"):
        parse_bytes(text)


@given(
    st.integers(0, 2**20), st.sampled_from("kmgt"), st.sampled_from(["", "b", "ib"]), st.booleans()
)
def test_a_size_is_number_times_unit(number: int, unit: str, tail: str, upper: bool) -> None:
    text = f"{number}{unit}{tail}"
    expected = number * 1024 ** ("kmgt".index(unit) + 1)
    assert parse_bytes(text.upper() if upper else text) == expected


@given(st.decimals(0, 1000, places=3), st.sampled_from("kmgt"))
def test_a_fraction_of_a_unit_is_rounded_down_to_bytes(number: Decimal, unit: str) -> None:
    exact = number * 1024 ** ("kmgt".index(unit) + 1)
    assert 0 <= exact - parse_bytes(f"{number}{unit}") < 1


def test_extra_config_goes_over_environment_over_file_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"address": "file", "size": "1k", "part": "3k", "deep": True}))
    environ = {"SAMPLE_CONFIG": str(file), "SAMPLE_ADDRESS": "env", "SAMPLE_SIZE": "2k"}
    config = load(Sample, {"address": "extra"}, environ)
    assert (config.address, config.size, config.part, config.deep) == ("extra", 2048, 3072, True)
    assert config.namespace == ""


def test_the_extra_config_can_name_the_file_which_may_be_toml(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('address = "t"\nsize = "1m"\ndeadline_s = 2.5\n')
    config = load(Sample, {"config_file": str(file)}, {"SAMPLE_CONFIG": "/nowhere"})
    assert (config.address, config.size, config.deadline_s) == ("t", 2**20, 2.5)


def test_the_first_variable_that_is_set_wins_and_an_empty_one_is_not_set() -> None:
    assert load(Sample, ADDRESS, {"SAMPLE_DEEP": "", "OLD_SAMPLE_DEEP": "1"}).deep is True
    assert load(Sample, ADDRESS, {"SAMPLE_DEEP": "0", "OLD_SAMPLE_DEEP": "1"}).deep is False


def test_null_in_the_extra_config_is_not_given() -> None:
    assert load(Sample, {**ADDRESS, "size": None}, {"SAMPLE_SIZE": "5"}).size == 5


def test_keys_of_sglang_are_ignored() -> None:
    assert load(Sample, {**ADDRESS, **dict.fromkeys(SGLANG_KEYS, 1)}, {}).address == "a:1"


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    text = problem_of({**ADDRESS, "deadline": 3})
    assert "deadline: unknown key (from extra config); the nearest known is 'deadline_s'" in text


def test_an_unknown_key_of_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"adress": "x"}')
    text = problem_of(ADDRESS, {"SAMPLE_CONFIG": str(file)})
    assert f"adress: unknown key (from file {file})" in text
    assert "'address'" in text


@pytest.mark.parametrize(
    ("extra", "environ", "origin"),
    [
        ({"size": "many"}, {}, "extra config"),
        ({}, {"SAMPLE_SIZE": "many"}, "environment variable SAMPLE_SIZE"),
    ],
)
def test_a_wrong_value_names_field_value_origin_expectation_and_example(
    extra: dict[str, Any], environ: dict[str, str], origin: str
) -> None:
    text = problem_of({**ADDRESS, **extra}, environ)
    assert f"size: 'many' (from {origin}) is wrong: expected bytes" in text
    assert "for example size='4gb'" in text


def test_a_missing_value_names_the_ways_to_give_it() -> None:
    text = problem_of({})
    assert "address: not given" in text
    assert "SAMPLE_ADDRESS" in text
    assert "for example address='10.0.0.1:5'" in text


def test_all_problems_are_reported_at_once() -> None:
    text = problem_of({"sise": 1, "part": 0, "deadline_s": 11}, {"SAMPLE_DEEP": "maybe"})
    assert "5 problem(s)" in text
    for word in ("sise", "part: 0", "deadline_s: 11", "deep: 'maybe'", "address: not given"):
        assert word in text


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2**63, "at most 2**63 - 1"),
        ("8388608tb", "at most 2**63 - 1"),
        (float("inf"), "at most 2**63 - 1"),
        (-1, "not negative"),
    ],
)
def test_a_size_out_of_range_is_told_which_end_it_is_beyond(size: object, words: str) -> None:
    text = problem_of({**ADDRESS, "size": size})
    assert f"size: {size!r} (from extra config) is wrong" in text
    assert f"{words}; for example size='4gb'" in text


def test_the_largest_size_is_accepted() -> None:
    assert parse_bytes(2**63 - 1) == 2**63 - 1


@pytest.mark.parametrize("value", [0, -1, 10.5, True, "soon", "nan", 1e-300, 0.049])
def test_the_deadline_is_long_enough_for_a_call_and_at_most_what_sglang_waits(
    value: object,
) -> None:
    text = problem_of({**ADDRESS, "deadline_s": value})
    assert f"deadline_s: {value!r}" in text
    assert "for example deadline_s=5.0" in text


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.json", "{"),
        ("c.json", "[1, 2]"),
        ("c.json", None),
        ("c.json", DEEP),
        ("c.json", '{"a":' * 200_000),
        ("c.toml", f"a = {DEEP}"),
    ],
    ids=["broken", "list", "absent", "deep list", "deep object", "deep TOML"],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: str | None
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    assert str(file) in problem_of(ADDRESS, {"SAMPLE_CONFIG": str(file)})


def test_a_setting_of_the_node_must_not_contradict_the_broadcast_config() -> None:
    text = problem_of({**ADDRESS, "host": "a"}, {"SAMPLE_HOST": "b"})
    assert "host: the extra config says 'a'" in text
    assert load(Sample, {**ADDRESS, "host": "a"}, {"SAMPLE_HOST": "a"}).host == "a"


def test_a_configuration_does_not_change() -> None:
    config = load(Sample, ADDRESS, {})
    with pytest.raises(ValidationError):
        config.address = "b"


def test_every_setting_is_documented() -> None:
    docs = settings_of(Sample)
    assert {doc.name for doc in docs} == set(Sample.model_fields)
    for doc in docs:
        assert doc.description
        assert doc.env
    assert next(doc for doc in docs if doc.name == "address").default is ...
