"""Many new tokens of one sequence against its quantized past and themselves: validation and dispatch."""

from __future__ import annotations

from torch import Tensor

from kitty_runtime.errors import ShapeError
from kitty_runtime.ops.extend_attention import reference
from kitty_runtime.ops.operands import LayerState, SoftmaxSpec


def extend_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    state: LayerState,
    slot: int,
    page_ids: Tensor,
    past_len: int,
    softmax: SoftmaxSpec,
    read_packed: bool = True,
) -> Tensor:
    """Attend new tokens of one sequence; each query reads the pages that decode would read at its position.

    Args:
        query: float ``[num_q_heads, n, head_dim]``, after RoPE, at positions past_len .. past_len + n - 1.
        keys, values: ``[num_kv_heads, n, head_dim]`` of the same tokens, not yet in sinks and rings.
        state: the layer; pages that become packed within these tokens are already written.
        slot: the sequence's row in sinks and rings.
        page_ids: int64 ``[num_pages]``, the sequence's pages in order.
        past_len: tokens stored before these.
        softmax: scale, softcap and learned sinks.
        read_packed: False reads no page packed; past_len must be 0 (``CacheConfig.prefill == "full"``).
    Returns:
        ``query.dtype``, shape of `query`.
    Raises:
        ShapeError: shapes that do not fit the layer.
    Source: Kitty, section 4.3. Differs: the paper's prefill reads nothing packed.
    """
    layout = state.layout
    if keys.shape != values.shape or keys.shape[::2] != (layout.num_kv_heads, layout.head_dim):
        raise ShapeError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)}, "
            f"expected [{layout.num_kv_heads}, n, {layout.head_dim}]"
        )
    if query.shape[0] % layout.num_kv_heads or query.shape[1:] != keys.shape[1:]:
        raise ShapeError(f"query is {tuple(query.shape)} for keys {tuple(keys.shape)}")
    if not read_packed and past_len:
        raise ShapeError(f"read_packed=False with {past_len} tokens before: only a first pass can read no page")
    return reference.extend_attention(query, keys, values, state, slot, page_ids, past_len, softmax, read_packed)
