"""Packing pages: at a decode step, when nothing is due, and at prefill, on one GPU.

Usage: python benchmarks/quantize_page.py

Prints a table and then one line of JSON; times are medians of graph replays.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch
import triton
from gpu_timing import microseconds, read_bandwidth
from layer_state import random_layer

from kitty_runtime.config import preset
from kitty_runtime.ops.decode_attention import triton as attention
from kitty_runtime.ops.operands import Batch, SoftmaxSpec
from kitty_runtime.ops.quantize_page import triton as packing
from kitty_runtime.ops.store_tokens import triton as storing
from kitty_runtime.quant.boost import LayerBoost
from kitty_runtime.quant.packing import PageLayout

HEADS, DIM, GROUP = 8, 128, 4


def at_length(batch: Batch, length: int) -> Batch:
    """Every sequence has just stored token `length`."""
    seq_lens = torch.full_like(batch.seq_lens, length)
    return replace(batch, past_lens=seq_lens - 1, seq_lens=seq_lens)


def decode_times(layout: PageLayout, boost: LayerBoost) -> dict[str, float]:
    windows = preset("weighted").windows
    state, batch = random_layer(layout, windows, [16384] * 64)
    threshold = windows.sink_len + windows.k_recent_len + 128 * 100
    due, idle = at_length(batch, threshold), at_length(batch, threshold + 5)
    query = torch.randn(64, HEADS * GROUP, DIM, device="cuda", dtype=torch.float16)
    new = torch.randn(64, HEADS, 1, DIM, device="cuda", dtype=torch.float16)
    softmax = SoftmaxSpec(DIM**-0.5)
    return {
        "attention of one step, 64 x 16K": microseconds(
            lambda: attention.decode_attention(query, state, batch, softmax)
        ),
        "a page of all 64 sequences": microseconds(lambda: packing.quantize_pages(state, due, None, None, boost, None)),
        "no page due": microseconds(lambda: packing.quantize_pages(state, idle, None, None, boost, None)),
        "storing a token": microseconds(lambda: storing.store_tokens(state, batch, new, new)),
    }


def prefill_times(layout: PageLayout, boost: LayerBoost) -> tuple[float, float, int]:
    """Times without and with the search for clipped ranges, and input bytes, of packing 32 prompts of 8K."""
    windows = preset("weighted").windows
    state, batch = random_layer(layout, windows, [8192] * 32)
    keys, values = (
        torch.randn(32, 8192, HEADS, DIM, device="cuda", dtype=torch.float16).transpose(1, 2) for _ in range(2)
    )
    whole = replace(batch, past_lens=torch.zeros_like(batch.seq_lens), max_new_pages=windows.packed_pages(8192)[0])
    plain, searched = (
        microseconds(lambda search=search: packing.quantize_pages(state, whole, keys, values, boost, None, search))  # type: ignore[misc]
        for search in (False, True)
    )
    return plain, searched, keys.nbytes + values.nbytes


def main() -> None:
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    card = torch.cuda.get_device_name()
    layout = PageLayout(HEADS, DIM, 2, 2, DIM // 8, torch.float16)
    boost = LayerBoost("weighted", DIM // 8, query_energy=torch.rand(HEADS, DIM, device="cuda"))
    times = decode_times(layout, boost)
    prefill, searched, input_bytes = prefill_times(layout, boost)
    share = times["a page of all 64 sequences"] / (128 * times["attention of one step, 64 x 16K"])
    rate = input_bytes / prefill / 1e3
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}, a sum reads {bandwidth:.0f} GB/s")
    print("| what | us |\n|---|---|")
    for what, time in times.items():
        print(f"| {what} | {time:.1f} |")
    print(f"| packing 32 prompts of 8K | {prefill:.1f} |")
    print(f"| the same with the search for clipped ranges | {searched:.1f} |")
    print(f"A page's packing is {share:.2%} of the attention of the 128 steps it serves.")
    print(f"Prefill packing reads its input at {rate:.0f} GB/s, {rate / bandwidth:.0%} of what a sum reads.")
    print(
        json.dumps(
            {
                "card": card,
                "microseconds": {**times, "prefill": prefill, "prefill with search": searched},
                "share": share,
                "rate": rate,
            }
        )
    )


if __name__ == "__main__":
    main()
