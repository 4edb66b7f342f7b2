"""`kitty env` and `kitty --version`: what a bug report needs."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from kitty_cli import options, output
from kitty_runtime.version import __version__

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "transformers", "triton", "safetensors", "datasets", "accelerate", "gguf", "typer", "rich")


def versions() -> dict[str, str]:
    """Installed versions by package, without importing any."""
    from importlib.metadata import PackageNotFoundError, version  # costs --help as much as all of kitty's own imports

    found = {"kitty": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def version_lines() -> list[str]:
    """Lines of `kitty --version`: kitty, then what it runs on, then the backend."""
    found = versions()
    rest = ", ".join(f"{name} {number}" for name, number in found.items() if name != "kitty")
    return [f"kitty {__version__}", rest, f"backend: {backend()}"]


def backend(device_type: str | None = None, dtype: torch.dtype | None = None) -> str:
    """Which operations run on a model's device and dtype; left out, on this machine's best."""
    import torch

    from kitty_runtime.ops.backend import backend_of

    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    kernels = backend_of(device_type, dtype or torch.float16) == "triton"
    where = "CPU"
    if device_type == "cuda":
        where = f"{torch.cuda.get_device_name()} (CUDA {torch.version.cuda})"
    return f"{'Triton kernels' if kernels else 'torch reference'} on {where}"


def env(as_json: options.Json = False) -> None:
    """Print versions, devices and folders: what a bug report needs."""
    import torch

    from kitty_runtime.home import kitty_home, profiles_dir
    from kitty_runtime.profile_store import shipped_profiles_dir

    facts = {
        **versions(),
        "platform": platform.platform(),
        "cpu_threads": str(torch.get_num_threads()),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "backend": backend(),
        "home": str(kitty_home()),
        "profiles": str(profiles_dir()),
        "shipped_profiles": str(shipped_profiles_dir()),
    }
    if as_json:
        output.json_document(facts)
        return
    for name, value in facts.items():
        output.text(f"{name}: {value}")
