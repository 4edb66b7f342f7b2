"""What people run today in other engines, emulated for comparison: kitty itself cannot store a cache so.

Keys and values are rounded as the peer stores them and kept as floating-point numbers, so these caches save no memory;
their bytes come from a formula. They compare the formats, not the engines: each layer that kitty would page is rounded,
the others stay as transformers caches them. For batches of one sequence without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kitty_runtime.cache.hf import AttendingLayer
from kitty_runtime.errors import UnsupportedModelError
from kitty_runtime.memory import BYTES_16, SequenceBytes
from kitty_runtime.models.geometry import LayerGeometry, layers_of
from kitty_runtime.ops.dense_attention import causal_mask
from kitty_runtime.ops.operands import SoftmaxSpec
from kitty_runtime.quant.affine import choose_qparams, dequantize, quantize

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GROUP_SIZE = 32
"""Numbers that share a scale in ``kivi-2-g32`` and ``q4_0``."""

_FP8_MAX = 448.0


@dataclass(frozen=True)
class Peer:
    """A format of keys and values.

    Attributes:
        name: as ``--methods`` takes it.
        rule: what is rounded how, in one line.
        bits: stored bits per rounded number, scales included.
        round_keys, round_values: from numbers ``[..., num_tokens, head_dim]`` to those that are read back.
        residual_len: keys stay unrounded until so many have gathered, values while they are among the newest so many;
            0 = every token is rounded at once.
        group_size: head sizes that it does not divide are refused.
    """

    name: str
    rule: str
    bits: float
    round_keys: Callable[[Tensor], Tensor]
    round_values: Callable[[Tensor], Tensor]
    residual_len: int = 0
    group_size: int = 1

    def rounded(self, query_pos: int) -> tuple[int, int]:
        """How many of the oldest keys and values are read rounded when the query at `query_pos` attends.

        Source: KIVI, section 4 and its public implementation: keys are rounded `residual_len` at a time, values one
        by one as they leave the newest `residual_len`; both after the step's attention.
        """
        if not self.residual_len:
            return query_pos + 1, query_pos + 1
        return query_pos // self.residual_len * self.residual_len, max(0, query_pos - self.residual_len)


def round_affine_keys(keys: Tensor) -> Tensor:
    """2 bits, asymmetric min-max per channel over `GROUP_SIZE` tokens; the tokens must be whole groups.

    Source: KIVI, section 4.1; fp16 scale and zero point, codes from the stored ones as in `kitty_runtime.quant.affine`.
    """
    groups = keys.unflatten(-2, (-1, GROUP_SIZE))
    return _at_two_bits(groups, dim=-2).flatten(-3, -2)


def round_affine_values(values: Tensor) -> Tensor:
    """2 bits, asymmetric min-max per token over `GROUP_SIZE` channels. Source: as `round_affine_keys`."""
    return _at_two_bits(values.unflatten(-1, (-1, GROUP_SIZE)), dim=-1).flatten(-2)


def _at_two_bits(groups: Tensor, dim: int) -> Tensor:
    qparams = choose_qparams(groups, 3, dim)
    return dequantize(quantize(groups, qparams, 3), qparams, groups.dtype)


def round_fp8(x: Tensor) -> Tensor:
    """E4M3 with scale 1, saturating at +-448. Source: vLLM's ``kv_cache_dtype="fp8"`` without calibrated scales."""
    return x.float().clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def round_q4_0(x: Tensor) -> Tensor:
    """4 bits in blocks of 32 channels: ``x ~ (code - 8) * d``, d = the number farthest from 0, over -8, stored as fp16.

    Source: ggml's ``quantize_row_q4_0``, which computes codes with d before it is rounded to fp16.
    """
    blocks = x.float().unflatten(-1, (-1, GROUP_SIZE))
    farthest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    d = farthest / -8
    inverse = torch.where(d == 0, 0.0, 1 / d)
    codes = (blocks * inverse + 8.5).floor().clamp(0, 15)
    rounded: Tensor = (codes - 8) * d.half().float()
    return rounded.flatten(-2).to(x.dtype)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "kivi-2-g32",
            "KIVI's own setting: 2 bits, keys per channel over 32 tokens, values per token over 32 channels",
            3.0,
            round_affine_keys,
            round_affine_values,
            residual_len=128,
            group_size=GROUP_SIZE,
        ),
        Peer("fp8", "E4M3 with scale 1, as vLLM stores it without calibration", 8.0, round_fp8, round_fp8),
        Peer("q4_0", "llama.cpp's blocks of 32 channels", 4.5, round_q4_0, round_q4_0, group_size=GROUP_SIZE),
    )
}


def check_peer(peer: Peer, layers: Sequence[LayerGeometry]) -> None:
    """Verify that a peer's groups fit a model.

    Raises:
        UnsupportedModelError: they do not divide a head size.
    """
    for layer in layers:
        if layer.quantized and layer.head_dim % peer.group_size:
            raise UnsupportedModelError(
                f"{peer.name} groups {peer.group_size} channels, heads of layer {layer.index} have {layer.head_dim}.",
                "Leave it out of --methods.",
            )


def peer_bytes(layers: Sequence[LayerGeometry], peer: Peer, seq_len: int) -> SequenceBytes:
    """Bytes of one sequence of `seq_len` tokens by formula: rounded numbers at `Peer.bits`, the rest at 16 bits.

    Rounded numbers are `SequenceBytes.pages`, those that wait are `SequenceBytes.rings`.
    """
    pages = rings = kept = dense = 0
    # between two steps, what the next query would find; a token that is rounded at once already is
    k_rounded, v_rounded = peer.rounded(seq_len if peer.residual_len else seq_len - 1)
    for layer in layers:
        visible = seq_len if layer.sliding_window is None else min(seq_len, layer.sliding_window)
        vector = layer.num_kv_heads * layer.head_dim
        dense += 2 * visible * vector * BYTES_16
        if not layer.quantized:
            kept += 2 * visible * vector * BYTES_16
            continue
        pages += int((k_rounded + v_rounded) * vector * peer.bits / 8)
        rings += (2 * seq_len - k_rounded - v_rounded) * vector * BYTES_16
    return SequenceBytes(pages, 0, rings, 0, kept, dense)


def rounded_fraction(peer: Peer, lengths: Sequence[int], first_scored: int) -> float:
    """Mean share of visible keys that queries at the scored positions read rounded."""
    shares = [peer.rounded(t)[0] / (t + 1) for length in lengths for t in range(first_scored, length)]
    return sum(shares) / len(shares) if shares else 0.0


def peer_cache(model_config: PreTrainedConfig, peer: Peer) -> Cache:
    """A cache that is read as the peer's; the model must use ``attn_implementation="kitty"``.

    Raises:
        UnsupportedModelError: the architecture cannot be paged, or its heads do not divide into the peer's groups.
    """
    geometry = layers_of(model_config)
    check_peer(peer, geometry)
    layers = DynamicCache(config=model_config).layers
    for layer in geometry:
        if layer.quantized and peer.residual_len:
            layers[layer.index] = ResidualLayer(model_config.get_text_config(decoder=True), peer)
        elif layer.quantized:
            layers[layer.index] = RoundedLayer(peer)
    return Cache(layers=layers)


class RoundedLayer(DynamicLayer):  # type: ignore[misc]
    """Every key and value is rounded as it arrives, the newest included."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._peer = peer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values so far, rounded."""
        rounded = self._peer.round_keys(key_states), self._peer.round_values(value_states)
        return super().update(*rounded, *args, **kwargs)  # type: ignore[no-any-return]


class ResidualLayer(AttendingLayer):
    """Keys are rounded a residual at a time, values one by one; a query reads what decode would at its position."""

    def __init__(self, model_config: Any, peer: Peer) -> None:
        super().__init__(model_config)
        self._peer = peer
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def attend_to(
        self, query: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None, softmax: SoftmaxSpec
    ) -> Tensor:
        past_len, step = self.get_seq_length(), self._peer.residual_len
        if self._keys is not None and self._values is not None:
            keys, values = torch.cat([self._keys, keys], -2), torch.cat([self._values, values], -2)
        self._keys, self._values = keys, values
        total = keys.shape[-2]
        whole = total // step * step
        rounded_keys = self._peer.round_keys(keys[..., :whole, :])
        rounded_values = self._peer.round_values(values)
        out = torch.empty_like(query)
        start = past_len
        while start < total:
            stop = min(total, start // step * step + step)  # up to there queries read the same keys rounded
            tile = slice(start - past_len, stop - past_len)
            k_rounded, _ = self._peer.rounded(start)
            read = torch.cat([rounded_keys[..., :k_rounded, :], keys[..., k_rounded:stop, :]], -2)
            weights = _weights(query[..., tile, :], read, softmax)
            positions = torch.arange(start, stop, device=query.device)
            is_rounded = torch.arange(stop, device=query.device) < (positions - step)[:, None]
            read_rounded = _weighted(weights * is_rounded, rounded_values[..., :stop, :])
            out[..., tile, :] = read_rounded + _weighted(weights * ~is_rounded, values[..., :stop, :])
            start = stop
        return out

    def reset(self) -> None:
        super().reset()
        self._keys = self._values = None


def _weights(query: Tensor, keys: Tensor, softmax: SoftmaxSpec) -> Tensor:
    """``[1, num_kv_heads, gqa_group_size, n, seq_len]``: attention weights of the last n positions."""
    _, num_q_heads, n, head_dim = query.shape
    num_kv_heads, seq_len = keys.shape[1], keys.shape[2]
    groups = query.reshape(1, num_kv_heads, num_q_heads // num_kv_heads, n, head_dim)
    dots = (groups @ keys.unsqueeze(2).mT).to(torch.promote_types(query.dtype, torch.float32))
    return softmax.weights(dots, causal_mask(n, seq_len, query.device))


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """``[1, num_q_heads, n, head_dim]`` in the dtype of `values`."""
    return (weights.to(values.dtype) @ values.unsqueeze(2)).flatten(1, 2)
