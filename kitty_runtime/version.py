"""The version, alone in its file so that `kitty --version` and the build read it without importing torch."""

__version__ = "0.1.0"
