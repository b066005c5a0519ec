"""What the distributions hold, depend on and declare."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hicache_mooncake
import hicache_shared
import hicache_ucm
import hicache_umbp

ROOT = Path(__file__).parents[2]
SOURCES = {
    "hicache_shared": ROOT / "shared/src/hicache_shared",
    "hicache_mooncake": ROOT / "packages/mooncake/src/hicache_mooncake",
    "hicache_ucm": ROOT / "packages/ucm/src/hicache_ucm",
    "hicache_umbp": ROOT / "packages/umbp/src/hicache_umbp",
}
ADAPTERS = {
    "hicache-mooncake": {"client", "client-cuda13", "client-non-cuda"},
    "hicache-ucm": {"cu129", "cu130", "cann901-a2", "cann901-a3", "cann910-a2", "cann910-a3"},
    "hicache-umbp": {"client"},
}
"""Distributions of the adapters, and their extras: the builds of each native client."""


@pytest.fixture
def wheels() -> dict[str, zipfile.ZipFile]:
    """The wheels that the nox session built and installed, by import name."""
    folder = os.environ.get("HICACHE_WHEELS")
    if folder is None:
        pytest.skip("HICACHE_WHEELS is not set; the nox session `tests` builds wheels and sets it")
    return {path.name.split("-")[0]: zipfile.ZipFile(path) for path in Path(folder).glob("*.whl")}


def source_files(package: str) -> set[str]:
    folder = SOURCES[package]
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = (path.relative_to(folder.parent).as_posix() for path in paths)
    return {name for name in names if "__pycache__" not in name}


def runtime_requirements(distribution: str) -> dict[str, Requirement]:
    lines = metadata.requires(distribution) or []
    needed = [Requirement(line) for line in lines if "extra ==" not in line]
    return {requirement.name: requirement for requirement in needed}


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_a_wheel_holds_its_package_and_nothing_else(
    wheels: dict[str, zipfile.ZipFile], package: str
) -> None:
    names = set(wheels[package].namelist())
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}

    assert names - info == source_files(package)
    assert f"{package}/py.typed" in names
    assert {name.split("/", 1)[1] for name in info} <= {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_a_wheel_carries_the_licence(wheels: dict[str, zipfile.ZipFile], package: str) -> None:
    licences = [name for name in wheels[package].namelist() if name.endswith("licenses/LICENSE")]

    assert len(licences) == 1
    assert wheels[package].read(licences[0]) == (ROOT / "LICENSE").read_bytes()


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize(
    "module",
    [hicache_shared, hicache_mooncake, hicache_ucm, hicache_umbp],
    ids=lambda m: m.__name__,
)
def test_tests_see_the_installed_package_and_not_the_source_tree(module: object) -> None:
    path = Path(vars(module)["__file__"])

    assert path.is_relative_to(sysconfig.get_path("purelib"))


def test_importing_the_contract_loads_neither_torch_nor_sglang_nor_a_native_client() -> None:
    names = sorted(
        ".".join(path.relative_to(SOURCES["hicache_shared"].parent).with_suffix("").parts)
        for path in SOURCES["hicache_shared"].glob("*.py")
    )
    imports = "\n".join(f"import {name.removesuffix('.__init__')}" for name in names)
    unwanted = "{'torch', 'sglang', 'mooncake', 'mori', 'ucm.store', 'pytest', 'hypothesis'}"
    script = f"import sys\n{imports}\nprint(sorted({unwanted} & set(sys.modules)))"

    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"


def test_the_contract_requires_no_native_client_and_no_engine() -> None:
    assert set(runtime_requirements("hicache-shared")) == {"numpy", "pydantic", "typer", "rich"}


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_an_adapter_requires_the_contract_it_was_released_with(adapter: str) -> None:
    needed = runtime_requirements(adapter)
    version = metadata.version("hicache-shared")

    assert set(needed) == {"hicache-shared"}
    assert needed["hicache-shared"].specifier.contains(version)
    assert "~=" in str(needed["hicache-shared"].specifier)


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_every_build_of_a_native_client_is_an_extra(adapter: str) -> None:
    extras = metadata.metadata(adapter).get_all("Provides-Extra")

    assert set(extras or []) == ADAPTERS[adapter]


def test_the_hicache_command_is_declared() -> None:
    commands = metadata.entry_points(group="console_scripts", name="hicache")

    assert [command.value for command in commands] == ["hicache_shared.cli:main"]
