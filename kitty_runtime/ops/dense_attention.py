"""Attention over keys and values that are not packed, with what PyTorch's own lacks: softcap and learned sinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kitty_runtime.ops.operands import SoftmaxSpec


def dense_attention(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax: SoftmaxSpec) -> Tensor:
    """Attend to full-precision keys and values.

    Args:
        query: ``[batch, num_q_heads, n, head_dim]``.
        keys, values: ``[batch, num_kv_heads, seq_len, head_dim]``.
        visible: bool, broadcastable to ``[batch, 1, n, seq_len]``; every row sees at least one token.
        softmax: scale, softcap and learned sinks.
    Returns:
        ``query.dtype``, same shape; softmax accumulates in fp32 or better.
    """
    if softmax.softcap is None and softmax.sink_logits is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, scale=softmax.scale, enable_gqa=True
        )
    batch, _, n, head_dim = query.shape
    groups = query.reshape(batch, keys.shape[1], -1, n, head_dim)
    dots = torch.einsum("bhgqd,bhkd->bhgqk", groups, keys).to(torch.promote_types(query.dtype, torch.float32))
    weights = softmax.weights(dots, visible.unsqueeze(-3)).to(values.dtype)
    return torch.einsum("bhgqk,bhkd->bhgqd", weights, values).reshape(query.shape)


def causal_mask(n: int, seq_len: int, device: torch.device) -> Tensor:
    """bool ``[n, seq_len]``: the last `n` positions each see themselves and all before them."""
    return torch.ones(n, seq_len, dtype=torch.bool, device=device).tril(seq_len - n)
