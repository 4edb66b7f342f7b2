"""The model ``kitty`` of lm-evaluation-harness; importing this registers it.

Generating and scoring both go through a `KittyCache`. A loglikelihood is one forward pass: by the rule of position
(`Windows.packed_pages`) its queries read the pages that token-by-token decode would read.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import logging
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kitty_runtime.errors import ConfigError, MissingPackageError, UnsupportedOperationError

try:  # before what takes seconds to import
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lm_eval":
        raise
    raise MissingPackageError("lm-eval is not installed.", "pip install 'kitty-kv[eval]'") from error

import torch
from torch import Tensor

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import PAGE_SIZE, Prefill, cache_config
from kitty_runtime.models.attention import ATTENTION
from kitty_runtime.models.geometry import geometry_of
from kitty_runtime.models.loading import cache_kwarg, load_config, load_model, load_tokenizer, resolve_model
from kitty_runtime.models.preflight import Dtype, pick_device
from kitty_runtime.profile_store import profile_for
from kitty_runtime.profiles import BoostProfile, dump_profile, layer_boosts, load_profile

logger = logging.getLogger("lm_eval.kitty")  # below the harness's, so that its log level and format hold

_OWN = ("preset", "bits", "k_bits", "v_bits", "boost", "prefill", "profile")
_ONE_DEVICE = "A model runs on one device: device=cuda:N."
_FLAG_DEFAULTS = {"batch_size": 1, "device": "cuda:0"}
"""What the harness's command passes where nobody gave a flag, its device even where there is none."""
_REFUSED = {
    "backend": "Leave it out: kitty runs decoders.",
    **dict.fromkeys(("subfolder", "gguf_file"), "Name the folder or .gguf file itself: pretrained=PATH"),
    **dict.fromkeys(("peft", "delta", "autogptq", "gptqmodel"), "Save the finished model and name its folder."),
    **dict.fromkeys(("parallelize", "tp_plan"), _ONE_DEVICE),
    **dict.fromkeys(("max_memory_per_gpu", "max_cpu_memory", "offload_folder"), _ONE_DEVICE),
}
"""Arguments of the harness's HuggingFace model that kitty's own loading has no place for, and what to do instead."""


@register_model("kitty")
class KittyLM(HFLM):  # type: ignore[misc]
    """A HuggingFace model whose keys and values are in a `KittyCache`, in every task of the harness.

    Args:
        pretrained: any name that kitty's commands take; None is their default model.
        preset, bits, k_bits, v_bits, boost: the cache's settings, see `kitty_runtime.config.cache_config`.
        prefill: see `CacheConfig`; ``full``, the paper's, is for generate_until tasks alone.
        profile: file of a boost profile; None = the one that was measured on this very model, if there is one.
        device, dtype, trust_remote_code: see `kitty_runtime.models.loading.load_model`.
        revision: of a hub model.
        harness: whatever else `lm_eval.models.huggingface.HFLM` takes: batch_size, max_length, enable_thinking, ...
    Raises:
        ConfigError: an argument that nobody knows, or a setting that the page format cannot hold.
        ModelLoadError, UnsupportedModelError, ProfileError: before weights load, as the commands do.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        preset: str | int | None = None,
        bits: int | None = None,
        k_bits: int | None = None,
        v_bits: int | None = None,
        boost: float | None = None,
        prefill: Prefill = "paged",
        profile: str | None = None,
        device: str | None = None,
        dtype: Dtype = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        **harness: Any,
    ) -> None:
        _check_names(harness)
        settings = cache_config(None if preset is None else str(preset), bits, k_bits, v_bits, boost)
        self.cache_config = replace(settings, prefill=prefill)
        given_path = None if profile is None else Path(str(profile))
        given = None if given_path is None else load_profile(given_path)
        self._source = resolve_model(None if pretrained is None else str(pretrained), logger.info)
        if revision is not None and not self._source.is_local:
            self._source = replace(self._source, revision=str(revision))
        self._config = load_config(self._source, trust_remote_code)
        geometry = geometry_of(self._config)
        layer_boosts(geometry.layers, self.cache_config, given)  # a profile that does not fit is refused early
        if harness.get("tokenizer") is None:
            load_tokenizer(self._source, trust_remote_code)  # for its errors
        self._dtype: Dtype = dtype
        super().__init__(
            pretrained=self._source.path,
            revision=self._source.revision or "main",
            gguf_file=self._source.gguf_file,
            device=str(pick_device("auto" if device is None else str(device))),
            trust_remote_code=trust_remote_code,
            **harness,
        )
        self.profile, name = self._choose_profile(given, given_path)
        self._boosts = layer_boosts(geometry.layers, self.cache_config, self.profile)
        self._cache_kwarg = cache_kwarg(self.model)
        self._num_queries, self._packed_sum = 0, 0.0
        logger.info("%s on %s, %s; profile: %s", self._source.name, self.device, self.model.dtype, name)
        logger.info("cache: %s", self.cache_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> KittyLM:
        """From ``--model_args`` and the flags beside it; a flag that has its default counts as not given."""
        flags = {
            name: value
            for name, value in (additional_config or {}).items()
            if value is not None and value != _FLAG_DEFAULTS.get(name)
        }
        if twice := sorted(flags.keys() & arg_dict.keys()):
            raise ConfigError(f"{twice[0]} is a flag and a model argument.", "Give it once.")
        return cls(**arg_dict, **flags)

    @property
    def packed_fraction(self) -> float:
        """Mean share of visible keys that were read from packed pages where something was scored or generated."""
        return self._packed_sum / self._num_queries if self._num_queries else 0.0

    # --- what the harness calls --------------------------------------------------------------------------------

    def get_model_info(self) -> dict[str, Any]:
        """For the results' ``config``; asked when all is done, so it warns here if nothing was packed."""
        if self.cache_config.quantizes and self._num_queries and not self._packed_sum:
            logger.warning(
                "No query read a packed page, so these are the figures of 16 bits. The first is packed at token %d.",
                self.cache_config.windows.longest(0) + 1,
            )
        profile = None if self.profile is None else hashlib.sha256(dump_profile(self.profile)).hexdigest()
        cache = {**asdict(self.cache_config), "profile_sha256": profile, "packed_fraction": self.packed_fraction}
        return {**super().get_model_info(), "kitty": cache}

    def _get_config(self, *args: Any, **kwargs: Any) -> None:
        """The config is there already."""

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        """Load as kitty's commands do, on the device that the harness chose."""
        self._model = load_model(
            self._source,
            dtype=self._dtype,
            device=str(self._device),
            trust_remote_code=kwargs["trust_remote_code"],
            attn_implementation=ATTENTION,
        )

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits ``[num_seqs, n, vocab_size]``; rows are padded on the right, which no real token sees."""
        amp = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, amp, enabled=amp is not None):
            logits: Tensor = self.model(inps, use_cache=True, **self._new_cache()).logits
        return logits

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        """
        Raises:
            UnsupportedOperationError: with ``prefill="full"`` nothing here would be read packed.
        """
        if self.cache_config.prefill == "full":
            raise UnsupportedOperationError(
                "A loglikelihood is one prompt, and prefill=full reads prompts unquantized: nothing would be measured.",
                "Leave prefill out for this task.",
            )
        for _, context, continuation in requests:
            end = min(len(context) + len(continuation) - 1, self.max_length)
            self._count(max(0, end - len(continuation)), end)
        return super()._loglikelihood_tokens(requests, *args, **kwargs)  # type: ignore[no-any-return]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        rows: Tensor = super()._model_generate(context, max_length, stop, **generation_kwargs, **self._new_cache())
        mask = generation_kwargs.get("attention_mask")
        lengths = [context.shape[1]] * len(context) if mask is None else mask.sum(1).tolist()
        for length in lengths:
            first = length if self.cache_config.prefill == "full" else length - 1
            self._count(first, length - 1 + rows.shape[1] - context.shape[1])
        return rows

    # --- helpers -----------------------------------------------------------------------------------------------

    def _new_cache(self) -> dict[str, KittyCache]:
        return {self._cache_kwarg: KittyCache(self.model.config, self.cache_config, boosts=self._boosts)}

    def _choose_profile(self, given: BoostProfile | None, path: Path | None) -> tuple[BoostProfile | None, str]:
        if self.cache_config.uses_profile:
            return profile_for(self.model, geometry_of(self._config), given, path, logger.warning)
        if given is not None:
            logger.warning("The %s policy does not use the profile; use preset=tuned.", self.cache_config.policy)
        return None, "not used by this preset"

    def _count(self, first: int, stop: int) -> None:
        """Remember what the queries at positions first..stop-1 read."""
        positions = torch.arange(first, stop)
        self._num_queries += len(positions)
        if self.cache_config.quantizes:
            k_pages, _ = self.cache_config.packed_pages(positions)
            self._packed_sum += float((k_pages * PAGE_SIZE / (positions + 1)).sum())


def _check_names(names: Iterable[str]) -> None:
    """
    Raises:
        ConfigError: an argument that nobody knows, or one that cannot be used here.
    """
    theirs = [name for name in inspect.signature(HFLM.__init__).parameters if name not in ("self", "kwargs")]
    for name in names:
        if name in _REFUSED:
            raise ConfigError(f"The model kitty does not take {name}.", _REFUSED[name])
        if name not in theirs:
            known = [*_OWN, *(each for each in theirs if each not in _REFUSED)]
            close = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {close[0]}?" if close else f"kitty's own are {', '.join(_OWN)}."
            raise ConfigError(f"There is no model argument {name!r}.", hint)
