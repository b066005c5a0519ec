"""Keys of 16 bytes that are made of every bit of what they stand for."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_ucm.keys import KEY_BYTES, block_ids

DIGEST = bytes(range(16))

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

page_hashes = st.binary(max_size=8).map(lambda seed: sha256(seed).hexdigest())
any_text = st.one_of(page_hashes, st.text(max_size=70))


def key(page: str, digest: bytes = DIGEST) -> bytes:
    return block_ids(digest, [page])


@patient
@given(st.lists(any_text, min_size=1, max_size=12))
def test_a_key_depends_on_its_page_alone_and_not_on_its_neighbours(pages: list[str]) -> None:
    joined = block_ids(DIGEST, pages)
    assert len(joined) == KEY_BYTES * len(pages)
    cut = [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]
    assert cut == [key(page) for page in pages]


@patient
@given(st.lists(any_text, min_size=2, max_size=2, unique=True))
def test_two_pages_have_two_keys(pages: list[str]) -> None:
    assert key(pages[0]) != key(pages[1])


@patient
@given(page_hashes, st.integers(0, 63))
def test_every_digit_of_a_page_hash_counts(page: str, place: int) -> None:
    digit = "0" if page[place] != "0" else "1"
    assert key(page) != key(page[:place] + digit + page[place + 1 :])


@patient
@given(any_text, st.integers(0, 127))
def test_every_bit_of_the_digest_counts(page: str, bit: int) -> None:
    other = bytearray(DIGEST)
    other[bit // 8] ^= 1 << bit % 8
    assert key(page) != key(page, bytes(other))


@pytest.mark.parametrize(
    "alike", [lambda page: page.upper(), lambda page: page[:2] + " " + page[2:]]
)
def test_texts_that_python_reads_as_the_same_hex_are_different_pages(alike: object) -> None:
    page = sha256(b"page").hexdigest()
    assert callable(alike)
    assert key(page) != key(alike(page))


def test_page_hashes_of_lengths_that_make_up_for_each_other_are_not_joined() -> None:
    one, two = sha256(b"1").hexdigest(), sha256(b"2").hexdigest()
    shifted = [one[:-2], one[-2:] + two]
    assert block_ids(DIGEST, shifted) != block_ids(DIGEST, [one, two])


def test_keys_do_not_change_between_versions() -> None:
    """What is on disk is found by them; a change here is a change of the key schema."""
    page = sha256(b"page").hexdigest()
    assert key(page).hex() == "b44a721114f8f326e9ece4b218b17bec"
    assert key("page").hex() == "7a12e67f1bd3c1c935e62105aa427466"
