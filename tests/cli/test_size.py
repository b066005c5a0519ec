"""The memory a round trip may take: advice that is right the first time."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_shared.cli.size import LIMIT_BYTES, Size, check
from hicache_shared.errors import ConfigError
from hicache_shared.hostpool import PRESETS, legal_layouts, preset

SIZES = st.sampled_from(PRESETS).flatmap(
    lambda model: st.builds(
        Size,
        spec=st.just(preset(model)),
        layout=st.sampled_from(legal_layouts(preset(model))),
        layers_div=st.integers(1, 100),
        pages=st.one_of(st.integers(1, 1000), st.integers(1, 10**7)),
    )
)


def advice(size: Size) -> dict[str, int]:
    """What the refusal says to take, by option; nothing where there is none."""
    try:
        check(size)
    except ConfigError as error:
        return {name: int(n) for name, n in re.findall(r"--(layers-div|pages) (\d+)", str(error))}
    return {}


@given(SIZES)
def test_following_the_advice_once_succeeds_and_nothing_less_does(size: Size) -> None:
    offered = advice(size)
    assert bool(offered) == (size.needed() > LIMIT_BYTES)
    if "layers-div" in offered:
        divisor = offered["layers-div"]
        check(replace(size, layers_div=divisor))
        assert not replace(size, layers_div=divisor - 1).fits()
    elif offered:
        assert not replace(size, layers_div=10**9).fits()
    if "pages" in offered:
        check(replace(size, pages=offered["pages"]))
        assert not replace(size, pages=offered["pages"] + 1).fits()


def test_no_divisor_is_offered_where_one_layer_is_too_much() -> None:
    size = Size(preset("deepseek-v4-flash"), "page_first", 1, 100_000)
    assert advice(size) == {"pages": 72}


def test_a_page_that_does_not_fit_at_all_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_shared.cli.size.LIMIT_BYTES", 1000)
    with pytest.raises(ConfigError, match="take a smaller model"):
        check(Size(preset("mla"), "page_first", 1, 1))
