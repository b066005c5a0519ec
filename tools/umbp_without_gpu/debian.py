"""Packages of Debian or Ubuntu, unpacked into a folder: nothing is installed.

The archive's address, proxies and credentials are those of the machine's own apt; only the
release differs, since the client was linked with the libraries of one. No root is needed.
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.umbp_without_gpu import SetUpError, run

LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
"""Where an unpacked package has its libraries."""


@dataclass(frozen=True)
class Distribution:
    """Where a distribution has what the client needs.

    Attributes:
        components: parts of its archive.
        release: the one with the gRPC (1.51) and protobuf (32) that the client was linked with.
        libraries: packages of that release.
        newer: a release whose C library is new enough for the client.
    """

    components: str
    release: str
    libraries: tuple[str, ...]
    newer: str


_EVERYWHERE = ("libpci3", "libnuma1", "libdrm2", "libdrm-amdgpu1", "zlib1g")
_DEBIAN = ("libgrpc++1.51", "libgrpc29", "libprotobuf32", "libabsl20220623")
_UBUNTU = tuple(f"{name}t64" for name in _DEBIAN)
DISTRIBUTIONS = {
    "debian": Distribution(
        components="main",
        release="bookworm",
        libraries=(*_DEBIAN, "libc-ares2", "libre2-9", "libssl3", *_EVERYWHERE),
        newer="trixie",
    ),
    "ubuntu": Distribution(
        components="main universe",
        release="noble",
        libraries=(*_UBUNTU, "libcares2", "libre2-10", "libssl3t64", *_EVERYWHERE),
        newer="noble",
    ),
}

C_LIBRARY = ("libc6", "libstdc++6", "libgcc-s1")


def distribution_name() -> str:
    """``debian`` or ``ubuntu``.

    Raises:
        SetUpError: the machine has neither.
    """
    name = platform.freedesktop_os_release()["ID"]
    if name not in DISTRIBUTIONS:
        raise SetUpError(
            f"this machine runs {name!r}; the libraries that the client needs are taken from "
            f"packages of {' or '.join(DISTRIBUTIONS)}: use a container of Debian 12 or later"
        )
    return name


def archive_address(uris: str) -> str:
    """The address of the distribution's archive among those that the machine's apt uses.

    It is the one that has a release ``X`` and its ``X-updates``, or else the first with a
    component ``main``.

    Args:
        uris: what ``apt-get update --print-uris`` prints.

    Raises:
        SetUpError: there is none.
    """
    found = re.findall(r"^'(\S+)/dists/([^/]+)/main/", uris, re.MULTILINE)
    complete = [address for address, suite in found if (address, f"{suite}-updates") in found]
    addresses = complete or [address for address, _ in found]
    if not addresses:
        raise SetUpError(
            "apt has no package archive to take libraries from: name the distribution's "
            "archive, component main, in /etc/apt/sources.list"
        )
    return str(addresses[0])


def unpack_libraries(target: Path) -> None:
    """Unpack the libraries that the client was linked with into a folder.

    Raises:
        SetUpError: the archive cannot be reached or lacks a package.
    """
    distribution = DISTRIBUTIONS[distribution_name()]
    _unpack(distribution.release, distribution.libraries, target)
    # The client names RE2 as Ubuntu does, and uses none of it.
    re2 = target / LIBRARIES / "libre2.so.10"
    if not re2.exists():
        re2.symlink_to("libre2.so.9")


def unpack_c_library(target: Path) -> None:
    """Unpack a C library that is new enough for the client into a folder.

    Raises:
        SetUpError: the archive cannot be reached or lacks a package.
    """
    _unpack(DISTRIBUTIONS[distribution_name()].newer, C_LIBRARY, target)


def _unpack(release: str, packages: tuple[str, ...], target: Path) -> None:
    name = distribution_name()
    address = archive_address(run("apt-get", "update", "--print-uris"))
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=target) as folder:
        work = Path(folder)
        keys = f"/usr/share/keyrings/{name}-archive-keyring.gpg"
        line = f"deb [signed-by={keys}] {address} {release} {DISTRIBUTIONS[name].components}\n"
        options = _apt_options(work, line)
        run("apt-get", *options, "update")
        run("apt-get", *options, "download", *packages, cwd=work)
        for package in sorted(work.glob("*.deb")):
            run("dpkg-deb", "--extract", package, target)


def _apt_options(work: Path, sources: str) -> list[str]:
    """Options that keep all that apt writes in a folder, and give it other sources."""
    for name in ("lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    (work / "status").touch()
    (work / "sources.list").write_text(sources)
    settings: dict[str, str | Path] = {
        "APT::Update::Error-Mode": "any",  # or a failed download is a warning
        "Dir::State": work,
        "Dir::State::Lists": work / "lists",
        "Dir::State::Status": work / "status",
        "Dir::Cache": work / "cache",
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": os.devnull,
        "Dir::Etc::PreferencesParts": os.devnull,
    }
    if os.geteuid() == 0:
        # The user that apt would change to may not write to the folder.
        settings["APT::Sandbox::User"] = "root"
    return [option for name, value in settings.items() for option in ("-o", f"{name}={value}")]
