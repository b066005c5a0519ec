"""Which device the tests run on, and where its absence is a fault."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

REQUIRE = "HICACHE_REQUIRE_GPU"
DEVICE = "HICACHE_GPU_DEVICE"
"""torch's name of the device, ``cuda`` where not given. With ``cpu`` the same steps run in plain
memory: it shows that the tests are right, and nothing about a GPU."""


def device_name(environ: Mapping[str, str] = os.environ) -> str:
    """The device that is asked for."""
    return environ.get(DEVICE, "cuda")


def missing(device: str) -> str | None:
    """Why tests cannot run on a device; None where they can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    return None


def required(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the absence of the device is a fault."""
    return environ.get(REQUIRE) == "1"
