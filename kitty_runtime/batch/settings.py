"""What all rows of a batch share: the seed they draw from, and the hash that tells one set of settings from another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from kitty_runtime.config import CacheConfig
from kitty_runtime.engine.request import SamplingParams

FORMAT = 1
"""Of what the settings mean; a new number makes --resume redo answers of older versions."""


def row_seed(seed: int, custom_id: str) -> int:
    """The seed of a row that names none: of its id, not of its place, so that a resumed batch draws the same."""
    digest = hashlib.sha256(f"{seed}:{custom_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def settings_sha256(config: CacheConfig, sampling: SamplingParams, seed: int, identity: Mapping[str, str]) -> str:
    """Hash of all that an answer depends on besides its line.

    Args:
        config: of the cache.
        sampling: what holds where a line says nothing.
        seed: of the batch.
        identity: of the model: hashes of its weights, profile and chat template, its dtype.
    """
    settings = {"format": FORMAT, "cache": asdict(config), "sampling": asdict(sampling), "seed": seed, **identity}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
