"""Put a pass's new tokens into sinks and rings: validation and dispatch."""

from __future__ import annotations

from torch import Tensor

from kitty_runtime.errors import ShapeError
from kitty_runtime.ops.backend import backend_for
from kitty_runtime.ops.operands import Batch, LayerState
from kitty_runtime.ops.store_tokens import reference


def store_tokens(state: LayerState, batch: Batch, keys: Tensor, values: Tensor, query: Tensor | None = None) -> None:
    """Write new tokens to their sink or ring slots; of tokens that share a slot the newest stays.

    Args:
        state: the layer, changed in place.
        batch: the sequences; row i stores its first ``seq_lens[i] - past_lens[i]`` tokens.
        keys, values: ``[num_seqs, num_kv_heads, n, head_dim]`` in the layer's dtype, after RoPE.
        query: ``[num_seqs, num_q_heads, 1, head_dim]``, after RoPE, when each sequence stores one token: added to the
            sums of the running energy.
    Raises:
        ShapeError: the tokens do not fit the layer.
    """
    layout = state.layout
    expected = (len(batch.slots), layout.num_kv_heads, keys.shape[2], layout.head_dim)
    if keys.shape != expected or values.shape != expected:
        raise ShapeError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)}, expected {expected}")
    if query is not None and (state.query_sq_sum is None or keys.shape[2] != 1 or query.shape[2] != 1):
        raise ShapeError(f"query {tuple(query.shape)} with {keys.shape[2]} tokens, or without sums to add it to")
    if backend_for(state) == "triton":
        from kitty_runtime.ops.store_tokens import triton

        triton.store_tokens(state, batch, keys, values, query)
    else:
        reference.store_tokens(state, batch, keys, values, query)
