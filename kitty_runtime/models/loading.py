"""From what the user typed to a loaded model. Failures are one line with the next step, early."""

from __future__ import annotations

import difflib
import inspect
import os
import struct
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitty_runtime.errors import ModelLoadError, UnsupportedModelError
from kitty_runtime.models.demo import DEMO_NAME, demo_model_dir, quiet_transformers
from kitty_runtime.models.geometry import geometry_of
from kitty_runtime.models.preflight import (
    DTYPE_BYTES,
    MEMORY_HINT,
    Dtype,
    check_memory,
    check_weight_files,
    pick_device,
    pick_dtype,
    weight_files_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEMO = "demo"
_LONGEST_NAME = 1024
"""No path or hub id is longer; file systems refuse to look such a name up."""

_READ_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, ArithmeticError)
"""What transformers raises for files that are missing, damaged or of another format."""
_GGUF_READ_ERRORS = (struct.error, IndexError)
_TRUST_HINT = "Read that code, then add --trust-remote-code if you trust it."


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        name: for people.
        path: a local folder or a hub id, for transformers.
        gguf_file: the file's name in that folder, if the model is a GGUF file.
        revision: branch, tag or commit of a hub model; None for its main branch and for local ones.
    """

    name: str
    path: str
    gguf_file: str | None = None
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        return os.path.isdir(self.path)


def resolve_model(name: str | None, progress: Callable[[str], None] | None = None) -> ModelSource:
    """The model that `name` means, without reading it.

    Args:
        name: None or ``demo`` (``$KITTY_MODEL`` if set, else the demo model), a folder, a .gguf file, or a
            hub id with or without ``@revision``.
        progress: told what happens if the demo model has to be converted.
    Raises:
        ModelLoadError: no such folder or file, not a hub id, or the demo model's package is missing.
    """
    if name is not None and not name.strip():
        raise ModelLoadError("MODEL is empty.", f"Name a model, such as {DEMO}, or leave it out.")
    if name not in (None, DEMO):
        return _resolve_name(name)
    preferred = os.environ.get("KITTY_MODEL", DEMO)
    if preferred in ("", DEMO):
        return ModelSource(DEMO_NAME, str(demo_model_dir(progress)))
    try:
        return _resolve_name(preferred)
    except ModelLoadError as error:
        raise ModelLoadError(f"KITTY_MODEL: {error.message}", error.hint) from error


def load_config(source: ModelSource, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's config. Downloads only that file.

    Raises:
        ModelLoadError: missing, gated, offline, unreadable, or in need of code from its repository.
        UnsupportedModelError: an architecture that this version of transformers does not know.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PreTrainedConfig

    where = _from_pretrained_arguments(source)
    try:
        raw, _ = PreTrainedConfig.get_config_dict(source.path, **where)
        _check_raw_config(source, raw, trust_remote_code)
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code, **where)
    except (*_READ_ERRORS, *_GGUF_READ_ERRORS, StrictDataclassError) as error:
        raise _as_load_error(source, "config", error) from error
    return config


def load_tokenizer(source: ModelSource, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        ModelLoadError: missing, gated, offline, or unreadable.
    """
    from transformers import AutoTokenizer

    where = _from_pretrained_arguments(source)
    try:
        with quiet_transformers() if source.is_local else nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=trust_remote_code, **where)
    except _READ_ERRORS as error:
        raise _as_load_error(source, "tokenizer", error) from error
    return tokenizer


def load_model(
    source: ModelSource,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The model in eval mode, with every check that needs no weights made first.

    Args:
        dtype: ``auto`` is float32 on the CPU and the config's own 16-bit type on CUDA (else bfloat16).
        device: ``auto`` is the first CUDA device if there is one, else ``cpu``.
        attn_implementation: a registered attention function's name; None leaves transformers its default.
    Raises:
        ModelLoadError: missing, gated, offline, damaged, incomplete, or too large for the free memory.
        UnsupportedModelError: the architecture cannot run on paged 2-bit keys and values.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from kitty_runtime.models import attention  # noqa: F401  registers "kitty" with transformers

    target = pick_device(device)
    config = load_config(source, trust_remote_code)
    geometry = geometry_of(config)
    dtype_name = pick_dtype(dtype, target, geometry.dtype_name)
    if source.is_local and not source.gguf_file:
        check_weight_files(source.name, Path(source.path))
    _check_size(source, config, geometry.num_parameters, dtype_name, target)
    try:
        with quiet_transformers() if source.is_local else nullcontext():
            model, report = AutoModelForCausalLM.from_pretrained(
                source.path,
                dtype=getattr(torch, dtype_name),
                device_map={"": target} if target.type == "cuda" else None,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # Reported by name below.
                **_from_pretrained_arguments(source),
            )
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(f"{source.name} does not fit in the memory of {target}.", MEMORY_HINT) from error
    except (*_READ_ERRORS, *_GGUF_READ_ERRORS, SafetensorError) as error:
        raise _as_load_error(source, "weights", error) from error
    _check_all_loaded(source, report)
    if source.gguf_file:  # The weights are plain by now: forget the file's format.
        model.hf_quantizer.remove_quantization_config(model)
    return model.eval()


def cache_kwarg(model: PreTrainedModel) -> str:
    """The name of the cache argument of ``model.forward``: transformers renamed it between 5.17 and 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _resolve_name(name: str) -> ModelSource:
    if name == DEMO:
        return ModelSource(DEMO_NAME, str(demo_model_dir()))
    if len(name) > _LONGEST_NAME:
        raise ModelLoadError(
            f"{name[:40]!r}... ({len(name)} characters) is no model.", "Name a model before a message."
        )
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return _folder_source(name, path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(
                f"{name} is a file, but no GGUF file.", "Give the folder with config.json, or a .gguf file."
            )
        return ModelSource(path.stem, str(path.parent), gguf_file=path.name)
    if name.startswith((".", "/", "~")) or name.lower().endswith(".gguf") or "\\" in name or name.count("/") > 1:
        raise ModelLoadError(f"There is no {name}.", "Check the path; a hub model is written owner/name.")
    if difflib.get_close_matches(name.lower(), [DEMO]):  # before half a minute of asking the hub
        raise ModelLoadError(f"There is no model {name}.", f"Did you mean {DEMO}?")
    repo, _, revision = name.partition("@")
    return ModelSource(name, repo, revision=revision or None)


def _folder_source(name: str, path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource(path.resolve().name, str(path))
    gguf = sorted(file.name for file in path.glob("*.gguf"))
    if gguf:
        raise ModelLoadError(f"The folder {name} has no config.json.", f"Name its GGUF file: {path / gguf[0]}")
    raise ModelLoadError(
        f"The folder {name} has no config.json, so it is not a model.",
        "Give the folder that save_pretrained or a hub download wrote, a .gguf file, or a hub id.",
    )


def _from_pretrained_arguments(source: ModelSource) -> dict[str, Any]:
    arguments = {"gguf_file": source.gguf_file, "revision": source.revision}
    return {key: value for key, value in arguments.items() if value is not None}


def _check_raw_config(source: ModelSource, raw: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuse before transformers would ask on the terminal whether to run code from the repository."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type, auto_map = raw.get("model_type"), raw.get("auto_map") or {}
    if not raw:
        raise ModelLoadError(f"{source.name} has no config.json.", "Check the name; is it a model repository?")
    unknown = model_type not in CONFIG_MAPPING
    no_class = unknown or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    brings_code = (unknown and "AutoConfig" in auto_map) or (no_class and "AutoModelForCausalLM" in auto_map)
    if brings_code and not trust_remote_code:
        raise ModelLoadError(f"{source.name} runs Python code from its repository.", _TRUST_HINT)
    if unknown and not brings_code:
        from transformers import __version__

        if model_type is None:
            raise ModelLoadError(
                f"The config of {source.name} has no model_type.", "Give a model that transformers can load."
            )
        raise UnsupportedModelError(
            f"transformers {__version__} does not know the architecture {model_type!r} of {source.name}.",
            "Update it: pip install -U transformers",
        )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _as_load_error(source: ModelSource, what: str, error: BaseException) -> ModelLoadError:
    """What kitty says for an error of transformers, which wraps the hub's errors in plain OSErrors."""
    from huggingface_hub import constants, errors

    name = source.name
    for cause in _causes(error):
        match cause:
            case errors.GatedRepoError():
                return ModelLoadError(
                    f"{name} is gated.",
                    f"Accept its licence at {constants.ENDPOINT}/{source.path}, then run: hf auth login",
                )
            case errors.RevisionNotFoundError():
                return ModelLoadError(
                    f"{source.path} has no revision {source.revision!r}.", "Check the part behind the @."
                )
            case errors.RepositoryNotFoundError():
                return ModelLoadError(
                    f"{name} is no folder here and no model on the hub.",
                    "Check the spelling; for a private model run: hf auth login",
                )
            case errors.HFValidationError():
                return ModelLoadError(
                    f"{name!r} is no folder here and cannot be a hub id.", "A hub id is written owner/name."
                )
            case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
                if constants.HF_HUB_OFFLINE:
                    return ModelLoadError(
                        f"The {what} of {name} is not in the local cache, and HF_HUB_OFFLINE is set.",
                        "Unset HF_HUB_OFFLINE to download it, or give a local folder.",
                    )
                return ModelLoadError(
                    f"Cannot reach the hub for the {what} of {name}, and it is not in the local cache.",
                    "Check the network, or give a local folder. The model 'demo' needs no network.",
                )
            case errors.HfHubHTTPError():
                return ModelLoadError(f"The hub refused {name}: {_first_line(cause)}", "Try again later.")
    return ModelLoadError(f"The {what} of {name} cannot be read: {_first_line(error)}", _read_hint(source, what, error))


def _first_line(error: BaseException) -> str:
    """The first line, and those behind it that it announces with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    end = next((n for n, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return " ".join(lines[: end + 1])


def _read_hint(source: ModelSource, what: str, error: BaseException) -> str:
    if isinstance(error, ImportError):
        return "Install the package that it names."
    if source.gguf_file:
        return "Check that the file is whole; transformers reads GGUF files of common architectures only."
    if what == "tokenizer":
        return "Get the tokenizer's files too: tokenizer.json and tokenizer_config.json."
    return "Check that the files are whole; download or convert the model again."


def _check_size(
    source: ModelSource, config: PreTrainedConfig, num_parameters: int, dtype_name: str, device: torch.device
) -> None:
    folder = Path(source.path) if source.is_local else None
    needed_bytes = num_parameters * DTYPE_BYTES[dtype_name]
    if getattr(config, "quantization_config", None) is not None and not source.gguf_file:
        if folder is None:
            return  # Fewer bits than dtype_name, but how many only the files tell.
        needed_bytes = weight_files_bytes(folder)
    check_memory(source.name, needed_bytes, dtype_name, device)


def _check_all_loaded(source: ModelSource, report: dict[str, Any]) -> None:
    """transformers fills what a checkpoint lacks with random numbers, and only logs it."""
    missing = sorted(report["missing_keys"])
    mismatched = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    for problem, names in (("lack", missing), ("have other shapes than its config says for", mismatched)):
        if names:
            raise ModelLoadError(
                f"The weights of {source.name} {problem} {len(names)} tensors, such as {names[0]}.",
                "Check that config.json and the weights belong together; download the model again.",
            )
