"""How much memory a round trip may take, and what to ask for where it would take more."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from hicache_shared.cli.host import Host
from hicache_shared.errors import ConfigError
from hicache_shared.hostpool import ModelSpec

GB = 1_000_000_000
LIMIT_BYTES = 4 * GB
"""Most bytes of host pools, store and copies together."""

PASSES = 2
"""How often a round trip stores all pages. Both count, since a backend need not be able to
forget the first."""

MOST_LAYERS = 2**16
"""Dividing by as many leaves every pool of any model one layer, and more changes nothing."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a round trip's memory depends on."""

    spec: ModelSpec
    layout: str
    layers_div: int
    pages: int

    def page_bytes(self) -> int:
        """Bytes of a page of all pools."""
        host = Host(self.spec, layout=self.layout, layers_div=self.layers_div, pages=1, seed=0)
        return sum(map(host.page_bytes, host.pools))

    def needed(self) -> int:
        """Host pages, as many copies as the chain is long, and what each pass stores."""
        return self.page_bytes() * (2 * self.pages + 1 + self.pages + PASSES * self.pages)

    def fits(self) -> bool:
        return self.needed() <= LIMIT_BYTES

    def most_pages(self) -> int:
        """The most pages that fit with these layers; 0 where not even one does."""
        return max(0, (LIMIT_BYTES // self.page_bytes() - 1) // (3 + PASSES))

    def least_layers_div(self) -> int | None:
        """The smallest divisor with which these pages fit; None where one layer is too much."""
        divisors = range(self.layers_div, MOST_LAYERS + 1)
        at = bisect_left(divisors, True, key=lambda n: replace(self, layers_div=n).fits())
        return divisors[at] if at < len(divisors) else None


def check(size: Size) -> None:
    """Refuse what needs more memory than is used.

    Raises:
        ConfigError: with the least change to each option that makes it fit.
    """
    if size.fits():
        return
    divisor, pages = size.least_layers_div(), size.most_pages()
    advice = [f"--layers-div {divisor} or more"] if divisor else []
    advice += [f"--pages {pages} at most"] if pages else []
    raise ConfigError(
        f"{size.pages} pages of {size.spec.name!r} need {size.needed() // 10**8 / 10:.1f} GB of "
        f"host memory and store, and at most {LIMIT_BYTES / GB:.0f} GB are used: take "
        f"{', or '.join(advice) or 'a smaller model'}"
    )
