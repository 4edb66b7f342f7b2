"""What quantizing one layer alone costs: the mean KL divergence of the predictions, at several boost levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import CacheConfig
from kitty_runtime.emulation import FIRST_SCORED
from kitty_runtime.errors import DataError, NumericsError
from kitty_runtime.models.geometry import layers_of
from kitty_runtime.models.loading import cache_kwarg
from kitty_runtime.quant.boost import LayerBoost

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps are done, and how many there are."""

BOOST_LEVELS = (0.0, 0.0625, 0.125, 0.25, 0.5)
"""Boost ratios at which each layer's KL is measured."""

LAYER_KL_CONFIG = CacheConfig(v_bits=4, policy="weighted")
"""One layer alone is stored so; 4-bit values hardly disturb, so that the keys are measured."""

NEGLIGIBLE = 0.1
"""A layer below this share of the mean KL without boost is not measured higher up, where it matters even less."""


@torch.inference_mode()
def measure_layer_kl(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    energies: dict[int, Tensor],
    boost_levels: Sequence[float] = BOOST_LEVELS,
    progress: Progress | None = None,
) -> dict[int, tuple[float, ...]]:
    """Mean KL divergence against 16 bits with one layer alone quantized, at each boost level.

    A run starts at its own layer: the layers before it give what they gave at 16 bits.

    Args:
        model: with ``attn_implementation="kitty"``.
        windows: int64 ``[num_tokens]`` each; predictions from `FIRST_SCORED` on are compared.
        energies: fp32 ``[num_kv_heads, head_dim]`` query energy by layer.
        boost_levels: boost ratios, ascending.
    Returns:
        KL in nats by layer, one value per level. Once a layer is `NEGLIGIBLE`, its last value stands for the rest.
    """
    short = min((len(window) for window in windows), default=0)
    if short <= FIRST_SCORED:
        raise DataError(f"A window has {short} tokens, scoring starts at {FIRST_SCORED}.", "Use a longer text.")
    num_layers = len(layers_of(model.config))
    references = [_reference(model, window) for window in windows]
    curves: dict[int, list[float]] = {index: [] for index in energies}
    for number, level in enumerate(boost_levels):
        least = NEGLIGIBLE * sum(curve[0] for curve in curves.values()) / len(curves) if number else 0.0
        for done, (index, energy) in enumerate(energies.items()):
            if progress:
                progress("layer KL", number * len(energies) + done, len(boost_levels) * len(energies))
            curve = curves[index]
            if number and curve[-1] < least:
                curve.append(curve[-1])
                continue
            boosts: list[LayerBoost | None] = [None] * num_layers
            boosts[index] = LayerBoost("weighted", int(level * energy.shape[1]), energy)
            kls = []
            for window, (reference, outputs) in zip(windows, references, strict=True):
                with _starting_at(model, index, outputs):
                    quantized = _log_probs(model, window, KittyCache(model.config, LAYER_KL_CONFIG, boosts=boosts))
                kls.append((reference.exp() * (reference - quantized)).sum(-1).mean().item())
            if not all(math.isfinite(kl) for kl in kls):
                raise NumericsError(f"Layer {index}: the KL divergence is {kls}.", "Try --dtype float32.")
            curve.append(max(0.0, sum(kls) / len(kls)))
    if progress:
        progress("layer KL", len(boost_levels) * len(energies), len(boost_levels) * len(energies))
    return {index: tuple(curve) for index, curve in curves.items()}


def _reference(model: PreTrainedModel, window: Tensor) -> tuple[Tensor, dict[int, Any]]:
    """Log-probabilities at 16 bits, and what each decoder layer returned."""
    with _recorded_outputs(model) as outputs:
        log_probs = _log_probs(model, window, DynamicCache(config=model.config))
    return log_probs, outputs


def _log_probs(model: PreTrainedModel, window: Tensor, cache: Cache) -> Tensor:
    """fp32 ``[num_tokens - FIRST_SCORED, vocab_size]``."""
    out = model(
        input_ids=window[None].to(model.device),
        use_cache=True,
        logits_to_keep=len(window) - FIRST_SCORED,
        **{cache_kwarg(model): cache},
    )
    logits: Tensor = out.logits[0]
    return logits.float().log_softmax(-1)


def _decoder_layers(model: PreTrainedModel) -> Sequence[torch.nn.Module]:
    """The decoder's layers, or nothing where the model keeps them elsewhere; then runs start at the first layer."""
    return getattr(model.get_decoder(), "layers", ())


@contextmanager
def _recorded_outputs(model: PreTrainedModel) -> Iterator[dict[int, Any]]:
    """Collects what each decoder layer returns during a forward pass."""
    outputs: dict[int, Any] = {}
    hooks = []
    for index, layer in enumerate(_decoder_layers(model)):

        def record(module: torch.nn.Module, args: Any, output: Any, index: int = index) -> None:
            outputs[index] = output

        hooks.append(layer.register_forward_hook(record))
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _starting_at(model: PreTrainedModel, index: int, outputs: dict[int, Any]) -> Iterator[None]:
    """The layers before `index` return what `outputs` recorded of the last of them, without computing."""
    skipped = list(_decoder_layers(model))[:index]
    for layer in skipped:
        layer.forward = lambda *args, **kwargs: outputs[index - 1]
    try:
        yield
    finally:
        for layer in skipped:
            del layer.forward
