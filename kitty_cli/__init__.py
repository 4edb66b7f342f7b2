"""The `kitty` command: parses, calls `kitty_runtime`, renders."""

import gc

# Starting up makes objects and no garbage; at Python's own threshold, looking for some costs `kitty --help` a tenth.
gc.set_threshold(50_000)
