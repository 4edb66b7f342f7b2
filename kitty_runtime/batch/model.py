"""What a batch needs to know of a loaded model, and what tells it from another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kitty_runtime.batch.requests import BatchModel
from kitty_runtime.batch.settings import settings_sha256
from kitty_runtime.config import CacheConfig
from kitty_runtime.engine.defaults import end_tokens, sampling_params
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
    asked: Mapping[str, Any],
    seed: int,
) -> BatchModel:
    """
    Args:
        name: to call it by in the answers.
        geometry: the model's.
        config, profile: of its cache.
        asked: fields of `SamplingParams` that go over the model's own; None leaves them.
        seed: of the batch.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    sampling = partial(sampling_params, model, tokenizer)
    identity = {
        "config": config_sha256(geometry),
        "weights": weights_sha256(model),
        "dtype": str(model.dtype),
        "profile": "" if profile is None else hashlib.sha256(dump_profile(profile)).hexdigest(),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
    }
    return BatchModel(
        name=name,
        tokenizer=tokenizer,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        end_tokens=end_tokens(model, tokenizer),
        sampling=sampling,
        asked=given,
        seed=seed,
        settings_sha256=settings_sha256(config, sampling(given), seed, identity),
    )
