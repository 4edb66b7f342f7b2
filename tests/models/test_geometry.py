"""Geometry from configs alone: what is quantized, what is kept and why, what is refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    Cohere2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    MllamaConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    RwkvConfig,
    T5Config,
    ViTConfig,
)

from kitty_runtime.errors import UnsupportedModelError
from kitty_runtime.models.geometry import count_parameters, geometry_of, layers_of

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
ALL_FULL = [True] * 4
HALF = [False, True] * 2

MODELS = [
    (LlamaConfig, {}, ALL_FULL),
    (Qwen2Config, {}, ALL_FULL),
    (Qwen3Config, {}, ALL_FULL),
    (MistralConfig, {"sliding_window": None}, ALL_FULL),
    (MistralConfig, {"sliding_window": 64, "layer_types": ALTERNATING}, HALF),
    (Gemma2Config, {"sliding_window": 64}, HALF),
    (Gemma3TextConfig, {"sliding_window": 64, "layer_types": ALTERNATING}, HALF),
    (Phi3Config, {}, ALL_FULL),
    (Olmo2Config, {}, ALL_FULL),
    (Glm4Config, {}, ALL_FULL),
    (Cohere2Config, {"sliding_window": 64, "layer_types": ALTERNATING}, HALF),
    (GptOssConfig, {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2}, HALF),
]


def tiny(config_class: type[PreTrainedConfig], **changes: object) -> PreTrainedConfig:
    return config_class(**{**TINY, **changes})


@pytest.mark.parametrize(
    ("config_class", "changes", "quantized"), MODELS, ids=[f"{c.model_type}-{sum(q)}" for c, _, q in MODELS]
)
def test_supported_models(config_class, changes, quantized):
    geometry = geometry_of(tiny(config_class, **changes))
    assert [layer.quantized for layer in geometry.layers] == quantized
    assert [layer.index for layer in geometry.layers] == [0, 1, 2, 3]
    for layer in geometry.layers:
        assert (layer.num_kv_heads, layer.head_dim) == (2, 32)
        assert layer.reason == ("" if layer.quantized else "sliding window of 64 tokens")
        assert layer.sliding_window == (None if layer.quantized else 64)
    assert geometry.model_type == config_class.model_type
    assert (geometry.num_layers, geometry.num_q_heads, geometry.num_kv_heads) == (4, 4, 2)
    assert (geometry.head_dim, geometry.hidden_size, geometry.vocab_size) == (32, 64, 96)
    assert geometry.max_position_embeddings == 512
    assert len(geometry.quantized_layers) == sum(quantized)


def test_head_dim_and_kv_heads_are_derived_where_the_config_leaves_them_out():
    sizes = {key: value for key, value in TINY.items() if key not in ("head_dim", "num_key_value_heads")}
    geometry = geometry_of(GPT2Config(**sizes))
    assert (geometry.head_dim, geometry.num_kv_heads) == (16, 4)


def test_recurrent_layers_are_kept_beside_attention():
    config = tiny(JambaConfig, attn_layer_period=2, attn_layer_offset=1, num_experts=2, expert_layer_period=8)
    layers = layers_of(config)
    assert [layer.quantized for layer in layers] == HALF
    assert layers[0].reason == "recurrent state instead of keys and values"
    assert layers[0].num_kv_heads == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "bfloat16"])
def test_dtype_name(dtype):
    assert geometry_of(tiny(LlamaConfig, dtype=dtype)).dtype_name == str(dtype).removeprefix("torch.")


def test_dtype_defaults_to_float32():
    assert geometry_of(tiny(LlamaConfig)).dtype_name == "float32"


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_by_hand_and_tied_weights_once(tied):
    embedding = 96 * 64
    attention = 64 * (4 + 2 + 2) * 32 + 4 * 32 * 64
    layer = attention + 3 * 64 * 48 + 2 * 64
    expected = embedding * (1 if tied else 2) + 4 * layer + 64
    config = tiny(LlamaConfig, tie_word_embeddings=tied)
    assert count_parameters(config) == expected
    assert geometry_of(config).num_parameters == expected


REFUSED = [
    (DeepseekV3Config, {"kv_lora_rank": 512}, "kv_lora_rank is 512"),
    (FalconConfig, {}, "falcon computes attention outside"),
    (T5Config, {}, "t5 is an encoder-decoder"),
    (MambaConfig, {}, "mamba has no full-attention layer"),
    (RwkvConfig, {}, "rwkv has no full-attention layer"),
    (MistralConfig, {"sliding_window": 64}, "nothing to quantize: sliding window of 64 tokens"),
    (Gemma3nTextConfig, {}, "num_kv_shared_layers is 15"),
    (Gemma4TextConfig, {}, "layer 5 has head_dim 512"),
    (MllamaConfig, {}, "cross-attention"),
    (MiMoV2FlashConfig, {}, "keys of 192 channels but values of 128"),
    (BertConfig, {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM. does not generate text"),
    (ViTConfig, {}, "vit has no text-generation model"),
]


@pytest.mark.parametrize(("config_class", "changes", "message"), REFUSED, ids=[c.model_type for c, _, _ in REFUSED])
def test_refused_by_name(config_class, changes, message):
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        geometry_of(config_class(**changes))
    assert caught.value.message.count("\n") == 0
    assert caught.value.hint


@pytest.mark.parametrize("head_dim", [8, 24, 40, 272, 512])
def test_head_dims_that_no_page_holds_are_named(head_dim):
    with pytest.raises(UnsupportedModelError, match=f"llama layer 0 has head_dim {head_dim}"):
        layers_of(tiny(LlamaConfig, head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256])
def test_head_dims_that_pages_hold(head_dim):
    assert layers_of(tiny(LlamaConfig, head_dim=head_dim))[0].head_dim == head_dim


def test_odd_query_heads_are_named():
    with pytest.raises(UnsupportedModelError, match="4 query heads, no multiple of its 3 KV heads"):
        layers_of(tiny(LlamaConfig, num_key_value_heads=3))


def test_unknown_layer_type_is_refused_by_name():
    config = tiny(LlamaConfig)
    config.layer_types = ["holographic_attention"] * 4
    with pytest.raises(UnsupportedModelError, match=r"llama.*holographic_attention"):
        layers_of(config)
