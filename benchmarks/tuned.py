"""KL divergence of the preset `tuned` beside `kitty`, on text that neither the profile nor the recipe was chosen on.

    python benchmarks/tuned.py --text manual     # or --text source, CPython's own source code
    python benchmarks/tuned.py --text manual --full     # 6 windows of 4096 tokens instead of 2 of 2048
    python benchmarks/tuned.py --text manual --model FOLDER --profile FILE     # what `kitty profile FOLDER` wrote

Bytes are all that is stored per token at the length of a window, averaged over one page of phases. Prints
a line per method and then one JSON line of the same.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from kitty_cli.allocator import keep_freed_memory
from kitty_runtime.accuracy import Method, measure_divergence
from kitty_runtime.check import costs
from kitty_runtime.config import preset
from kitty_runtime.models.demo import DEMO_NAME
from kitty_runtime.models.geometry import layers_of
from kitty_runtime.models.loading import load_model, load_tokenizer, resolve_model
from kitty_runtime.profile_store import shipped_profiles_dir
from kitty_runtime.profiles import load_profile
from kitty_runtime.texts import held_out_text, source_text, tokenize, windows_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", choices=["manual", "source"], required=True)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--profile", type=Path, default=shipped_profiles_dir() / f"{DEMO_NAME}.safetensors")
    asked = parser.parse_args()
    text = {"manual": held_out_text, "source": source_text}[asked.text]()
    num_windows, seq_len = (6, 4096) if asked.full else (2, 2048)
    keep_freed_memory()
    source = resolve_model(asked.model)
    model, tokenizer = load_model(source, dtype="float32", attn_implementation="kitty"), load_tokenizer(source)
    profile = load_profile(asked.profile)
    kitty, tuned = preset("kitty"), preset("tuned")
    methods = {
        "kitty": Method(kitty),
        "tuned": Method(tuned, profile),
        "tuned, no profile": Method(tuned),
        "kitty, windows 128/128": Method(replace(kitty, k_recent_len=128)),
        "tuned, windows 128/128": Method(replace(tuned, k_recent_len=128, v_recent_len=128), profile),
    }
    found = measure_divergence(model, windows_of(text, tokenize(text, tokenizer), num_windows, seq_len), methods)
    figures = {}
    for name, divergence in found.items():
        _, cost = costs(layers_of(model.config), methods[name], seq_len)
        print(
            f"{name:<24} KL {divergence.kl:.5f}  perplexity {divergence.ppl:.3f}  top-1 {divergence.same_top1:.4f}  "
            f"{cost.bytes_per_token:,.0f} bytes per token"
        )
        figures[name] = {**asdict(divergence), "bytes_per_token": cost.bytes_per_token}
    print(
        json.dumps(
            {"model": source.name, "text": text.name, "windows": num_windows, "seq_len": seq_len, "methods": figures}
        )
    )


if __name__ == "__main__":
    main()
