"""One query token per sequence against sink, pages and ring: validation and dispatch."""

from __future__ import annotations

from torch import Tensor

from kitty_runtime.errors import ShapeError
from kitty_runtime.ops.backend import backend_for
from kitty_runtime.ops.decode_attention import reference
from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec


def decode_attention(
    query: Tensor,
    state: LayerState,
    batch: Batch,
    softmax: SoftmaxSpec,
) -> Tensor:
    """Attend one query token per sequence to its cached keys and values, its own included.

    Args:
        query: float ``[num_seqs, num_q_heads, head_dim]``, after RoPE; at position ``batch.seq_lens - 1``.
        state: the layer's pages, sinks and rings; the query's own key and value are already there.
        batch: the sequences.
        softmax: scale, softcap and learned sinks.
    Returns:
        ``query.dtype``, same shape; softmax accumulates in fp32 or better.
    Raises:
        ShapeError: the query does not fit the layer.
    Source: Kitty, section 4.2. Differs: one softmax over sink, pages and ring.
    """
    layout = state.layout
    if query.dim() != 3 or query.shape[1] % layout.num_kv_heads or query.shape[2] != layout.head_dim:
        raise ShapeError(
            f"query is {tuple(query.shape)}, expected [num_seqs, a multiple of {layout.num_kv_heads} heads, "
            f"{layout.head_dim}]"
        )
    if backend_for(state) == "triton":
        from kitty_runtime.ops.decode_attention import triton

        return triton.decode_attention(query, state, batch, softmax)
    return reference.decode_attention(query, state, batch, softmax)
