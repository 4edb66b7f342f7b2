"""The `kitty` command: parses, calls `kitty_runtime`, renders."""
