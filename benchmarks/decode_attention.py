"""Decode attention from 2-bit pages against 16-bit attention, on one GPU.

Usage: python benchmarks/decode_attention.py [--quick]

Prints a table and then one line of JSON. Windows are the default preset's (32 sink tokens, 64 recent ones and the page
that gathers), pages lie scattered, lengths are the contexts. Times are medians of graph replays; the ceiling of a row
is the time that its bytes take at the bandwidth measured first. Errors are against float64 on the same dequantized
pages: the kernel's, and that of eager fp16 attention.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace

import torch
import triton
from gpu_timing import (
    flash_attention_microseconds,
    flashinfer_microseconds,
    microseconds,
    read_bandwidth,
    sdpa_microseconds,
)
from layer_state import random_layer

from kitty_runtime.config import Windows, preset
from kitty_runtime.ops.decode_attention import reference
from kitty_runtime.ops.decode_attention import triton as kernel
from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec
from kitty_runtime.quant.packing import PageLayout

LLAMA_8B = (32, 8, 128)
CONTEXTS = [(1, 32768), (1, 131072), (8, 8192), (8, 32768), (32, 8192), (64, 16384)]
SHAPES = [(9, 3, 64), (8, 1, 256), (32, 32, 128), (28, 4, 128)]
BOOST = 0.125


@dataclass
class Row:
    """One line of the table; times in microseconds."""

    what: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int
    tokens: int
    best_16_bit: float | None
    kitty: float
    gbytes_per_s: float
    of_ceiling: float
    error: float
    eager_error: float

    @property
    def speedup(self) -> float | None:
        return None if self.best_16_bit is None else self.best_16_bit / self.kitty


def relative_errors(query: torch.Tensor, state: LayerState, batch: Batch, out: torch.Tensor) -> tuple[float, float]:
    """Of `out` and of eager fp16 attention, against float64 on the dequantized pages; first and last sequence."""
    rows = torch.tensor(sorted({0, len(batch.slots) - 1}), device="cuda")
    unpacked = {name: getattr(state, name)[rows] for name in ("k_sink", "v_sink", "k_ring", "v_ring")}
    exact = {name: tensor.double() for name, tensor in unpacked.items()}
    part = Batch(
        torch.arange(len(rows), device="cuda"),
        batch.page_table[rows],
        batch.past_lens[rows],
        batch.seq_lens[rows],
        max_new_pages=0,
    )
    softmax = SoftmaxSpec(query.shape[-1] ** -0.5)
    expected = reference.decode_attention(query[rows].double(), replace(state, **exact), part, softmax)
    eager = reference.decode_attention(query[rows], replace(state, **unpacked), part, softmax)
    ours, theirs = ((x.double() - expected).norm() / expected.norm() for x in (out[rows], eager))
    return float(ours), float(theirs)


def bytes_read(state: LayerState, lens: list[int]) -> int:
    """Bytes that a step must read: packed pages, and sink and ring tokens as far as they hold any."""
    layout, windows, total = state.layout, state.windows, 0
    per_token = 2 * layout.num_kv_heads * layout.head_dim * layout.dtype.itemsize
    for length in lens:
        pages = windows.packed_pages(length - 1)[0]
        total += pages * layout.page_bytes + (length - 128 * pages) * per_token
    return total


def measure(
    what: str, shape: tuple[int, int, int], lens: list[int], best_16_bit: float | None, bandwidth: float, bits: int = 2
) -> Row:
    num_q_heads, num_kv_heads, head_dim = shape
    num_boosted = int(BOOST * head_dim) if bits == 2 else 0
    layout = PageLayout(num_kv_heads, head_dim, bits, bits, num_boosted, torch.float16)
    windows = preset("weighted").windows if bits == 2 else Windows(0, 0, 0)
    state, batch = random_layer(layout, windows, lens)
    query = torch.randn(len(lens), num_q_heads, head_dim, device="cuda", dtype=torch.float16)
    softmax = SoftmaxSpec(head_dim**-0.5)
    out = kernel.decode_attention(query, state, batch, softmax)
    errors = relative_errors(query, state, batch, out)
    time = microseconds(lambda: kernel.decode_attention(query, state, batch, softmax))
    rate = bytes_read(state, lens) / time / 1e3
    return Row(what, *shape, len(lens), sum(lens), best_16_bit, time, rate, rate / bandwidth, *errors)


def best_16_bit(batch: int, context: int, shape: tuple[int, int, int]) -> float:
    ways = (sdpa_microseconds, flash_attention_microseconds, flashinfer_microseconds)
    times = [way(batch, context, *shape, torch.float16) for way in ways]
    return min(time for time in times if time is not None)


def rows_of(quick: bool, bandwidth: float) -> list[Row]:
    rows = []
    for batch, context in CONTEXTS[-1:] if quick else CONTEXTS:
        base = best_16_bit(batch, context, LLAMA_8B)
        rows.append(measure("2-bit pages", LLAMA_8B, [context] * batch, base, bandwidth))
        if not quick:
            rows.append(measure("16-bit pages", LLAMA_8B, [context] * batch, base, bandwidth, bits=16))
    if quick:
        return rows
    for shape in SHAPES:
        rows.append(measure("2-bit pages", shape, [8192] * 32, best_16_bit(32, 8192, shape), bandwidth))
    generator = torch.Generator().manual_seed(0)
    ragged = torch.cat([torch.randint(1024, 14336, (62,), generator=generator), torch.tensor([1024, 32768])]).tolist()
    # The best 16-bit way to serve a ragged batch here: the same kernel on 16-bit pages.
    dense = measure("ragged, 16-bit pages", LLAMA_8B, ragged, None, bandwidth, bits=16)
    rows += [dense, measure("ragged, 2-bit pages", LLAMA_8B, ragged, dense.kitty, bandwidth)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one row, 64 x 16K")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}, a sum reads {bandwidth:.0f} GB/s")
    columns = "what|heads|head_dim|batch x context|16 bits, us|kitty, us|speedup|GB/s|of ceiling|error|eager error"
    print(f"| {columns.replace('|', ' | ')} |")
    print("|" + "---|" * (columns.count("|") + 1))
    rows = rows_of(arguments.quick, bandwidth)
    for row in rows:
        base = "-" if row.best_16_bit is None else f"{row.best_16_bit:.1f}"
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        print(
            f"| {row.what} | {row.num_q_heads}/{row.num_kv_heads} | {row.head_dim} | {row.batch} x "
            f"{row.tokens // row.batch} | {base} | {row.kitty:.1f} | {speedup} | {row.gbytes_per_s:.0f} | "
            f"{row.of_ceiling:.0%} | {row.error:.1e} | {row.eager_error:.1e} |"
        )
    document = {"card": card, "torch": torch.__version__, "triton": triton.__version__, "read_gbytes_per_s": bandwidth}
    print(json.dumps({**document, "rows": [{**asdict(row), "speedup": row.speedup} for row in rows]}))


if __name__ == "__main__":
    main()
