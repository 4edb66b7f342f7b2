"""The settings that all rows of a batch share, and the hash that says whether an answer was made with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kitty_runtime.config import CacheConfig

FORMAT = 1
"""Of what the settings mean; a new number makes --resume redo answers of older versions."""

_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True)
class SamplingDefaults:
    """What holds where a line says nothing, as `SamplingParams` means it.

    Attributes:
        max_tokens: None = what the context holds.
        seed: with a row's id it gives the row's seed: same file, same answers, in whatever order rows run.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    seed: int = 0

    def values(self) -> dict[str, Any]:
        """Fields of `SamplingParams`."""
        return {name: value for name, value in asdict(self).items() if name != "seed"}

    def changed(self, given: Mapping[str, Any]) -> SamplingDefaults:
        """With each value that is not None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def defaults_of_model(generation: Mapping[str, Any]) -> SamplingDefaults:
    """The defaults that a model's makers chose; OpenAI's (temperature 1) where they chose greedy or nothing.

    Args:
        generation: the model's generation config as a dict.
    """
    names = [*(_OF_SAMPLING if generation.get("do_sample") else ()), "repetition_penalty"]
    found = {name: generation.get(name) for name in names}
    return SamplingDefaults().changed({**found, "max_tokens": generation.get("max_new_tokens")})


def row_seed(seed: int, custom_id: str) -> int:
    """The seed of a row that names none: of its id, not of its place, so that a resumed batch draws the same."""
    digest = hashlib.sha256(f"{seed}:{custom_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def settings_sha256(config: CacheConfig, defaults: SamplingDefaults, identity: Mapping[str, str]) -> str:
    """Hash of all that an answer depends on besides its line.

    Args:
        identity: of the model: hashes of its weights, profile and chat template, its dtype.
    """
    settings = {"format": FORMAT, "cache": asdict(config), "sampling": asdict(defaults), "model": dict(identity)}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
