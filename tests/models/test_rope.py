"""Wavelengths of rotary embeddings, against the angles that each model's own rotation turns unit vectors by."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from tiny_models import tiny_model

from kitty_runtime.models.rope import rope_wavelengths

DIM = 32


def measured(model, **layer_type):
    """Tokens per turn of each channel, from the rotation of one position on: unit vectors give the angle."""
    decoder = model.get_decoder()
    rotate = sys.modules[type(decoder).__module__].apply_rotary_pos_emb
    cos, sin = decoder.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.tensor([[1]]), **layer_type)
    unit = torch.eye(DIM, dtype=torch.float64)[None, :, None]
    turned = rotate(unit, unit, cos, sin)[0][0, :, 0]
    kept = turned.diagonal()
    away = (turned - kept.diag()).norm(dim=1)
    return [2 * math.pi / angle if angle > 1e-12 else math.inf for angle in torch.atan2(away, kept).tolist()]


@pytest.mark.parametrize(
    ("family", "layer_type"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("cohere2", {}),
        ("glm4", {}),
        ("gemma3", {"layer_type": "full_attention"}),
    ],
)
def test_wavelengths_are_those_of_the_models_own_rotation(family, layer_type):
    model = tiny_model(family)
    found = rope_wavelengths(model, DIM)
    assert len(found) == DIM
    assert found == pytest.approx(measured(model, **layer_type), rel=1e-4)


def test_layouts():
    """Halves, neighbors, and only half of the channels rotated."""
    llama, cohere, glm = (rope_wavelengths(tiny_model(family), DIM) for family in ("llama", "cohere2", "glm4"))
    assert llama[:16] == llama[16:] == tuple(sorted(llama[:16]))
    assert llama[0] == pytest.approx(2 * math.pi)
    assert cohere[::2] == cohere[1::2] == tuple(sorted(cohere[::2]))
    assert glm[16:] == (math.inf,) * 16
    assert glm[:16:2] == glm[1:16:2]


def test_a_model_that_does_not_tell():
    assert rope_wavelengths(tiny_model("gpt_oss"), DIM) is None
