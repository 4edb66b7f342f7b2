"""The shape of a model's keys and values, from its HF config alone: which layers kitty quantizes.

Layer kinds come from the cache that transformers itself would build for the config, so new architectures and
new versions of transformers need no list here. What cannot run on paged 2-bit keys and values is refused by
name.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitty_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedConfig

MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 256
"""Channel ids are stored as uint8 (`PageLayout`)."""
HEAD_DIM_STEP = 16

_NEXT_STEP = "Use a decoder with plain multi-head keys and values, such as Llama, Qwen, Gemma or Phi."

# An attribute of the decoder's config that is set (not None, 0 or empty), and what it means.
_REFUSED_ATTRIBUTES = {
    "kv_lora_rank": "caches compressed latents instead of keys and values (multi-head latent attention)",
    "cross_attention_layers": "has cross-attention layers",
    "index_n_heads": "picks the tokens to attend to with an indexer (sparse attention)",
    "num_kv_shared_layers": "has layers that reuse the keys and values of other layers",
}


@dataclass(frozen=True)
class LayerGeometry:
    """One layer's cache.

    Attributes:
        index: of the layer in the model, from 0.
        quantized: whether its keys and values go to packed pages.
        reason: why it is kept as transformers caches it; empty if quantized.
        num_kv_heads, head_dim: 0 where the layer has no keys and values.
        sliding_window: tokens that the layer sees, or None for all.
    """

    index: int
    quantized: bool
    reason: str
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None


@dataclass(frozen=True)
class ModelGeometry:
    """A model's sizes.

    Attributes:
        num_q_heads, num_kv_heads, head_dim: of the first quantized layer; ``layers`` has each layer's own.
        max_position_embeddings: longest context in tokens, or None where the config does not say.
        dtype_name: of the checkpoint, such as ``bfloat16``; ``float32`` where the config does not say.
        num_parameters: of the whole model; tied weights count once.
    """

    model_type: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    dtype_name: str
    layers: tuple[LayerGeometry, ...]
    num_parameters: int

    @property
    def quantized_layers(self) -> tuple[LayerGeometry, ...]:
        """The layers whose keys and values go to packed pages; never empty."""
        return tuple(layer for layer in self.layers if layer.quantized)


def geometry_of(config: PreTrainedConfig) -> ModelGeometry:
    """The sizes of the model that `config` describes. Reads no weights.

    Raises:
        UnsupportedModelError: the architecture cannot run on paged 2-bit keys and values.
    """
    layers = layers_of(config)
    text_config = _text_config(config)
    first = next(layer for layer in layers if layer.quantized)
    dtype = config.dtype or text_config.dtype or "float32"
    return ModelGeometry(
        model_type=config.model_type,
        num_layers=len(layers),
        num_q_heads=_layer_configs(text_config)[first.index].num_attention_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        hidden_size=text_config.hidden_size,
        vocab_size=text_config.vocab_size,
        max_position_embeddings=getattr(text_config, "max_position_embeddings", None),
        dtype_name=str(dtype).removeprefix("torch."),
        layers=layers,
        num_parameters=count_parameters(config),
    )


def layers_of(config: PreTrainedConfig) -> tuple[LayerGeometry, ...]:
    """Each layer's cache, in order. Cheaper than `geometry_of`: no model is built, not even without weights.

    Raises:
        UnsupportedModelError: the architecture cannot run on paged 2-bit keys and values.
    """
    name = config.model_type
    text_config = _text_config(config)
    _refuse_by_attributes(config, text_config)
    _refuse_without_attention_interface(config, text_config)
    cache_layers = _native_cache_layers(config)
    configs = _layer_configs(text_config)
    if len(cache_layers) != len(configs):
        raise UnsupportedModelError(
            f"{name} has {len(configs)} layers but transformers caches {len(cache_layers)}.", _NEXT_STEP
        )
    layers = tuple(
        _layer_geometry(name, index, cache_layer, layer_config)
        for index, (cache_layer, layer_config) in enumerate(zip(cache_layers, configs, strict=True))
    )
    if not any(layer.quantized for layer in layers):
        reasons = ", ".join(sorted({layer.reason for layer in layers}))
        raise UnsupportedModelError(
            f"{name} has no full-attention layer, so there is nothing to quantize: {reasons}.", _NEXT_STEP
        )
    return layers


def count_parameters(config: PreTrainedConfig) -> int:
    """Parameters of the whole model, tied weights once: built on the meta device, so no memory is used.

    Code from the model's repository runs only if the config's class already came from there.
    """
    import torch
    from transformers import AutoModelForCausalLM

    trusted = type(config).__module__.startswith("transformers_modules")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    return sum(parameter.numel() for parameter in model.parameters())


def _text_config(config: PreTrainedConfig) -> Any:
    return config.get_text_config(decoder=True)


def _layer_configs(text_config: Any) -> Sequence[Any]:
    """One config per layer: head sizes may differ between layers (Gemma 4)."""
    configs: Sequence[Any] = text_config.per_layer_config
    return configs


def _refuse_by_attributes(config: PreTrainedConfig, text_config: Any) -> None:
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False) or getattr(text_config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder.", _NEXT_STEP)
    architectures = config.architectures or []
    if architectures and all(a.endswith(("ForMaskedLM", "ForPreTraining")) for a in architectures):
        raise UnsupportedModelError(f"{name} ({architectures[0]}) does not generate text.", _NEXT_STEP)
    if not hasattr(text_config, "num_hidden_layers"):
        raise UnsupportedModelError(f"{name} has no single stack of decoder layers.", _NEXT_STEP)
    layer_configs = _layer_configs(text_config)
    for attribute, meaning in _REFUSED_ATTRIBUTES.items():
        # Per layer, because a config whose layers differ refuses to answer for all of them at once.
        value = next((v for c in layer_configs if (v := getattr(c, attribute, None))), None)
        if value:
            raise UnsupportedModelError(f"{name} {meaning}: {attribute} is {value}.", _NEXT_STEP)
    if "reuse" in (getattr(text_config, "kv_sharing_modes", None) or ()):
        meaning = _REFUSED_ATTRIBUTES["num_kv_shared_layers"]
        raise UnsupportedModelError(f"{name} {meaning}: kv_sharing_modes has 'reuse'.", _NEXT_STEP)


def _refuse_without_attention_interface(config: PreTrainedConfig, text_config: Any) -> None:
    """Falcon, Bloom, MPT and the like compute attention themselves, where no cache can replace it.

    The model class tells: its module uses the table of attention functions or it does not. A model whose code
    comes from its repository has no class yet and is let through.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    known = [type(c) for c in (text_config, config) if type(c) in MODEL_FOR_CAUSAL_LM_MAPPING]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # LLaVA: its text model could be loaded, the whole cannot
        if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
            return
        raise UnsupportedModelError(f"{config.model_type} has no text-generation model in transformers.", _NEXT_STEP)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[known[0]]
    if not hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS") and _has_heads(text_config):
        raise UnsupportedModelError(
            f"{config.model_type} computes attention outside transformers' attention interface.", _NEXT_STEP
        )


def _has_heads(text_config: Any) -> bool:
    return any(getattr(c, "num_attention_heads", None) for c in _layer_configs(text_config))


def _native_cache_layers(config: PreTrainedConfig) -> list[Any]:
    from transformers.cache_utils import DynamicCache

    try:
        return list(DynamicCache(config=config).layers)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"transformers cannot tell how {config.model_type} caches its layers: {error}", _NEXT_STEP
        ) from error


def _layer_geometry(model_type: str, index: int, cache_layer: Any, layer_config: Any) -> LayerGeometry:
    from transformers.cache_utils import DynamicLayer

    heads = getattr(layer_config, "num_attention_heads", None)
    if not isinstance(cache_layer, DynamicLayer):
        return LayerGeometry(index, False, _kind_without_attention(cache_layer), 0, 0, None)
    if not heads:
        return LayerGeometry(index, False, "no attention heads", 0, 0, None)
    num_kv_heads = getattr(layer_config, "num_key_value_heads", None) or heads
    head_dim = getattr(layer_config, "head_dim", None) or layer_config.hidden_size // heads
    if type(cache_layer) is DynamicLayer:
        _check_heads(model_type, index, heads, num_kv_heads, head_dim, layer_config)
        return LayerGeometry(index, True, "", num_kv_heads, head_dim, None)
    window = getattr(cache_layer, "sliding_window", None)
    kind = type(cache_layer).__name__
    if window is not None and kind.startswith("Dynamic"):
        return LayerGeometry(index, False, f"sliding window of {window} tokens", num_kv_heads, head_dim, window)
    return LayerGeometry(index, False, f"cached natively as {kind}", num_kv_heads, head_dim, window)


def _kind_without_attention(cache_layer: Any) -> str:
    kind = type(cache_layer).__name__
    if kind.startswith("LinearAttention"):
        return "recurrent state instead of keys and values"
    return "no keys and values" if kind == "DummyLayer" else f"cached natively as {kind}"


def _check_heads(model_type: str, index: int, heads: int, num_kv_heads: int, head_dim: int, layer_config: Any) -> None:
    where = f"{model_type} layer {index}"
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP:
        raise UnsupportedModelError(
            f"{where} has head_dim {head_dim}.",
            f"A page holds heads of {MIN_HEAD_DIM} to {MAX_HEAD_DIM} channels, in steps of {HEAD_DIM_STEP}.",
        )
    v_head_dim = getattr(layer_config, "v_head_dim", None) or head_dim
    if v_head_dim != head_dim:
        raise UnsupportedModelError(f"{where} has keys of {head_dim} channels but values of {v_head_dim}.", _NEXT_STEP)
    if heads % num_kv_heads:
        raise UnsupportedModelError(
            f"{where} has {heads} query heads, no multiple of its {num_kv_heads} KV heads.",
            "Check num_attention_heads and num_key_value_heads in config.json.",
        )
