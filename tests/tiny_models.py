"""Tiny random models, built from configs, for every test that needs one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.models.loading import cache_kwarg

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,  # at the usual 0.02 attention is nearly uniform and hides errors
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "phi3": (Phi3Config, {}),
    "gemma2": (Gemma2Config, {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32, **ALTERNATING}),
    "gemma3": (Gemma3TextConfig, {"query_pre_attn_scalar": 32, **ALTERNATING}),
    "olmo2": (Olmo2Config, {}),
    "glm4": (Glm4Config, {}),
    "cohere2": (Cohere2Config, {"logit_scale": 1.0, **ALTERNATING}),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING}),
}


def tiny_config(family: str = "llama", **changes: Any) -> PreTrainedConfig:
    config_class, extra = FAMILIES[family]
    return config_class(**{**SIZES, **extra, **changes})


def tiny_model(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    attention: str = "kitty",
    seed: int = 0,
    **changes: Any,
) -> PreTrainedModel:
    """A random model in eval mode. Learned attention sinks, which start at zero, are made random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    if family == "gpt_oss":
        model.set_experts_implementation("eager")  # the default has no float64
    model.set_attn_implementation(attention)
    return model.to(dtype).eval()


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    """Token ids without the special ones."""
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Rows of ids of different lengths as a batch, padded on the left."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.int64), row]) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits_in_chunks(model: PreTrainedModel, ids: Tensor, cache: Any, chunk_sizes: list[int] | int) -> Tensor:
    """Logits ``[len(ids), vocab]`` of one sequence through `cache`, in passes of the given sizes."""
    arguments = {cache_kwarg(model): cache, "use_cache": True}
    chunks = ids.split(chunk_sizes)
    return torch.cat([model(input_ids=chunk[None], **arguments).logits[0] for chunk in chunks])


def packed_bytes(cache: KittyCache, row: int, num_tokens: int) -> list[bytes]:
    """Every field of every packed page of a sequence at `num_tokens` tokens, page by page, layer by layer."""
    k_pages, v_pages = cache.config.packed_pages(num_tokens)
    found = []
    for layer in cache.paged.layers:
        pages = layer.state.pages[cache.paged.tables[row]]
        page = layer.state.layout.fields(pages)
        keys = (page.k_low, page.k_high, *page.k_qparams, page.boosted_channels)
        values = (page.v_low, page.v_high, *page.v_qparams)
        found += [field[p].contiguous().numpy().tobytes() for p in range(k_pages) for field in keys]
        found += [field[p].contiguous().numpy().tobytes() for p in range(v_pages) for field in values]
    return found
