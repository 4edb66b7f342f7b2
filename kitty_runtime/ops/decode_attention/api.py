"""One query token per sequence against sink, pages and ring: validation and dispatch."""

from __future__ import annotations

from torch import Tensor

from kitty_runtime.errors import ShapeError
from kitty_runtime.ops.decode_attention import reference
from kitty_runtime.ops.operands import LayerState, SoftmaxSpec


def decode_attention(
    query: Tensor,
    state: LayerState,
    slots: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    softmax: SoftmaxSpec,
) -> Tensor:
    """Attend one query token per sequence to its cached keys and values, its own included.

    Args:
        query: float ``[num_seqs, num_q_heads, head_dim]``, after RoPE; at position ``seq_lens - 1``.
        state: the layer's pages, sinks and rings; the query's own key and value are already there.
        slots: int64 ``[num_seqs]``, the sequence's row in sinks and rings.
        page_table: int32 ``[num_seqs, max_pages]``; -1 = unassigned.
        seq_lens: int32 ``[num_seqs]``, tokens stored, at least 1.
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
    return reference.decode_attention(query, state, slots, page_table, seq_lens, softmax)
