"""kitty_runtime: 2-bit KV caches for HuggingFace LLMs, on pages whose sensitive key channels keep 4 bits.

The names below load on first use, so that importing the package costs nothing. The runtime never prints.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kitty_runtime.config import PRESETS, CacheConfig, preset
from kitty_runtime.errors import KittyError
from kitty_runtime.version import __version__

if TYPE_CHECKING:
    from kitty_runtime.cache.hf import KittyCache
    from kitty_runtime.emulation import teacher_forced_logits
    from kitty_runtime.profiles import BoostProfile, load_profile
    from kitty_runtime.sensitivity import measure_profile

__all__ = [
    "PRESETS",
    "BoostProfile",
    "CacheConfig",
    "KittyCache",
    "KittyError",
    "__version__",
    "load_profile",
    "measure_profile",
    "preset",
    "teacher_forced_logits",
]

_HOMES = {
    "KittyCache": "kitty_runtime.cache.hf",
    "teacher_forced_logits": "kitty_runtime.emulation",
    "BoostProfile": "kitty_runtime.profiles",
    "load_profile": "kitty_runtime.profiles",
    "measure_profile": "kitty_runtime.sensitivity",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
