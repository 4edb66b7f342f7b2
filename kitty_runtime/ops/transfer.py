"""Copies between host and device that do not stop the stream: what was launched before goes on meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class OnTheWay:
    """Tensors on their way to the host, behind what was launched before and ahead of what will be."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors, self._arrived = tensors, None
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = tuple(torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors)
            for there, here in zip(tensors, self._tensors, strict=True):
                here.copy_(there, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors on the host, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors
