"""Where kitty keeps converted models and profiles on this machine. No torch here."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_dir


def kitty_home() -> Path:
    """``$KITTY_HOME`` if it is set, else the platform's cache folder. Not created here."""
    configured = os.environ.get("KITTY_HOME")
    return Path(os.path.expanduser(configured)) if configured else Path(user_cache_dir("kitty-kv", appauthor=False))


def models_dir() -> Path:
    """Models converted once, one folder each."""
    return kitty_home() / "models"


def profiles_dir() -> Path:
    """Boost profiles written by ``kitty profile`` and found by themselves."""
    return kitty_home() / "profiles"
