"""What the operations work on: the tensors of one attention layer's cache, and how logits become weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kitty_runtime.config import Windows
from kitty_runtime.quant.packing import PageLayout


@dataclass(frozen=True)
class SoftmaxSpec:
    """How dot products become weights.

    Attributes:
        scale: factor of the dot products.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
        sink_logits: float ``[num_q_heads]``, a learned logit that takes weight and carries no value (GPT-OSS).
    """

    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None

    def weights(self, dots: Tensor, visible: Tensor) -> Tensor:
        """Softmax over the last dimension, in the dtype of `dots`.

        Args:
            dots: ``[..., num_kv_heads, gqa_group_size, n, seq_len]``, not yet scaled.
            visible: bool, broadcastable to `dots`; every row sees at least one token.
        """
        logits = dots * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        logits = logits.masked_fill(~visible, float("-inf"))
        if self.sink_logits is None:
            return logits.softmax(-1)
        column = self.sink_logits.to(logits.dtype).view(*logits.shape[-4:-2], 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]


@dataclass
class LayerState:
    """Pages, sinks and rings of one layer.

    Attributes:
        pages: uint8 ``[num_pages, page_bytes]``, laid out by `layout`.
        k_sink, v_sink: model dtype ``[num_slots, num_kv_heads, sink_len, head_dim]``; position p at index p.
        k_ring, v_ring: model dtype ``[num_slots, num_kv_heads, ring_len, head_dim]``; position p at index
            ``(p - sink_len) % ring_len``, keys and values each with their own ring length.
        query_sq_sum: fp32 or wider ``[num_slots, num_kv_heads, head_dim]``, sum over positions of the GQA group's mean
            squared query; None where nothing asks for the running energy of queries.
    """

    layout: PageLayout
    windows: Windows
    pages: Tensor
    k_sink: Tensor
    v_sink: Tensor
    k_ring: Tensor
    v_ring: Tensor
    query_sq_sum: Tensor | None = None

    @staticmethod
    def allocate(
        layout: PageLayout,
        windows: Windows,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        running_energy: bool = False,
    ) -> LayerState:
        """Zero-filled sinks, rings and, if `running_energy`, sums for `num_slots` sequences; no pages yet."""

        def buffer(tokens: int) -> Tensor:
            shape = (num_slots, layout.num_kv_heads, tokens, layout.head_dim)
            return torch.zeros(shape, dtype=dtype, device=device)

        sums = torch.zeros(
            (num_slots, layout.num_kv_heads, layout.head_dim),
            dtype=torch.promote_types(dtype, torch.float32),
            device=device,
        )
        return LayerState(
            layout=layout,
            windows=windows,
            pages=torch.empty((0, layout.page_bytes), dtype=torch.uint8, device=device),
            k_sink=buffer(windows.sink_len),
            v_sink=buffer(windows.sink_len),
            k_ring=buffer(windows.k_ring_len),
            v_ring=buffer(windows.v_ring_len),
            query_sq_sum=sums if running_energy else None,
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        sums = () if self.query_sq_sum is None else (self.query_sq_sum,)
        return self.pages, self.k_sink, self.v_sink, self.k_ring, self.v_ring, *sums


@dataclass(frozen=True)
class Batch:
    """The sequences that a pass extends, as the operations see them; tensors on the layer's device.

    Attributes:
        slots: int64 ``[num_seqs]``, a sequence's row in sinks and rings.
        page_table: int32 ``[num_seqs, max_pages]``, pages in order, those that this pass completes included; -1 = none.
        past_lens: int32 ``[num_seqs]``, tokens stored before the pass.
        seq_lens: int32 ``[num_seqs]``, tokens after it, at least 1.
        max_new_pages: the most pages that one sequence completes in the pass.
    """

    slots: Tensor
    page_table: Tensor
    past_lens: Tensor
    seq_lens: Tensor
    max_new_pages: int
