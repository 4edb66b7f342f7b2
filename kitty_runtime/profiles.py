"""The boost profile: what was measured of a model's keys, its file, and the budgets it gives each layer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kitty_runtime.config import CacheConfig, Metric
from kitty_runtime.errors import ConfigError, ProfileError
from kitty_runtime.quant.boost import LayerBoost, choose_boosted, random_channels

if TYPE_CHECKING:
    from kitty_runtime.models.geometry import LayerGeometry

SCHEMA_VERSION = 1
SUFFIX = ".safetensors"
_METADATA_KEY = "kitty"
BUDGET_STEPS = 16
"""Layer budgets move in steps of head_dim / 16 channels."""


@dataclass(frozen=True)
class LayerProfile:
    """What was measured of one layer.

    Attributes:
        query_energy: fp32 ``[num_kv_heads, head_dim]``, rms of the queries of the GQA group, after RoPE.
        channel_scores: fp32 ``[num_kv_heads, head_dim]``, by the profile's metric; higher = more sensitive.
        kl: per boost level of the profile, mean KL divergence in nats against 16 bits with this layer alone
            quantized (keys at 2 bits and that boost, values at 4 bits).
    """

    query_energy: Tensor
    channel_scores: Tensor
    kl: tuple[float, ...]

    @property
    def relative_scores(self) -> Tensor:
        """The scores over the median of their KV head."""
        return self.channel_scores / self.channel_scores.median(dim=1, keepdim=True).values.clamp_min(1e-12)


@dataclass(frozen=True)
class Provenance:
    """Where a profile comes from: enough to repeat it."""

    model: str
    model_revision: str
    config_sha256: str
    weights_sha256: str
    metric: Metric
    data: str
    token_sha256: str
    num_tokens: int
    kl_tokens: int
    seed: int
    command: str
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BoostProfile:
    """A model's measured key sensitivity.

    Attributes:
        layers: by layer number; layers that are missing are kept at 16 bits.
        boost_levels: the boost ratios of `LayerProfile.kl`, ascending, the first 0.
    """

    layers: Mapping[int, LayerProfile]
    boost_levels: tuple[float, ...]
    provenance: Provenance

    def budgets(self, boost_ratio: float) -> dict[int, int]:
        """Boosted channels per layer, `boost_ratio` of head_dim on average, where they lower the KL most.

        Greedy: the next step goes to the layer whose KL falls most per channel, on the measured curves
        (logarithms interpolated between levels). What is left where the curves have ended goes to the layers whose KL
        is still largest. Never above the average asked.
        """
        curves = {index: self._curve(index) for index in self.layers}
        head_dims = {index: layer.query_energy.shape[1] for index, layer in self.layers.items()}
        step = {index: head_dim // BUDGET_STEPS for index, head_dim in head_dims.items()}
        left = math.floor(sum(boost_ratio * d for d in head_dims.values()) + 1e-6)
        taken = dict.fromkeys(self.layers, 0)
        while True:
            gains = [
                ((curves[i][taken[i]] - curves[i][n]) / ((n - taken[i]) * step[i]), curves[i][taken[i]], -i, -n)
                for i in self.layers
                for n in range(taken[i] + 1, BUDGET_STEPS + 1)
                if (n - taken[i]) * step[i] <= left
            ]
            if not gains:
                return {index: n * step[index] for index, n in taken.items()}
            _, _, minus_index, minus_n = max(gains)
            left -= (-minus_n - taken[-minus_index]) * step[-minus_index]
            taken[-minus_index] = -minus_n

    def _curve(self, index: int) -> list[float]:
        """KL at 0, 1, .. 16 sixteenths of the channels, falling."""
        levels = [level * BUDGET_STEPS for level in self.boost_levels]
        logs = [math.log(max(kl, 1e-12)) for kl in self.layers[index].kl]
        for i in range(1, len(logs)):
            logs[i] = min(logs[i], logs[i - 1])
        curve = []
        for n in range(BUDGET_STEPS + 1):
            right = next((i for i, level in enumerate(levels) if level >= n), len(levels) - 1)
            left = max(0, right - 1)
            width = levels[right] - levels[left]
            weight = 1.0 if width == 0 else min(1.0, (n - levels[left]) / width)
            curve.append(math.exp(logs[left] * (1 - weight) + logs[right] * weight))
        return curve


def layer_boosts(
    layers: Sequence[LayerGeometry], config: CacheConfig, profile: BoostProfile | None
) -> list[LayerBoost | None]:
    """How each layer of a model chooses its boosted channels; None where the layer is not paged.

    The profile's energies, channels and budgets serve the ``weighted`` and ``static`` policies; the paper's policies
    take the same number of channels in every layer.

    Raises:
        ConfigError: ``static`` without a profile.
        ProfileError: the profile's shapes are not the model's.
    """
    if config.policy == "static" and profile is None:
        raise ConfigError("The static policy has no channels without a profile.", "Make one: kitty profile MODEL")
    if profile is None or not config.uses_profile:
        return [_without_profile(layer, config) if layer.quantized else None for layer in layers]
    check_shapes(profile, layers)
    budgets = profile.budgets(config.boost_ratio)
    boosts: list[LayerBoost | None] = []
    for layer in layers:
        measured = profile.layers.get(layer.index)
        if measured is None or not layer.quantized:
            boosts.append(None)
            continue
        count = budgets[layer.index] if config.k_bits == 2 else layer.head_dim
        channels = choose_boosted(measured.channel_scores, count) if config.policy == "static" else None
        boosts.append(LayerBoost(config.policy, count, measured.query_energy, channels))
    return boosts


def _without_profile(layer: LayerGeometry, config: CacheConfig) -> LayerBoost:
    count = config.num_boosted(layer.head_dim)
    channels = None
    if config.policy == "random":
        channels = random_channels(layer.num_kv_heads, layer.head_dim, count, config.seed + layer.index)
    return LayerBoost(config.policy, count, channels=channels)


def check_shapes(profile: BoostProfile, layers: Sequence[LayerGeometry]) -> None:
    """Verify that a profile fits a model.

    Raises:
        ProfileError: a layer that the model lacks, or with other head counts or sizes.
    """
    by_index = {layer.index: layer for layer in layers}
    for index, measured in profile.layers.items():
        layer = by_index.get(index)
        shape = tuple(measured.query_energy.shape)
        if layer is None or not layer.quantized:
            raise ProfileError(
                f"The profile measures layer {index}, which the model does not page.", "Make one: kitty profile MODEL"
            )
        if shape != (layer.num_kv_heads, layer.head_dim):
            raise ProfileError(
                f"The profile's layer {index} has {shape[0]} KV heads of {shape[1]}, the model "
                f"{layer.num_kv_heads} of {layer.head_dim}.",
                "Make one for this model: kitty profile MODEL",
            )


def dump_profile(profile: BoostProfile) -> bytes:
    """The file's bytes: safetensors with one metadata entry, the same bytes for the same profile."""
    tensors = {}
    for index, layer in profile.layers.items():
        tensors[f"layers.{index}.query_energy"] = layer.query_energy.float().cpu().contiguous()
        tensors[f"layers.{index}.channel_scores"] = layer.channel_scores.float().cpu().contiguous()
    header = {
        "schema_version": SCHEMA_VERSION,
        "boost_levels": list(profile.boost_levels),
        "kl": {str(index): list(layer.kl) for index, layer in profile.layers.items()},
        "provenance": asdict(profile.provenance),
    }
    return save(tensors, {_METADATA_KEY: json.dumps(header, sort_keys=True)})


def load_profile(path: Path | str) -> BoostProfile:
    """Read and verify a boost profile.

    Raises:
        ProfileError: missing, not a profile, another schema, or with wrong shapes or values. A wrong channel id or
            count would read outside a page on a GPU, so nothing is taken on trust.
    """
    path = Path(path)
    if not path.is_file():
        raise ProfileError(f"There is no profile at {path}.", "Make one: kitty profile MODEL")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = (file.metadata() or {}).get(_METADATA_KEY)
            # clone: the tensors would otherwise be windows on a file that may be replaced or truncated
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ProfileError(
            f"{path} cannot be read as a profile: {error}", "Make it again: kitty profile MODEL"
        ) from error
    if metadata is None:
        raise ProfileError(f"{path} is a safetensors file but not a boost profile.", "Make one: kitty profile MODEL")
    try:
        return _parse(json.loads(metadata), tensors)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ProfileError):
            hint = error.hint or "Make it again: kitty profile MODEL"
            raise ProfileError(f"{path}: {error.message}", hint) from error
        raise ProfileError(f"{path} is damaged: {error!r}", "Make it again: kitty profile MODEL") from error


def _parse(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> BoostProfile:
    if header["schema_version"] != SCHEMA_VERSION:
        raise ProfileError(
            f"schema version {header['schema_version']}, this kitty reads {SCHEMA_VERSION}",
            "Make it again with this version: kitty profile MODEL",
        )
    levels = tuple(float(level) for level in header["boost_levels"])
    ascending = all(low < high for low, high in pairwise(levels))  # false for NaN too
    if len(levels) < 2 or levels[0] != 0 or not ascending or levels[-1] > 1:
        raise ProfileError(f"boost levels {levels} are not ascending shares from 0")
    layers = {}
    for index, kl in sorted((int(index), kl) for index, kl in header["kl"].items()):
        layer = LayerProfile(
            tensors[f"layers.{index}.query_energy"],
            tensors[f"layers.{index}.channel_scores"],
            tuple(float(value) for value in kl),
        )
        _check_layer(index, layer, len(levels))
        layers[index] = layer
    if not layers:
        raise ProfileError("it measures no layer")
    return BoostProfile(layers, levels, _provenance(header["provenance"]))


def _provenance(entries: Mapping[str, Any]) -> Provenance:
    """Where the profile says that it comes from, each entry of its type: reports compute with the numbers."""
    found = Provenance(**entries)
    kinds = {"int": int, "str": str, "Metric": str}
    for entry in fields(found):
        kind, value = kinds.get(str(entry.type), Mapping), getattr(found, entry.name)
        if not isinstance(value, kind):
            raise ProfileError(f"its {entry.name} is {value!r}")
    return found


def _check_layer(index: int, layer: LayerProfile, num_levels: int) -> None:
    energy, scores = layer.query_energy, layer.channel_scores
    if energy.dim() != 2 or energy.shape != scores.shape or energy.shape[1] > 256 or energy.shape[1] % 16:
        raise ProfileError(f"layer {index} has energies {tuple(energy.shape)} and scores {tuple(scores.shape)}")
    for name, tensor in (("query energy", energy), ("channel scores", scores)):
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()) or bool((tensor < 0).any()):
            raise ProfileError(f"layer {index}: {name} must be finite fp32 values from 0 up")
        if not bool(tensor.any()):
            raise ProfileError(f"layer {index}: {name} is all zero; the layer was not observed")
    if len(layer.kl) != num_levels or not all(math.isfinite(kl) and kl >= 0 for kl in layer.kl):
        raise ProfileError(f"layer {index} has KL values {layer.kl} for {num_levels} boost levels")
