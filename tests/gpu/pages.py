"""Pages of a model on a device, and the way to its host pools and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_shared.testing.rank import Rank


class PinnedMemory:
    """Host memory from torch's allocator, page-locked where there is a GPU to lock it for.

    Attributes:
        tensors: what was given out; they own the memory.
    """

    def __init__(self, device: str) -> None:
        self._pin = device.startswith("cuda")
        self.tensors: list[Any] = []

    def __call__(self, nbytes: int) -> npt.NDArray[np.uint8]:
        import torch

        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin)
        self.tensors.append(tensor)
        array: npt.NDArray[np.uint8] = tensor.numpy()
        return array

    def all_pinned(self) -> bool:
        """Whether the driver knows all of it as page-locked."""
        return all(tensor.is_pinned() for tensor in self.tensors)


class DevicePages:
    """Some pages of every pool of a model, as bytes on a device.

    Args:
        rank: whose pools they are like.
        device: torch's name.
        count: pages of each pool.
    """

    def __init__(self, rank: Rank, device: str, count: int) -> None:
        import torch

        self._rank = rank
        self._count = count
        self._device = torch.device(device)
        self.bytes: dict[str, list[list[Any]]] = {
            name: [
                [
                    torch.zeros(view.nbytes, dtype=torch.uint8, device=device)
                    for view in rank.views(name, 0)
                ]
                for _ in range(count)
            ]
            for name in rank.pools
        }

    def fill(self, seed: int) -> None:
        """Random bytes, made on the device."""
        import torch

        generator = torch.Generator(self._device).manual_seed(seed)
        for tensor in self._all():
            tensor.random_(0, 256, generator=generator)

    def wipe(self) -> None:
        """Zeros."""
        for tensor in self._all():
            tensor.zero_()

    def to_host(self, pages: Sequence[int]) -> None:
        """Copy the i-th page of every pool to its host page ``pages[i]``, and wait."""
        self._copy(pages, to_host=True)

    def from_host(self, pages: Sequence[int]) -> None:
        """Copy host page ``pages[i]`` of every pool to its i-th page, and wait."""
        self._copy(pages, to_host=False)

    def equal(self, other: DevicePages) -> dict[str, list[bool]]:
        """For each pool which pages are the same, compared on the device."""
        import torch

        return {
            name: [
                all(map(torch.equal, page, other.bytes[name][place]))
                for place, page in enumerate(pages)
            ]
            for name, pages in self.bytes.items()
        }

    def _copy(self, pages: Sequence[int], *, to_host: bool) -> None:
        import torch

        for name, ours in self.bytes.items():
            for page, tensors in zip(pages, ours, strict=True):
                for tensor, view in zip(tensors, self._rank.views(name, page), strict=True):
                    host = torch.from_numpy(view)
                    target, source = (host, tensor) if to_host else (tensor, host)
                    target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _all(self) -> list[Any]:
        return [each for pages in self.bytes.values() for page in pages for each in page]
