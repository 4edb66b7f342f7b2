"""Two hashes that tell whether a boost profile was measured on this model."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch

from kitty_runtime.models.geometry import ModelGeometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLES = 16


def config_sha256(geometry: ModelGeometry) -> str:
    """Of the sizes that shape the cache, not of the whole config: that gains fields with every transformers release."""
    layers = [(x.index, x.quantized, x.num_kv_heads, x.head_dim, x.sliding_window) for x in geometry.layers]
    sizes = [geometry.model_type, geometry.num_q_heads, geometry.hidden_size, geometry.vocab_size, layers]
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()


def weights_sha256(model: PreTrainedModel) -> str:
    """Of 16 evenly spaced elements of each parameter, rounded to bfloat16 so that the dtype loaded does not matter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        index = torch.arange(_SAMPLES, device=flat.device) * (flat.numel() - 1) // (_SAMPLES - 1)
        digest.update(name.encode())
        digest.update(flat[index].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()
