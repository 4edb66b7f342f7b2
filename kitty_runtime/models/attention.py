"""The attention function that transformers models call: it finds the paged layer and lets it attend.

Registered with transformers as ``kitty`` when this module is imported; a model uses it after
``model.set_attn_implementation("kitty")``. Layers that are not paged take PyTorch's own attention.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kitty_runtime.ops.dense_attention import causal_mask, dense_attention
from kitty_runtime.ops.operands import SoftmaxSpec

ATTENTION = "kitty"
"""Name of the attention implementation. Must not contain flash, sdpa, flex_attention, ``paged|`` or ``/``."""


class AttendsItself(Protocol):
    """A cache layer that attends instead of returning all its keys and values."""

    def attend(
        self,
        query: Tensor,
        attention_mask: Tensor | None,
        softmax: SoftmaxSpec,
    ) -> Tensor:
        """``[num_seqs, num_q_heads, n, head_dim]`` for the tokens last given to the layer's ``update``."""


def with_layer(keys: Tensor, layer: AttendsItself) -> Tensor:
    """A view of `keys` that carries `layer` to the attention function through the model's own code."""
    keys = keys.view_as(keys)
    keys._kitty_layer = layer  # type: ignore[attr-defined]
    return keys


def kitty_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, in the form transformers calls it.

    Args:
        query: ``[batch, num_q_heads, n, head_dim]``, after RoPE.
        key, value: ``[batch, num_kv_heads, seq_len, head_dim]``; from a paged layer only the new tokens.
        attention_mask: bool ``[batch, 1, n, seq_len]``, or None without padding.
        softcap, s_aux: logit softcap (Gemma 2) and learned sink logits ``[num_q_heads]`` (GPT-OSS).
    Returns:
        ``[batch, n, num_q_heads, head_dim]`` and None for the weights.
    """
    softmax = SoftmaxSpec(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    layer: AttendsItself | None = getattr(key, "_kitty_layer", None)
    if layer is not None:
        out = layer.attend(query, attention_mask, softmax)
        return out.transpose(1, 2).contiguous(), None
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=softmax.scale, **kwargs
        )
    if attention_mask is None:
        visible = causal_mask(query.shape[2], key.shape[2], query.device)
    else:  # a padding row sees nothing: let it see all, its output is never read
        visible = attention_mask | ~attention_mask.any(-1, keepdim=True)
    return dense_attention(query, key, value, visible, softmax).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, kitty_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
