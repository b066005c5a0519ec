"""The device of the tests: absent, they skip, or fail where it is required."""

from __future__ import annotations

import pytest

from tests.gpu import accelerator


@pytest.fixture(scope="session")
def device() -> str:
    """torch's name of the device."""
    name = accelerator.device_name()
    why = accelerator.missing(name)
    if why is None:
        return name
    if accelerator.required():
        pytest.fail(f"{why}, and {accelerator.REQUIRE}=1 is set", pytrace=False)
    pytest.skip(f"{why}; set {accelerator.REQUIRE}=1 to fail instead")
