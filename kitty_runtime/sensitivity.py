"""Measure a model's key sensitivity: query energy and channel scores, streamed; then a boost profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kitty_runtime.cache.hf import AttendingLayer
from kitty_runtime.config import PAGE_SIZE, Metric
from kitty_runtime.errors import ConfigError, DataError, NumericsError
from kitty_runtime.layer_kl import BOOST_LEVELS, LAYER_KL_CONFIG, Progress, measure_layer_kl
from kitty_runtime.models.geometry import LayerGeometry, layers_of
from kitty_runtime.models.loading import cache_kwarg
from kitty_runtime.ops.dense_attention import causal_mask, dense_attention
from kitty_runtime.ops.operands import SoftmaxSpec
from kitty_runtime.profiles import BoostProfile, LayerProfile, Provenance
from kitty_runtime.quant.affine import choose_qparams, dequantize, quantize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLED_QUERIES = 64


@dataclass
class LayerStatistics:
    """Running sums of one layer, on its device.

    Attributes:
        query_sq: fp64 ``[num_kv_heads, head_dim]``, sum over positions of the group's mean squared query.
        key_range, key_magnitude, attention_change: fp64, same shape, sums over pages.
        two_bit_sq, four_bit_sq: fp64, same shape, sums over pages of the keys' mean squared rounding error.
    """

    query_sq: Tensor
    key_range: Tensor
    key_magnitude: Tensor
    attention_change: Tensor
    two_bit_sq: Tensor
    four_bit_sq: Tensor
    num_positions: int = 0
    num_pages: int = 0

    @property
    def query_energy(self) -> Tensor:
        return (self.query_sq / self.num_positions).sqrt().float()

    def scores(self, metric: Metric) -> Tensor:
        """fp32 ``[num_kv_heads, head_dim]``; higher = more sensitive."""
        if metric == "query":
            return (self.query_energy.double() * self.key_range / self.num_pages).float()
        total = self.key_magnitude if metric == "magnitude" else self.attention_change
        return (total / self.num_pages).float()

    @property
    def key_errors(self) -> KeyErrors:
        squares = (self.two_bit_sq, self.four_bit_sq)
        return KeyErrors(self.scores("magnitude"), *((total / self.num_pages).sqrt().float() for total in squares))


class KeyErrors(NamedTuple):
    """What rounding does to a layer's keys, by channel: fp32 ``[num_kv_heads, head_dim]`` each.

    Attributes:
        magnitude: mean absolute key.
        two_bits, four_bits: rms of what rounding to so many bits adds, no range clipped.
    """

    magnitude: Tensor
    two_bits: Tensor
    four_bits: Tensor


class ObservedLayer(AttendingLayer):
    """Attends without quantization and adds what it sees to its statistics; stores nothing.

    Args:
        model_config: the decoder's config.
        metric: the attention metric is measured only when asked for.
        sink_len: tokens before the first page.
    """

    def __init__(self, model_config: Any, metric: Metric, sink_len: int) -> None:
        super().__init__(model_config)
        self._metric = metric
        self._sink_len = sink_len
        self.statistics: LayerStatistics | None = None

    def attend_to(
        self, query: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None, softmax: SoftmaxSpec
    ) -> Tensor:
        self._observe(query[0].float(), keys[0].float(), softmax)
        visible = causal_mask(query.shape[2], keys.shape[2], query.device)
        return dense_attention(query, keys, values, visible, softmax)

    def _observe(self, query: Tensor, keys: Tensor, softmax: SoftmaxSpec) -> None:
        num_kv_heads, seq_len, head_dim = keys.shape
        if self.statistics is None:
            zeros = torch.zeros(6, num_kv_heads, head_dim, dtype=torch.float64, device=keys.device)
            self.statistics = LayerStatistics(*zeros)
        stats = self.statistics
        groups = query.view(num_kv_heads, -1, seq_len, head_dim)
        stats.query_sq += groups.double().square().mean(1).sum(1)
        stats.num_positions += seq_len
        num_pages = (seq_len - self._sink_len) // PAGE_SIZE
        span = slice(self._sink_len, self._sink_len + num_pages * PAGE_SIZE)
        pages = keys[:, span].reshape(num_kv_heads, num_pages, PAGE_SIZE, head_dim)
        stats.key_range += (pages.amax(2) - pages.amin(2)).double().sum(1)
        stats.key_magnitude += pages.abs().mean(2).double().sum(1)
        two_bits, four_bits = _rounding_error(pages, 3), _rounding_error(pages, 15)
        stats.two_bit_sq += two_bits.square().mean(2).double().sum(1)
        stats.four_bit_sq += four_bits.square().mean(2).double().sum(1)
        if self._metric == "attention":
            error = two_bits.view(num_kv_heads, -1, head_dim)
            stats.attention_change += num_pages * attention_change(groups, keys, error, span, softmax)
        stats.num_pages += num_pages


def _rounding_error(pages: Tensor, levels: int) -> Tensor:
    qparams = choose_qparams(pages, levels, dim=-2)
    return dequantize(quantize(pages, qparams, levels), qparams, torch.float32) - pages


def attention_change(groups: Tensor, keys: Tensor, error: Tensor, span: slice, softmax: SoftmaxSpec) -> Tensor:
    """Mean squared change of attention probabilities when one key channel alone is rounded, for every channel.

    Args:
        groups: fp32 ``[num_kv_heads, gqa_group_size, seq_len, head_dim]``, queries after RoPE.
        keys: fp32 ``[num_kv_heads, seq_len, head_dim]``.
        error: fp32 ``[num_kv_heads, span, head_dim]``, rounded minus true keys of the packed positions `span`.
        softmax: the layer's.
    Returns:
        fp64 ``[num_kv_heads, head_dim]``.
    Source: Kitty, section 3.1. Differs: over 64 evenly spaced queries past the packed positions' middle.
    """
    num_kv_heads, seq_len, head_dim = keys.shape
    rows = torch.linspace((span.start + span.stop) // 2, seq_len - 1, _SAMPLED_QUERIES, device=keys.device).long()
    queries = groups[:, :, rows]
    visible = torch.arange(seq_len, device=keys.device) <= rows[:, None]
    dots = torch.einsum("hgqd,hkd->hgqk", queries, keys)
    exact = softmax.weights(dots, visible)
    change = torch.empty(num_kv_heads, head_dim, dtype=torch.float64, device=keys.device)
    for d in range(head_dim):
        moved = dots.clone()
        moved[..., span] += queries[..., d, None] * error[:, None, None, :, d]
        change[:, d] = (softmax.weights(moved, visible) - exact).double().square().mean((1, 2, 3))
    return change


@torch.inference_mode()
def measure_statistics(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    metric: Metric = "query",
    skip_layers: Sequence[int] = (),
    progress: Progress | None = None,
) -> dict[int, LayerStatistics]:
    """Observe queries and keys on calibration text; sums are streamed, no keys are kept.

    Args:
        model: with ``attn_implementation="kitty"``.
        windows: int64 ``[num_tokens]`` each, at least a sink and a page long.
        metric: see `Metric`.
        skip_layers: not measured.
    Raises:
        ConfigError: an unknown metric, or a layer to skip that does not exist.
        DataError: a window too short to hold a page.
        NumericsError: a layer whose queries or keys are zero, NaN, infinite, or never seen.
    """
    if metric not in get_args(Metric):
        raise ConfigError(f"metric is {metric!r}", f"Use one of {', '.join(get_args(Metric))}.")
    sink_len = LAYER_KL_CONFIG.sink_len
    if min((len(window) for window in windows), default=0) < sink_len + PAGE_SIZE:
        raise DataError(f"A window is shorter than a page: {sink_len + PAGE_SIZE} tokens.", "Raise --max-seq-length.")
    measured = measurable_layers(layers_of(model.config), skip_layers)
    decoder_config = model.config.get_text_config(decoder=True)
    observed = {index: ObservedLayer(decoder_config, metric, sink_len) for index in measured}
    for done, window in enumerate(windows):
        if progress:
            progress("queries and keys", done, len(windows))
        layers = DynamicCache(config=model.config).layers
        for index, layer in observed.items():
            layer.reset()
            layers[index] = layer
        model(
            input_ids=window[None].to(model.device),
            use_cache=True,
            logits_to_keep=1,
            **{cache_kwarg(model): Cache(layers=layers)},
        )
    if progress:
        progress("queries and keys", len(windows), len(windows))
    statistics = {}
    for index, layer in observed.items():
        statistics[index] = _verified(index, layer.statistics, metric)
    return statistics


def measurable_layers(layers: Sequence[LayerGeometry], skip_layers: Sequence[int]) -> list[int]:
    """Numbers of the layers to measure.

    Raises:
        ConfigError: a layer to skip that does not exist, or none left.
    """
    unknown = sorted(set(skip_layers) - {layer.index for layer in layers})
    if unknown:
        raise ConfigError(f"There is no layer {unknown[0]} to skip.", f"The model has layers 0 to {len(layers) - 1}.")
    measured = [layer.index for layer in layers if layer.quantized and layer.index not in skip_layers]
    if not measured:
        raise ConfigError("Every layer is skipped.", "Leave at least one layer to measure.")
    return measured


def _verified(index: int, statistics: LayerStatistics | None, metric: Metric) -> LayerStatistics:
    hint = "Check the weights; leave the layer out with --skip-layers."
    if statistics is None:
        raise NumericsError(f"Layer {index} was never observed: the model does not call it.", hint)
    for name, value in (("queries", statistics.query_energy), ("keys", statistics.scores(metric))):
        if not bool(value.isfinite().all()):
            raise NumericsError(f"Layer {index}: {name} hold NaN or infinite values.", hint)
        if not bool(value.any()):
            raise NumericsError(f"Layer {index}: {name} are all zero.", hint)
    return statistics


def measure_profile(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    kl_windows: Sequence[Tensor],
    provenance: Provenance,
    skip_layers: Sequence[int] = (),
    progress: Progress | None = None,
) -> BoostProfile:
    """Measure a model and join the results to a boost profile.

    Args:
        model: with ``attn_implementation="kitty"``.
        windows: calibration text for queries and keys, int64 ``[num_tokens]`` each.
        kl_windows: calibration text for the KL of each layer, int64 ``[num_tokens]`` each.
        provenance: what the profile says of itself; its metric is measured.
        skip_layers: neither measured nor, with this profile, paged.
        progress: see `Progress`.
    Raises:
        As `measure_statistics` and `measure_layer_kl`.
    """
    statistics = measure_statistics(model, windows, provenance.metric, skip_layers, progress)
    return profile_of(model, statistics, kl_windows, provenance, progress)


def profile_of(
    model: PreTrainedModel,
    statistics: Mapping[int, LayerStatistics],
    kl_windows: Sequence[Tensor],
    provenance: Provenance,
    progress: Progress | None = None,
) -> BoostProfile:
    """The second half of `measure_profile`: the KL of each observed layer, joined with what was observed."""
    energies = {index: stats.query_energy for index, stats in statistics.items()}
    curves = measure_layer_kl(model, kl_windows, energies, BOOST_LEVELS, progress)
    layers = {
        index: LayerProfile(energies[index].cpu(), stats.scores(provenance.metric).cpu(), curves[index])
        for index, stats in statistics.items()
    }
    return BoostProfile(layers, BOOST_LEVELS, provenance)
