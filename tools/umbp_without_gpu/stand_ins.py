"""Stand-ins for HIP and HSA: what the client links to, answering "no device".

The client's objects name the functions that they take from these libraries; each gets a
function that returns the error which the real one returns on a machine without a GPU. A few
have to do more for the client to load and to take host memory for what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.umbp_without_gpu import run

MESSAGE = "no device: this HIP or HSA is a stand-in"


@dataclass(frozen=True)
class Runtime:
    """A library to stand in for.

    Attributes:
        soname: the name by which objects need it.
        symbol: pattern of its functions' names.
        answer: what a function returns, and the name of that error.
    """

    soname: str
    symbol: str
    answer: tuple[int, str]


HIP = Runtime("libamdhip64.so.7", r"(?:__)?hip\w+", (100, "hipErrorNoDevice"))
HSA = Runtime("libhsa-runtime64.so.1", r"hsa_\w+", (0x1008, "HSA_STATUS_ERROR_OUT_OF_RESOURCES"))
RUNTIMES = (HIP, HSA)

OTHERWISE = {
    "hipGetErrorString": (
        f'const char *hipGetErrorString(int error) {{ return error ? "{MESSAGE}" : "no error"; }}'
    ),
    "hipGetDeviceCount": "int hipGetDeviceCount(int *count) { *count = 0; return 100; }",
    "hipGetLastError": "int hipGetLastError(void) { return 0; }",
    # hipErrorInvalidValue is HIP's own answer for memory that it does not know.
    "hipPointerGetAttributes": "int hipPointerGetAttributes(void) { return 1; }",
    "hsa_status_string": (
        f'int hsa_status_string(int status, const char **text) {{ *text = "{MESSAGE}"; return 0; }}'
    ),
    # Called when an object with device code is loaded; the first returns a handle.
    "__hipRegisterFatBinary": (
        "void **__hipRegisterFatBinary(void) { static void *handle; return &handle; }"
    ),
    "__hipRegisterFunction": "void __hipRegisterFunction(void) {}",
    "__hipUnregisterFatBinary": "void __hipUnregisterFatBinary(void) {}",
}
"""C source of the functions that do more than return their library's answer."""

Symbols = dict[str, list[str]]
"""Names of functions by their symbol version."""


def needed_symbols(runtime: Runtime, listing: str) -> Symbols:
    """The functions that objects take from a library.

    Args:
        runtime: the library.
        listing: what ``nm --dynamic --undefined-only`` prints for the objects.
    """
    found = re.findall(rf"^ *U ({runtime.symbol})@(\w[\w.]*)$", listing, re.MULTILINE)
    versions = sorted({version for _, version in found})
    return {
        version: sorted({name for name, its in found if its == version}) for version in versions
    }


def c_source(runtime: Runtime, symbols: Symbols) -> str:
    """One function a symbol."""
    value, error = runtime.answer
    names = [name for version in symbols.values() for name in version]
    plain = {name: f"int {name}(void) {{ return {value}; /* {error} */ }}" for name in names}
    lines = [OTHERWISE.get(name, plain[name]) for name in names]
    return "\n".join(lines) + "\n"


def version_script(symbols: Symbols) -> str:
    """The linker's script that gives every function the version asked for."""
    lines = [f"{version} {{ {'; '.join(names)}; }};" for version, names in symbols.items()]
    return "\n".join(lines) + "\n"


def build(folder: Path, objects: Iterable[Path]) -> None:
    """Write the stand-ins that the objects need into a folder, with their sources.

    Raises:
        SetUpError: ``nm`` or ``gcc`` fails.
    """
    listing = run("nm", "--dynamic", "--undefined-only", *objects)
    for runtime in RUNTIMES:
        link(folder, runtime, needed_symbols(runtime, listing))


def link(folder: Path, runtime: Runtime, symbols: Symbols) -> None:
    """Write the stand-in of one library into a folder, which is made if absent."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / runtime.soname
    source = folder / f"{runtime.soname}.c"
    script = folder / f"{runtime.soname}.map"
    source.write_text(c_source(runtime, symbols))
    script.write_text(version_script(symbols))
    options = ["-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-w"]
    options += [f"-Wl,-soname,{runtime.soname}", f"-Wl,--version-script,{script}"]
    run("gcc", *options, "-o", library, source)
