"""The wavelengths of a model's rotary position embedding, channel by channel, for people who look at its keys."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def rope_wavelengths(model: PreTrainedModel, head_dim: int) -> tuple[float, ...] | None:
    """After how many tokens the rotation of each key channel of the full-attention layers repeats.

    Which channels turn together is read off the model's own `rotate_half`: i and i + n / 2 in most, 2 i and 2 i + 1 in
    GLM and Cohere.

    Returns:
        `head_dim` values, infinite where a channel is not rotated; None where the model does not tell.
    """
    decoder = model.get_decoder()
    buffers = {name.rpartition(".")[2]: buffer for name, buffer in decoder.named_buffers()}
    frequencies = buffers.get("full_attention_inv_freq", buffers.get("inv_freq"))
    rotate = getattr(sys.modules[type(decoder).__module__], "rotate_half", None)
    if frequencies is None or rotate is None or 2 * len(frequencies) > head_dim:
        return None
    rotated = 2 * len(frequencies)
    halves = abs(int(rotate(torch.arange(rotated))[0])) == rotated // 2
    waves = [2 * math.pi / frequency if frequency else math.inf for frequency in frequencies.tolist()]
    ordered = [*waves, *waves] if halves else [wave for wave in waves for _ in range(2)]
    return (*ordered, *[math.inf] * (head_dim - rotated))
