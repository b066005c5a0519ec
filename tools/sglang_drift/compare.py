"""What differs between an expected contract and a release's, in words that say what to mend."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tools.sglang_drift.expected import ENUMS, FACTORY, PLUGINS, SINCE, UNTIL, Gone
from tools.sglang_drift.release import MIRROR
from tools.sglang_drift.shapes import (
    CALLS,
    CONSTANTS,
    EXTRA_KEYS,
    NAMES,
    REQUIRED,
    Contract,
    Section,
)

EXPECTED = "tools/sglang_drift/expected.py"

MEND = {
    CONSTANTS: "STORAGE_BATCH_PAGES in shared/src/hicache_shared/contract.py, and REST",
    CALLS: "the methods in shared/src/hicache_shared/backend.py, and REST",
    EXTRA_KEYS: "SGLANG_KEYS in shared/src/hicache_shared/config.py, and REST",
    NAMES: "what docs/sglang.md says of the takeover, and REST",
    FACTORY: "shared/src/hicache_shared/takeover.py and the constructors, and REST",
    PLUGINS: "the entry point in shared/pyproject.toml, and REST",
}
"""Where each part of the contract is mended; classes are mended in our copy."""


def key(version: str) -> tuple[int, ...]:
    """``0.5.23`` as numbers; what follows them (``rc1``, ``.post1``) is left out."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    if numbers is None:
        raise ValueError(f"{version!r} is no version of SGLang; for example 0.5.23")
    return tuple(map(int, numbers[0].split(".")))


def expected_of(
    version: str,
    newest: Contract,
    since: Mapping[str, str] = SINCE,
    until: Mapping[str, Gone] = UNTIL,
) -> Contract:
    """The contract expected of a release, from that of the newest."""
    contract = {
        section: {
            member: text
            for member, text in members.items()
            if key(version) >= key(since.get(f"{section}.{member}", "0"))
        }
        for section, members in newest.items()
    }
    for name, gone in until.items():
        section, _, member = name.partition(".")
        if key(version) <= key(gone.last):
            contract[section] = _inserted(contract[section], member, gone)
    return contract


def _inserted(section: Section, member: str, gone: Gone) -> Section:
    result: Section = {}
    for name, text in section.items():
        result[name] = text
        if name == gone.after:
            result[member] = gone.text
    return result


def differences(version: str, expected: Contract, found: Contract) -> list[str]:
    """One paragraph a difference: the release, the class, the member, both texts, the place."""
    return [
        f"SGLang {version}: {section}{line}\n  mend {_place(section)} in {EXPECTED}"
        for section in dict.fromkeys([*expected, *found])
        for line in _lines(section, expected.get(section), found.get(section))
    ]


def _place(section: str) -> str:
    return MEND.get(section, f"{MIRROR}, and SINCE or UNTIL")


def _lines(section: str, want: Section | None, got: Section | None) -> Iterator[str]:
    if got is None or want is None:
        yield ": expected it, and it is missing" if got is None else ": is new"
        return
    for member, text in want.items():
        if member not in got:
            yield f".{member}: expected {member} {text}, and it is missing"
        elif got[member] != text:
            yield f".{member}: expected {member} {text}, came {member} {got[member]}"
    names = list(got)
    for place, member in enumerate(names):
        if member not in want:
            after = f"after {names[place - 1]}" if place else "at the beginning"
            yield f".{member}: is new, as {member} {got[member]}, {after}"
    if section not in ENUMS:
        yield from _order(_fields(want), _fields(got))


def _fields(section: Section) -> list[str]:
    return [name for name, text in section.items() if text == REQUIRED or text.startswith("=")]


def _order(want: list[str], got: list[str]) -> Iterator[str]:
    common = set(want) & set(got)
    ours, theirs = ([name for name in names if name in common] for names in (want, got))
    for one, other in zip(ours, theirs, strict=True):
        if one != other:
            yield (
                f".{other}: its place is another: expected {one} there; "
                f"expected order {', '.join(ours)}; came {', '.join(theirs)}"
            )
            return
