"""The harness's own command line with `kitty` among its models."""

from __future__ import annotations

import argparse
import os
from importlib import import_module

from kitty_runtime.errors import ConfigError, KittyError


def main() -> None:
    """Run it; kitty's errors become text and exit codes, as `kitty` has them."""
    # Threads that spin while they wait multiply the CPU time on shared cores; torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import_module("kitty_runtime.lm_eval.model")  # registers "kitty", and says so if lm-eval is missing
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except KittyError as problem:
        if os.environ.get("KITTY_DEBUG"):
            raise
        argparse.ArgumentParser().exit(2 if isinstance(problem, ConfigError) else 1, f"Error: {problem}\n")


if __name__ == "__main__":
    main()
