"""KL divergence of the preset `tuned` beside `kitty`, on text that neither the profile nor the recipe was chosen on.

    python benchmarks/tuned.py --text manual     # or --text source, CPython's own source code

Prints a line per method and then one JSON line of the same.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace

from kitty_cli.allocator import keep_freed_memory
from kitty_runtime.accuracy import Method, measure_divergence
from kitty_runtime.config import preset
from kitty_runtime.models.demo import DEMO_NAME
from kitty_runtime.models.loading import load_model, load_tokenizer, resolve_model
from kitty_runtime.profile_store import shipped_profiles_dir
from kitty_runtime.profiles import load_profile
from kitty_runtime.texts import held_out_text, source_text, tokenize, windows_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", choices=["manual", "source"], required=True)
    text = {"manual": held_out_text, "source": source_text}[parser.parse_args().text]()
    keep_freed_memory()
    source = resolve_model("demo")
    model, tokenizer = load_model(source, dtype="float32", attn_implementation="kitty"), load_tokenizer(source)
    profile = load_profile(shipped_profiles_dir() / f"{DEMO_NAME}.safetensors")
    kitty, tuned = preset("kitty"), preset("tuned")
    methods = {
        "kitty": Method(kitty),
        "tuned": Method(tuned, profile),
        "tuned, no profile": Method(tuned),
        "kitty, windows 128/128": Method(replace(kitty, k_recent_len=128)),
        "tuned, windows 128/128": Method(replace(tuned, k_recent_len=128, v_recent_len=128), profile),
    }
    found = measure_divergence(model, windows_of(text, tokenize(text, tokenizer), 2, 2048), methods)
    for name, divergence in found.items():
        print(f"{name:<24} KL {divergence.kl:.5f}  perplexity {divergence.ppl:.3f}  top-1 {divergence.same_top1:.4f}")
    figures = {name: asdict(divergence) for name, divergence in found.items()}
    print(json.dumps({"text": text.name, "windows": 2, "seq_len": 2048, "methods": figures}))


if __name__ == "__main__":
    main()
