"""The engine on Llama-3-8B shapes with random weights, beside its own 16 bits and transformers' static cache.

    python benchmarks/engine.py --part steps      # 1 x 2K, 32 x 4K, 32 x 16K, and generate() with a static cache
    python benchmarks/engine.py --part memory     # 80 GB: most sequences of 16K, and their throughput
    python benchmarks/engine.py --part load       # 40 GB: 256 requests, prompts 200-1000, outputs 1000-8000
    python benchmarks/engine.py --part short      # 40 GB: 256 requests, prompts 200-4000, outputs 50-800

``--methods tuned`` runs one of the methods alone. Decode steps are compiled, except where the row says otherwise.

Prints a line per figure and then one JSON line of the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from kitty_runtime.bench.load import Load, bench_load
from kitty_runtime.bench.passes import watched
from kitty_runtime.bench.shapes import BenchMethod
from kitty_runtime.config import preset
from kitty_runtime.engine.cache import ENGINE_ATTENTION
from kitty_runtime.engine.engine import Engine
from kitty_runtime.engine.limits import EngineLimits
from kitty_runtime.engine.request import Request, SamplingParams
from kitty_runtime.engine.sequence import Sequence
from kitty_runtime.memory import runtime_bytes

METHODS = {name: BenchMethod(preset(name)) for name in ("tuned", "kitty", "16")}
LOADS = {"load": Load(256, (200, 1000), (1000, 8000)), "short": Load(256, (200, 4000), (50, 800))}
LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def make_model(dtype: torch.dtype = torch.float16) -> PreTrainedModel:
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA_3_8B), dtype=dtype)
    return model.eval()


def filled(engine: Engine, num_seqs: int, depth: int) -> Engine:
    """The engine with sequences that pretend to have read `depth` tokens: on pages of zeros."""
    for layer in engine.cache.paged_layers:
        layer.state.pages.zero_()
    scheduler = engine.scheduler
    for number in range(num_seqs):
        request = Request(str(number), (1,) * depth, SamplingParams(max_tokens=10**6, temperature=0.0))
        sequence = Sequence(request, number, [1] * (depth + 1), depth + 10**6, num_stored=depth, slot=number)
        scheduler._free_slots.remove(number)
        scheduler._add_pages(sequence, scheduler.pages_for(depth))
        engine._sequences[request.id] = sequence
        scheduler.running.append(sequence)
    return engine


def measure_steps(engine: Engine, steps: int = 64) -> dict[str, float]:
    """Time of a step, and of its replay by CUDA events."""
    for _ in range(4):
        engine.step()
    torch.cuda.synchronize()
    with watched(engine) as passes:
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return {"ms": 1e3 * seconds / steps, "graph_ms": 1e3 * passes.seconds["decode"] / steps}


def decode(model: PreTrainedModel, name: str, batch_size: int, depth: int, compiled: bool) -> dict[str, Any]:
    method = METHODS[name]
    num_pages = batch_size * (method.config.packed_pages(depth + 200)[0] + 1)
    limits = EngineLimits(num_pages=num_pages, max_num_seqs=batch_size, compiled=compiled)
    engine = filled(Engine(model, None, method.config, limits=limits), batch_size, depth)
    times = measure_steps(engine)
    what = f"{name}{' compiled' if compiled else ''} {batch_size} x {depth}"
    return report(what, **times, tok_per_s=1e3 * batch_size / times["ms"], eager=engine.runner.eager_reason)


def static_cache(model: PreTrainedModel, batch_size: int, depth: int, num_new: int = 32) -> dict[str, Any]:
    """generate() of transformers with a static FP16 cache, as users run it; time per token after the prompt."""
    model.set_attn_implementation("sdpa")
    ids = torch.randint(0, 1000, (batch_size, depth), device="cuda")

    def seconds(n: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            ids, min_new_tokens=n, max_new_tokens=n, do_sample=False, cache_implementation="static", pad_token_id=0,
            disable_compile=True,
        )  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(2)
    ms = 1e3 * (seconds(num_new + 1) - seconds(1)) / num_new
    model.set_attn_implementation(ENGINE_ATTENTION)
    return report(f"static cache {batch_size} x {depth}", ms=ms, tok_per_s=1e3 * batch_size / ms)


def most_sequences(model: PreTrainedModel, name: str, memory_bytes: int, depth: int) -> dict[str, Any]:
    """As many sequences of `depth` as the memory holds with the weights, and their steps."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    config = METHODS[name].config
    kv_bytes = memory_bytes - weights - runtime_bytes(memory_bytes)
    limits = EngineLimits(kv_bytes=kv_bytes, max_model_len=depth + 256)
    sizes = Engine(model, None, config, limits=limits).pool_size
    free()
    per_seq = config.packed_pages(depth + 128)[0]
    num_seqs = min(sizes.num_slots, sizes.num_pages // per_seq)
    limits = EngineLimits(num_pages=num_seqs * per_seq, max_num_seqs=num_seqs, max_model_len=depth + 256, compiled=True)
    times = measure_steps(filled(Engine(model, None, config, limits=limits), num_seqs, depth))
    free()
    return report(f"{name} most x {depth}", num_seqs=num_seqs, **times, tok_per_s=1e3 * num_seqs / times["ms"])


def load(model: PreTrainedModel, name: str, memory_bytes: int, shape: Load) -> dict[str, Any]:
    weights = sum(parameter.nbytes for parameter in model.parameters())
    limits = EngineLimits(kv_bytes=memory_bytes - weights - runtime_bytes(memory_bytes), compiled=True)
    result = bench_load(model, name, METHODS[name], shape, limits)
    free()
    what = f"{name} load {shape.num_prompts}, prompts {shape.input_len}, outputs {shape.output_len}"
    return report(what, **result.figures)


def free() -> None:
    """Engines hold on to themselves until the collector comes."""
    gc.collect()
    torch.cuda.empty_cache()


def report(what: str, **figures: Any) -> dict[str, Any]:
    print(what, {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}, flush=True)
    return {"what": what, **figures}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["steps", "memory", *LOADS], required=True)
    parser.add_argument("--methods", default="tuned,16", help=f"of {', '.join(METHODS)}")
    asked = parser.parse_args()
    part, names, model, found = asked.part, asked.methods.split(","), make_model(), []
    if part == "steps":
        for batch_size, depth in ((1, 2048), (32, 4096), (32, 16384)):
            for compiled in (False, True):
                found += [decode(model, name, batch_size, depth, compiled) for name in names]
                free()
        found += [static_cache(model, 1, 2048), static_cache(model, 32, 4096)]
    elif part == "memory":
        found += [most_sequences(model, name, 80 * 10**9, 16384) for name in names]
    else:
        found += [load(model, name, 40 * 10**9, LOADS[part]) for name in names]
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "results": found}))


if __name__ == "__main__":
    main()
