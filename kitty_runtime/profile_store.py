"""Where boost profiles are kept, and the one that was measured on a given model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kitty_runtime import files
from kitty_runtime.errors import ProfileError
from kitty_runtime.home import profiles_dir
from kitty_runtime.profiles import SUFFIX, BoostProfile, dump_profile, load_profile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kitty_runtime.models.geometry import ModelGeometry

logger = logging.getLogger(__name__)

_OPTION = "--output FILE"


def shipped_profiles_dir() -> Path:
    """Profiles that come with kitty: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).parent
    installed = package / "_profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def default_path(model_name: str) -> Path:
    """Where `kitty profile` writes a model's profile unless told otherwise."""
    return profiles_dir() / (re.sub(r"[^A-Za-z0-9._-]+", "--", model_name).strip("-.") + SUFFIX)


def find_profile(config_sha256: str, weights_sha256: str | None) -> tuple[Path, BoostProfile] | None:
    """The profile measured on this very model, the user's own before a shipped one.

    Args:
        weights_sha256: None where only the config is at hand.
    """
    for path in _profile_files():
        try:
            profile = load_profile(path)
        except ProfileError as error:
            logger.warning("skipping a profile: %s", error.message)
            continue
        source = profile.provenance
        if source.config_sha256 == config_sha256 and weights_sha256 in (None, source.weights_sha256):
            return path, profile
    return None


def profile_for(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    given: BoostProfile | None,
    given_path: Path | None,
    warn: Callable[[str], None],
) -> tuple[BoostProfile | None, str]:
    """The profile that a model uses and what to call it: the one given, else the one measured on this very model.

    Args:
        warn: told if the one given was measured on other weights.
    Returns:
        None in place of a profile if there is none.
    """
    from kitty_runtime.models.fingerprint import config_sha256, weights_sha256

    weights_hash = weights_sha256(model)
    if given is not None:
        if given.provenance.weights_sha256 != weights_hash:
            warn(f"{given_path} was measured on {given.provenance.model}, whose weights are not these.")
        return given, str(given_path)
    found = find_profile(config_sha256(geometry), weights_hash)
    if found is None:
        return None, "none for this model, running query energies; make one with: kitty profile MODEL"
    return found[1], str(found[0])


def _profile_files() -> Iterator[Path]:
    for folder in (profiles_dir(), shipped_profiles_dir()):
        if folder.is_dir():
            yield from sorted(folder.glob(f"*{SUFFIX}"))


def check_writable(path: Path) -> None:
    """Verify before a long measurement that `save_profile` will be able to write there; makes the folder.

    Raises:
        ProfileError: a folder or device, or in a folder that cannot be written.
    """
    files.check_writable(path, _OPTION, ProfileError)


def save_profile(profile: BoostProfile, path: Path) -> None:
    """Write a profile; a file that is there is replaced whole or not at all.

    Raises:
        ProfileError: the folder cannot be written.
    """
    files.write_whole(path, dump_profile(profile), _OPTION, ProfileError)
