"""What can be checked before weights load: the device, whole weight files, and enough free memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from kitty_runtime.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    import torch

Dtype = Literal["auto", "float32", "float16", "bfloat16"]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MEMORY_HINT = "Use a smaller model or --dtype bfloat16, or close what fills the memory."

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_DEVICES = "Use auto, cpu, cuda or cuda:N."


def pick_device(device: str) -> torch.device:
    """The device that `device` names; ``auto`` is the first CUDA device, else the CPU.

    Raises:
        ConfigError: not a device that kitty knows.
        ModelLoadError: it is not there.
    """
    import torch

    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"There is no device {device!r}.", _DEVICES) from error
    if target.type == "cpu":
        return torch.device("cpu")
    if target.type != "cuda":
        raise ConfigError(f"kitty does not run on {device!r}.", _DEVICES)
    if not torch.cuda.is_available():
        raise ModelLoadError(
            f"{device} was asked for, but torch {torch.__version__} sees no CUDA device.",
            "Use --device cpu, or install a CUDA build of torch and check nvidia-smi.",
        )
    index, count = target.index or 0, torch.cuda.device_count()
    if index >= count:
        raise ModelLoadError(f"{device} was asked for, but the last device is cuda:{count - 1}.", _DEVICES)
    return torch.device("cuda", index)


def pick_dtype(dtype: str, device: torch.device, checkpoint_dtype: str) -> str:
    """The dtype to load in; ``auto`` is float32 on the CPU and the checkpoint's 16-bit type on CUDA.

    A checkpoint of another type loads as bfloat16 on CUDA: the kernels read 16-bit queries.

    Raises:
        ModelLoadError: not one of `Dtype`.
    """
    if dtype not in get_args(Dtype):
        raise ModelLoadError(f"dtype is {dtype!r}.", f"Use one of {', '.join(get_args(Dtype))}.")
    if dtype != "auto":
        return dtype
    if device.type == "cpu":
        return "float32"
    return checkpoint_dtype if checkpoint_dtype in ("float16", "bfloat16") else "bfloat16"


def check_weight_files(name: str, folder: Path) -> None:
    """Reads the headers only, not the weights.

    Args:
        name: of the model, for the message.
        folder: local, with the weights that transformers would load.
    Raises:
        ModelLoadError: no weights, a shard missing, or a file that is not whole.
    """
    if (folder / _WEIGHTS).is_file():
        shards = [_WEIGHTS]
    elif (folder / _INDEX).is_file():
        shards = _shards_of_index(name, folder / _INDEX)
    elif any((folder / file).is_file() for file in _OTHER_WEIGHTS):
        return
    else:
        raise ModelLoadError(f"{name} has no weights: no {_WEIGHTS} in {folder}.", "Download the model again.")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelLoadError(
            f"{name} lacks {len(missing)} of its {len(shards)} weight files, such as {missing[0]}.",
            f"Download the model again into {folder}.",
        )
    for shard in shards:
        _check_header(name, folder / shard)


def check_memory(name: str, needed_bytes: int, dtype_name: str, device: torch.device) -> None:
    """
    Args:
        needed_bytes: of the weights.
    Raises:
        ModelLoadError: the device has less free memory than that. Where it cannot be known, all is well.
    """
    free = free_bytes(device)
    if free is not None and needed_bytes > free:
        raise ModelLoadError(
            f"{name} needs {needed_bytes / 1e9:.1f} GB for its weights in {dtype_name}, "
            f"but {device} has {free / 1e9:.1f} GB of free memory.",
            MEMORY_HINT,
        )


def weight_files_bytes(folder: Path) -> int:
    """Bytes of the safetensors files in a local folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _shards_of_index(name: str, index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index.name} of {name} is damaged: {error}", "Download the model again.") from error


def _check_header(name: str, file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{file.name} of {name} is damaged: {error} ({file.stat().st_size} bytes)",
            "Download it again; a file under 1 KB is often a Git LFS pointer: git lfs pull",
        ) from error


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device, or None where it cannot be known."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):  # macOS: all memory, free or not.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
