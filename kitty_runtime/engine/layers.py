"""What the engine makes of each layer of a model: pages at the settings' bits, 16-bit pages, or a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kitty_runtime.config import CacheConfig
from kitty_runtime.errors import UnsupportedModelError
from kitty_runtime.models.geometry import LayerGeometry
from kitty_runtime.profiles import BoostProfile, layer_boosts
from kitty_runtime.quant.boost import LayerBoost


def check_layers(layers: Sequence[LayerGeometry]) -> None:
    """
    Raises:
        UnsupportedModelError: a layer with neither full nor sliding-window attention.
    """
    for layer in layers:
        if not layer.quantized and layer.sliding_window is None:
            raise UnsupportedModelError(
                f"Layer {layer.index} of the model has {layer.reason}; the engine runs full and sliding-window "
                "attention.",
                "Use KittyCache with model.generate(), which keeps such layers as transformers has them.",
            )


def layer_settings(
    layers: Sequence[LayerGeometry], config: CacheConfig, profile: BoostProfile | None
) -> list[tuple[CacheConfig, LayerBoost] | None]:
    """Each layer's settings and boost; None where it slides.

    A layer that the profile leaves out has 16-bit pages.

    Raises:
        UnsupportedModelError, ConfigError, ProfileError: see `check_layers` and `layer_boosts`.
    """
    check_layers(layers)
    dense = replace(config, k_bits=16, v_bits=16, boost_ratio=0.0, policy="dynamic", v_hadamard=False)
    return [
        None if not layer.quantized else (dense, LayerBoost("dynamic", 0)) if boost is None else (config, boost)
        for layer, boost in zip(layers, layer_boosts(layers, config, profile), strict=True)
    ]
