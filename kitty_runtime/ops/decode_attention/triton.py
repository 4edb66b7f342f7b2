"""Decode attention as Triton kernels: one split-KV launch straight from the pages, and one that combines.

Neither launch depends on lengths that the host knows: what each program reads is worked out on the device, so that
sequences of any lengths share the card evenly (triton_shares.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitty_runtime.ops.decode_attention.triton_combine import combine_kernel
from kitty_runtime.ops.decode_attention.triton_split import split_kernel
from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec


def decode_attention(query: Tensor, state: LayerState, batch: Batch, softmax: SoftmaxSpec) -> Tensor:
    """See `kitty_runtime.ops.decode_attention.api.decode_attention`."""
    layout, windows = state.layout, state.windows
    num_seqs, num_q_heads, head_dim = query.shape
    group_size = num_q_heads // layout.num_kv_heads
    num_warps = 1 if head_dim <= 128 else 2
    pdl = _overlaps_launches(query.device)
    target = max(1, _warps(query.device) // num_warps // layout.num_kv_heads)
    max_parts = target + num_seqs
    query = query.contiguous()
    out = torch.empty_like(query)
    partial_out = torch.empty(
        (layout.num_kv_heads, max_parts, group_size, head_dim), dtype=torch.float32, device=query.device
    )
    partial_stats = torch.empty(
        (layout.num_kv_heads, max_parts, group_size, 2), dtype=torch.float32, device=query.device
    )
    seqs = triton.next_power_of_2(num_seqs)
    spans = {
        "SINK_LEN": windows.sink_len,
        "K_RECENT": windows.k_recent_len,
        "V_RECENT": windows.v_recent_len,
        "DENSE": layout.dense,
        "SEQS": seqs,
        "GROUP_SIZE": group_size,
        "HEAD_DIM": head_dim,
        "D": triton.next_power_of_2(head_dim),
    }

    def at(field: str) -> int:
        return 0 if layout.dense else layout.offset(field)

    boosted = layout.num_boosted if layout.has_ids else 0
    split_kernel[(layout.num_kv_heads, target)](
        query, state.pages, batch.page_table, batch.seq_lens, batch.slots,
        state.k_sink, state.v_sink, state.k_ring, state.v_ring, partial_out, partial_stats,
        num_seqs, batch.page_table.stride(0), target, max_parts, layout.num_kv_heads,
        layout.page_bytes, layout.head_bytes, layout.ids_offset, layout.ids_bytes,
        boosted, softmax.scale, softmax.softcap or 0.0,
        V_LOW=at("v_low"), V_HIGH=at("v_high"), K_SCALE=at("k_scale"), K_ZERO=at("k_zero_point"),
        V_SCALE=at("v_scale"), V_ZERO=at("v_zero_point"), K_HIGH=at("k_high"),
        GROUP=max(8, triton.next_power_of_2(group_size)),
        BOOSTED=0 if not boosted else max(16, triton.next_power_of_2(boosted)),
        K4=layout.num_boosted == head_dim,
        V4=layout.v_bits == 4,
        SOFTCAP=softmax.softcap is not None,
        OPERAND=OPERANDS[query.dtype],
        ASM=not INTERPRET,
        STAGES=5,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=num_warps,
        enable_fp_fusion=True,
        **spans,
    )  # fmt: skip
    # Few sequences have many splits each: their programs are larger and read all of them at once.
    few = num_seqs * num_q_heads < 256
    block = min(spans["D"], 32)
    chunk = min((8192 if few else 2048) // block, triton.next_power_of_2(target // num_seqs + 1))
    combine_kernel[(num_seqs, num_q_heads, triton.cdiv(head_dim, block))](
        partial_out, partial_stats, batch.seq_lens, softmax.sink_logits, out,
        num_seqs, target, max_parts, layout.num_kv_heads,
        HAS_SINK_LOGITS=softmax.sink_logits is not None,
        BLOCK=block,
        CHUNK=chunk,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4 if few else 1,
        enable_fp_fusion=True,
        **spans,
    )  # fmt: skip
    return out


INTERPRET = triton.knobs.runtime.interpret
# Arithmetic in bf16 is not to be had from the interpreter.
OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.float32 if INTERPRET else tl.bfloat16}


def _warps(device: torch.device) -> int:
    """Warps of the split kernel that run on the device at once: its registers let each scheduler hold two."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count * 8


def _overlaps_launches(device: torch.device) -> bool:
    """Whether a launch may begin before the one ahead of it has ended, and wait for it inside (since Hopper)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
