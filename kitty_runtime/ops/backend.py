"""Which implementation of the operations runs: Triton kernels or the plain torch reference."""

from __future__ import annotations

import functools
import os
from typing import Literal

import torch

from kitty_runtime.errors import ConfigError
from kitty_runtime.ops.operands import LayerState

Backend = Literal["triton", "reference"]

ENV = "KITTY_BACKEND"
"""Environment variable that asks for a backend; an explicit request never falls back."""

KERNEL_DTYPES = (torch.float16, torch.bfloat16)


def backend_for(state: LayerState) -> Backend:
    """What computes on a layer.

    Raises:
        ConfigError: the backend asked for cannot run there.
    """
    return backend_of(state.pages.device.type, state.k_ring.dtype)


def backend_of(device_type: str, dtype: torch.dtype) -> Backend:
    """Triton for 16-bit models on CUDA, the reference elsewhere, or what `KITTY_BACKEND` asks for.

    The Triton interpreter (``TRITON_INTERPRET=1``) runs the kernels on the CPU, very slowly, for tests; it has to be
    asked for.

    Raises:
        ConfigError: an unknown backend, or one that cannot run on this device and dtype.
    """
    asked = os.environ.get(ENV)
    if asked not in (None, "", "triton", "reference"):
        raise ConfigError(f"{ENV} is {asked!r}.", "Use triton or reference, or leave it out.")
    if asked == "reference":
        return "reference"
    reason = _why_not_triton(device_type, dtype, interpreted=asked == "triton")
    if asked == "triton" and reason:
        raise ConfigError(f"{ENV} is triton, but {reason}.", f"Leave {ENV} out, or use reference.")
    return "reference" if reason else "triton"


def _why_not_triton(device_type: str, dtype: torch.dtype, interpreted: bool) -> str:
    """Empty if the kernels can run."""
    if device_type != "cuda" and not (interpreted and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"the cache is on {device_type}"
    if dtype not in KERNEL_DTYPES:
        return f"the kernels take fp16 and bf16, the model is in {str(dtype).removeprefix('torch.')}"
    return "" if _has_triton() else "the package triton is not installed"


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
