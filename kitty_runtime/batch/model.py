"""What a batch needs to know of a loaded model, and what tells it from another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kitty_runtime.batch.requests import BatchModel
from kitty_runtime.batch.settings import defaults_of_model, settings_sha256
from kitty_runtime.config import CacheConfig
from kitty_runtime.models.fingerprint import config_sha256, weights_sha256
from kitty_runtime.models.geometry import ModelGeometry
from kitty_runtime.profiles import BoostProfile, dump_profile

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def batch_model(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    geometry: ModelGeometry,
    config: CacheConfig,
    profile: BoostProfile | None,
    given: Mapping[str, Any],
) -> BatchModel:
    """
    Args:
        name: to call it by in the answers.
        geometry: the model's.
        config, profile: of its cache.
        given: fields of `SamplingDefaults` that go over the model's own; None leaves them.
    """
    generation = model.generation_config
    defaults = defaults_of_model(generation.to_dict()).changed(given)
    end_tokens = tuple(dict.fromkeys((*_ids(generation.eos_token_id), *_ids(tokenizer.eos_token_id))))
    identity = {
        "config": config_sha256(geometry),
        "weights": weights_sha256(model),
        "dtype": str(model.dtype),
        "profile": "" if profile is None else hashlib.sha256(dump_profile(profile)).hexdigest(),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        "end_tokens": repr(end_tokens),
    }
    return BatchModel(
        name=name,
        tokenizer=tokenizer,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        end_tokens=end_tokens,
        defaults=defaults,
        settings_sha256=settings_sha256(config, defaults, identity),
    )


def _ids(eos_token_id: int | list[int] | None) -> list[int]:
    return [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
