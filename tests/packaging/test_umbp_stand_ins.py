"""The stand-ins for HIP and HSA that UMBP's client is linked with where there is no ROCm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.umbp_without_gpu import SetUpError, stand_ins
from tools.umbp_without_gpu.stand_ins import HIP, HSA

LISTING = """
libmori_io.so:
                 U abort@GLIBC_2.2.5
                 U hipMalloc@hip_4.2
                 U hipMemCreate@hip_5.1
                 w __gmon_start__
                 U hsa_init@ROCR_1

umbp_master:
                 U __hipRegisterFatBinary@hip_4.2
                 U hipGetDeviceCount@hip_4.2
                 U hipGetErrorString@hip_4.2
                 U hipMalloc@hip_4.2
                 U hipPointerGetAttributes@hip_4.2
                 U hsa_status_string@ROCR_1
0000000000001000 T hipIsDefinedHere@hip_4.2
"""


def test_the_functions_to_stand_in_for_are_those_that_objects_take_by_version() -> None:
    assert stand_ins.needed_symbols(HIP, LISTING) == {
        "hip_4.2": [
            "__hipRegisterFatBinary",
            "hipGetDeviceCount",
            "hipGetErrorString",
            "hipMalloc",
            "hipPointerGetAttributes",
        ],
        "hip_5.1": ["hipMemCreate"],
    }
    assert stand_ins.needed_symbols(HSA, LISTING) == {"ROCR_1": ["hsa_init", "hsa_status_string"]}


def test_the_version_script_gives_each_function_its_version() -> None:
    script = stand_ins.version_script({"hip_4.2": ["hipFree", "hipMalloc"], "hip_5.1": ["hipMap"]})

    assert script == "hip_4.2 { hipFree; hipMalloc; };\nhip_5.1 { hipMap; };\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for what an object takes that was linked with such libraries."""
    missing = [name for name in ("gcc", "nm") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: apt-get install gcc binutils")
    folder = tmp_path_factory.mktemp("stand-ins")
    for runtime in stand_ins.RUNTIMES:
        stand_ins.link(folder / "original", runtime, stand_ins.needed_symbols(runtime, LISTING))
    names = [
        name
        for runtime in stand_ins.RUNTIMES
        for version in stand_ins.needed_symbols(runtime, LISTING).values()
        for name in version
    ]
    source = folder / "client.c"
    calls = "\n".join(f"void {name}(void);" for name in names)
    body = " ".join(f"{name}();" for name in names)
    source.write_text(f"{calls}\nvoid client(void) {{ {body} }}\n")
    libraries = [str(folder / "original" / runtime.soname) for runtime in stand_ins.RUNTIMES]
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-w", "-o", str(folder / "client.so")]
    subprocess.run([*command, str(source), *libraries], check=True)
    stand_ins.build(folder / "built", [folder / "client.so"])
    return folder


CALLS = """
import ctypes, sys
hip, hsa = (ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL) for name in sys.argv[1:3])
client = ctypes.CDLL(sys.argv[3], mode=ctypes.RTLD_GLOBAL | 2)  # RTLD_NOW
hip.hipGetErrorString.restype = ctypes.c_char_p
count, text = ctypes.c_int(7), ctypes.c_char_p()
print(client.client is not None)
print(hip.hipMalloc(None, 4096))
print(hip.hipGetDeviceCount(ctypes.byref(count)), count.value)
print(hip.hipPointerGetAttributes(None, None))
print(hip.hipGetErrorString(100).decode())
print(hsa.hsa_init())
print(hsa.hsa_status_string(0x1008, ctypes.byref(text)), text.value.decode())
"""


def test_an_object_loads_with_its_stand_ins_and_is_told_that_there_is_no_device(
    built: Path,
) -> None:
    libraries = [built / "built" / HIP.soname, built / "built" / HSA.soname, built / "client.so"]
    # In a process of its own: the real client's stand-ins have the same names.
    command = [sys.executable, "-c", CALLS, *map(str, libraries)]

    run = subprocess.run(command, capture_output=True, text=True)

    message = "no device: this HIP or HSA is a stand-in"
    assert run.stdout.splitlines() == [
        "True",
        "100",  # hipErrorNoDevice
        "100 0",
        "1",  # hipErrorInvalidValue
        message,
        str(0x1008),  # HSA_STATUS_ERROR_OUT_OF_RESOURCES
        f"0 {message}",
    ], run.stderr


def test_a_fault_of_the_compiler_is_told(built: Path, tmp_path: Path) -> None:
    with pytest.raises(SetUpError, match=r"nm .*no-such-object"):
        stand_ins.build(tmp_path, [built / "no-such-object"])
