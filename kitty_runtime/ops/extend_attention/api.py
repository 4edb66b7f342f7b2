"""Many new tokens per sequence against its quantized past and themselves: validation and dispatch."""

from __future__ import annotations

from torch import Tensor

from kitty_runtime.errors import ShapeError
from kitty_runtime.ops.backend import backend_for
from kitty_runtime.ops.extend_attention import reference
from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec


def extend_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    state: LayerState,
    batch: Batch,
    softmax: SoftmaxSpec,
    read_packed: bool = True,
) -> Tensor:
    """Attend the new tokens of each sequence; each query reads the pages that decode would read at its position.

    Args:
        query: float ``[num_seqs, num_q_heads, n, head_dim]``, after RoPE; the first ``seq_lens - past_lens`` columns of
            a row are its tokens, from position ``past_lens`` on, the rest is ignored.
        keys, values: ``[num_seqs, num_kv_heads, n, head_dim]`` of the same tokens, not yet in sinks and rings.
        state: the layer; pages that become packed within these tokens are already written.
        batch: the sequences.
        softmax: scale, softcap and learned sinks.
        read_packed: False lets a sequence without a past read no page packed (``CacheConfig.prefill == "full"``).
    Returns:
        ``query.dtype``, shape of `query`; zero past a row's tokens. Softmax accumulates in fp32 or better.
    Raises:
        ShapeError: shapes that do not fit the layer.
    Source: Kitty, section 4.3. Differs: the paper's prefill reads nothing packed.
    """
    layout = state.layout
    num_seqs, n = len(batch.slots), query.shape[2]
    expected = (num_seqs, layout.num_kv_heads, n, layout.head_dim)
    if query.shape != (num_seqs, query.shape[1], n, layout.head_dim) or query.shape[1] % layout.num_kv_heads:
        raise ShapeError(
            f"query is {tuple(query.shape)}, expected [{num_seqs}, a multiple of {layout.num_kv_heads} heads, n, "
            f"{layout.head_dim}]"
        )
    if keys.shape != expected or values.shape != expected:
        raise ShapeError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)}, expected {expected}")
    if backend_for(state) == "triton":
        from kitty_runtime.ops.extend_attention import triton

        return triton.extend_attention(query, keys, values, state, batch, softmax, read_packed)
    return reference.extend_attention(query, keys, values, state, batch, softmax, read_packed)
