"""The boost profile that a command uses: the one given, else the one measured on this very model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kitty_cli import output

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kitty_runtime.models.geometry import ModelGeometry
    from kitty_runtime.profiles import BoostProfile


def profile_for(
    model: PreTrainedModel, geometry: ModelGeometry, given: BoostProfile | None, given_path: Path | None
) -> tuple[BoostProfile | None, str]:
    """The profile to use, None if there is none, and what to call it; warns when the one given has other weights."""
    from kitty_runtime.models.fingerprint import config_sha256, weights_sha256
    from kitty_runtime.profile_store import find_profile

    weights_hash = weights_sha256(model)
    if given is not None:
        if given.provenance.weights_sha256 != weights_hash:
            output.warning(f"{given_path} was measured on {given.provenance.model}, whose weights are not these.")
        return given, str(given_path)
    found = find_profile(config_sha256(geometry), weights_hash)
    if found is None:
        return None, "none for this model, running query energies; make one with: kitty profile MODEL"
    return found[1], str(found[0])
