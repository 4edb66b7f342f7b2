"""Quantize the pages that a pass completes: validation and dispatch."""

from __future__ import annotations

from torch import Tensor

from kitty_runtime.errors import ShapeError
from kitty_runtime.ops.backend import backend_for
from kitty_runtime.ops.operands import Batch, LayerState
from kitty_runtime.ops.quantize_page import reference
from kitty_runtime.quant.boost import LayerBoost


def quantize_pages(
    state: LayerState,
    batch: Batch,
    keys: Tensor | None,
    values: Tensor | None,
    boost: LayerBoost,
    energy: Tensor | None = None,
    clip_search: bool = False,
) -> None:
    """Write every page that becomes packed between ``past_lens`` and ``seq_lens``: its keys, its values, or both.

    Keys per channel, asymmetric min-max, boosted channels at 4 bits; values per token. At 16 bits tokens are copied.

    Args:
        state: the layer; its pages are changed in place.
        batch: the sequences; ``max_new_pages`` is at least the pages that each of them completes.
        keys, values: ``[num_seqs, num_kv_heads, n, head_dim]``, the pass's tokens while they are not yet in sinks and
            rings; None when they are.
        boost: how boosted channels are chosen.
        energy: fp32 or wider ``[num_seqs, max_new_pages, num_kv_heads, head_dim]``, rms of the queries up to the
            moment each page is packed, if ``boost.needs_running_energy``; None when the state's sums are those of
            ``seq_lens`` tokens, as in decode.
        clip_search: give each key channel the clipped range that leaves the least squared error, see
            `kitty_runtime.quant.affine.choose_qparams`.
    Raises:
        ShapeError: the tensors do not fit the layer.
    Source: Kitty, sections 3 and 4.1; values: KIVI, section 3.
    """
    layout = state.layout
    if (keys is None) != (values is None):
        raise ShapeError("keys and values come both or not at all")
    if keys is not None and values is not None:
        expected = (len(batch.slots), layout.num_kv_heads, keys.shape[2], layout.head_dim)
        if keys.shape != expected or values.shape != expected:
            raise ShapeError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)}, expected {expected}")
    if not layout.dense and boost.num_boosted != layout.num_boosted:
        raise ShapeError(f"{boost.num_boosted} channels to boost for pages that hold {layout.num_boosted}")
    shape = (len(batch.slots), batch.max_new_pages, layout.num_kv_heads, layout.head_dim)
    if energy is not None and energy.shape != shape:
        raise ShapeError(f"energy is {tuple(energy.shape)}, expected {shape}")
    if boost.needs_running_energy and not layout.dense and energy is None and state.query_sq_sum is None:
        raise ShapeError("the boost needs the energy of queries, and the layer keeps no sums of it")
    if backend_for(state) == "triton":
        from kitty_runtime.ops.quantize_page import triton

        triton.quantize_pages(state, batch, keys, values, boost, energy, clip_search)
    else:
        reference.quantize_pages(state, batch, keys, values, boost, energy, clip_search)
