"""Attention of sliding-window layers, whose ring holds all that they see: validation and dispatch."""

from __future__ import annotations

from torch import Tensor

from kitty_runtime.config import PAGE_SIZE, Windows
from kitty_runtime.errors import ShapeError
from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec
from kitty_runtime.ops.sliding_attention import reference


def sliding_windows(sliding_window: int) -> Windows:
    """The windows of a sliding layer: no sink, and a ring of at least `sliding_window` tokens."""
    recent_len = max(0, sliding_window - PAGE_SIZE)
    return Windows(sink_len=0, k_recent_len=recent_len, v_recent_len=recent_len)


def sliding_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    state: LayerState,
    batch: Batch,
    softmax: SoftmaxSpec,
    sliding_window: int,
) -> Tensor:
    """Attend the new tokens of each sequence to themselves and to those before, `sliding_window` tokens each.

    Args:
        query: float ``[num_seqs, num_q_heads, n, head_dim]``, after RoPE; the first ``seq_lens - past_lens`` columns of
            a row are its tokens, the rest is ignored.
        keys, values: ``[num_seqs, num_kv_heads, n, head_dim]`` of the same tokens, not yet in the rings.
        state: the layer, with windows of `sliding_windows` and no pages.
        batch: the sequences; lengths and slots may change between calls, as those of a captured graph do.
        softmax: scale, softcap and learned sinks.
        sliding_window: tokens that a query sees, itself included.
    Returns:
        ``query.dtype``, shape of `query`; anything past a row's tokens.
    Raises:
        ShapeError: the ring holds fewer tokens than the window.

    There is one implementation, in plain torch, on every device: these layers read little.
    """
    if state.k_ring.shape[2] < sliding_window:
        raise ShapeError(f"a ring of {state.k_ring.shape[2]} tokens for a window of {sliding_window}")
    return reference.sliding_attention(query, keys, values, state, batch, softmax, sliding_window)
