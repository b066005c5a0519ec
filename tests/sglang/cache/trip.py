"""A prompt's trip to storage and back."""

from __future__ import annotations

from tests.sglang.cache.serving import Rank, prompt

PAGES = 4


def came_back(rank: Rank) -> None:
    """Write a prompt through to storage, forget and wipe all, and restore it to other pages.

    Raises:
        AssertionError: something did not come back, or not as it was.
    """
    device, tokens = rank.device, prompt(rank.device, PAGES)
    device.fill(seed=1)
    rank.compute(tokens)
    written = rank.on_device(tokens)
    assert written.tokens == len(tokens), "not all of it was on the device"
    rank.backed_up()

    rank.flush()
    device.allocate(device.page_size)  # so that it comes back to other pages
    assert rank.on_device(tokens).tokens == 0, "the device did not forget"
    assert rank.fetch(tokens) == len(tokens), "not all of it came from storage"

    found = rank.on_device(tokens)
    assert found.tokens == len(tokens), "not all of it came to the device"
    assert found.pages != written.pages, "it came back to the same pages"
    wrong = [pool for pool in written.bytes if found.bytes[pool] != written.bytes[pool]]
    assert not wrong, f"other bytes came back to {wrong}"
