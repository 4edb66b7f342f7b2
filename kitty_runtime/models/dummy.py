"""A model of a config's shapes with random weights: for measuring what one cannot or need not load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitty_runtime.errors import ModelLoadError
from kitty_runtime.models.geometry import geometry_of
from kitty_runtime.models.loading import ModelSource, load_config
from kitty_runtime.models.preflight import DTYPE_BYTES, MEMORY_HINT, Dtype, check_memory, pick_device, pick_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def dummy_model(
    source: ModelSource,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The model in eval mode, made on the device; only its config is read. Arguments and errors as `load_model`."""
    import torch
    from transformers import AutoModelForCausalLM

    from kitty_runtime.models import attention  # noqa: F401  registers "kitty" with transformers

    target = pick_device(device)
    config = load_config(source, trust_remote_code)
    geometry = geometry_of(config)
    dtype_name = pick_dtype(dtype, target, geometry.dtype_name)
    check_memory(source.name, geometry.num_parameters * DTYPE_BYTES[dtype_name], dtype_name, target)
    try:
        with torch.device(target):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, dtype_name),
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            )
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(f"{source.name} does not fit in the memory of {target}.", MEMORY_HINT) from error
    return model.eval()
