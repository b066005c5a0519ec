"""Bytes of pages are compared as bytes and shown in a few characters."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from hicache_shared.testing.page_bytes import PageBytes, bytes_of


@given(st.binary(), st.binary())
def test_they_are_equal_exactly_where_bytes_are(one: bytes, other: bytes) -> None:
    assert (PageBytes(one) == other) == (one == other)
    assert PageBytes(one) + other == one + other


def test_they_show_their_number_and_digest_however_many_they_are() -> None:
    many = bytes_of(np.zeros(1 << 20, np.uint8))
    assert repr(many) == "<1048576 bytes 30e14955ebf1>"
    assert repr([many + many]).startswith("[<2097152 bytes ")
