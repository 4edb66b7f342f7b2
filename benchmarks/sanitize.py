"""Every kernel once on small shapes, for NVIDIA's compute-sanitizer.

Usage: compute-sanitizer --tool memcheck python benchmarks/sanitize.py    (and --tool racecheck)

For memcheck set PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that every tensor has bounds of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from layer_state import random_layer

from kitty_runtime.config import Windows
from kitty_runtime.ops.decode_attention import triton as decode
from kitty_runtime.ops.extend_attention import triton as extend
from kitty_runtime.ops.operands import SoftmaxSpec
from kitty_runtime.ops.quantize_page import triton as quantize
from kitty_runtime.ops.store_tokens import triton as store
from kitty_runtime.quant.boost import LayerBoost
from kitty_runtime.quant.packing import PageLayout

HEADS, DIM, GROUP = 2, 64, 3
FORMATS = [(2, 2, 16), (2, 4, 8), (4, 4, DIM), (16, 16, 0)]


def main() -> None:
    torch.manual_seed(0)
    softmax = SoftmaxSpec(DIM**-0.5)
    for k_bits, v_bits, num_boosted in FORMATS:
        layout = PageLayout(HEADS, DIM, k_bits, v_bits, num_boosted, torch.float16)
        boost = LayerBoost("dynamic", num_boosted)
        for windows in (Windows(32, 64, 64), Windows(5, 0, 128)):
            total = [700, 1, 289]
            state, batch = random_layer(layout, windows, total)
            whole = replace(batch, past_lens=torch.tensor([100, 0, 160], device="cuda").int(), max_new_pages=5)
            tokens = (torch.randn(3, heads, 600, DIM, device="cuda").half() for heads in (HEADS * GROUP, HEADS, HEADS))
            query, keys, values = tokens
            quantize.quantize_pages(state, whole, keys, values, boost, None)
            out = extend.extend_attention(query, keys, values, state, whole, softmax, read_packed=True)
            store.store_tokens(state, whole, keys, values)
            step = decode.decode_attention(query[:, :, 0], state, batch, softmax)
            quantize.quantize_pages(state, batch, None, None, boost, None)
            torch.cuda.synchronize()
            print(
                f"k{k_bits} v{v_bits} boosted {num_boosted} {windows}: {float(out.norm()):.3f} {float(step.norm()):.3f}"
            )


if __name__ == "__main__":
    main()
