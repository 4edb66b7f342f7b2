"""A layer's state filled by hand for the attention operations, and attention computed the long way in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from page_format import Spec, decode_keys, decode_values, random_head
from torch import Tensor

from kitty_runtime.config import Windows
from kitty_runtime.ops.operands import Batch, LayerState
from kitty_runtime.quant.packing import PageLayout

POISON = float("nan")
NUM_KV_HEADS = 2


@dataclass
class Case:
    """Sequences in one layer. `keys`, `values`: per sequence, every token unpacked, ``[heads, len, head_dim]``."""

    spec: Spec
    windows: Windows
    state: LayerState
    page_table: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def read_at(self, row: int, query_pos: int) -> tuple[Tensor, Tensor]:
        """What the query at `query_pos` may read: packed pages dequantized, everything else as it came."""
        keys, values = self.keys[row][:, : query_pos + 1].clone(), self.values[row][:, : query_pos + 1].clone()
        for page in range((query_pos + 1) // 128 + 1):
            first = self.windows.sink_len + 128 * page
            for head in range(NUM_KV_HEADS):
                if first + 128 + self.windows.k_recent_len <= query_pos:
                    keys[head, first : first + 128] = torch.from_numpy(
                        decode_keys(self.spec, self.head(row, page, head))
                    )
                if first + 128 + self.windows.v_recent_len <= query_pos:
                    values[head, first : first + 128] = torch.from_numpy(
                        decode_values(self.spec, self.head(row, page, head))
                    )
        return keys, values

    def head(self, row: int, page: int, head: int) -> bytes:
        """Bytes of one head of a sequence's page."""
        page_bytes = self.state.pages[int(self.page_table[row, page])].numpy()
        return self.spec.head_in_page(page_bytes, head, NUM_KV_HEADS).tobytes()


def make_case(spec: Spec, windows: Windows, lens: list[int], packed_at: list[int], seed: int) -> Case:
    """Sequences with `lens` tokens stored, pages valid as far as a query at `packed_at` reads them.

    Whatever must not be read is poison: unused sink and ring slots, pages that hold nothing yet, the values of a page
    whose keys alone are packed.
    """
    rng = np.random.default_rng(seed)
    layout = PageLayout(NUM_KV_HEADS, spec.head_dim, spec.k_bits, spec.v_bits, spec.num_boosted, torch.float64)
    state = LayerState.allocate(layout, windows, len(lens), torch.float64, torch.device("cpu"))
    for tensor in (state.k_sink, state.v_sink, state.k_ring, state.v_ring):
        tensor.fill_(POISON)

    keys, values = [], []
    for row, length in enumerate(lens):
        shape = (NUM_KV_HEADS, length, spec.head_dim)
        keys.append(torch.from_numpy(rng.standard_normal(shape)))
        values.append(torch.from_numpy(rng.standard_normal(shape)))
        for pos in range(length):
            for sink, ring, recent, tokens in (
                (state.k_sink, state.k_ring, windows.k_recent_len, keys[row]),
                (state.v_sink, state.v_ring, windows.v_recent_len, values[row]),
            ):
                if pos < windows.sink_len:
                    sink[row, :, pos] = tokens[:, pos]
                else:
                    ring[row, :, (pos - windows.sink_len) % (recent + 128)] = tokens[:, pos]

    counts = [max(0, (at - windows.sink_len - windows.k_recent_len) // 128) for at in packed_at]
    v_counts = [max(0, (at - windows.sink_len - windows.v_recent_len) // 128) for at in packed_at]
    width = max(counts) + 1  # one more column: pages that are assigned and not written yet
    ids = rng.permutation(len(lens) * width + 1)[1:].tolist()
    pages = np.full((len(lens) * width + 1, layout.page_bytes), 0xFF, np.uint8)
    table = torch.full((len(lens), width), -1, dtype=torch.int32)
    for row, (count, v_count) in enumerate(zip(counts, v_counts, strict=True)):
        for page in range(count + (row % 2)):
            table[row, page] = ids.pop()
            for head in range(NUM_KV_HEADS * (page < count)):
                data = random_head(spec, rng)
                if page >= v_count:
                    for name, (first, end) in spec.spans.items():
                        if name.startswith("v"):
                            data[first:end] = b"\xff" * (end - first)
                spec.put_head(pages[table[row, page]], head, NUM_KV_HEADS, bytes(data))
    state.pages = torch.from_numpy(pages)
    return Case(spec, windows, state, table, keys, values)


def batch_of(page_table: Tensor, lens: list[int]) -> Batch:
    """Sequences in slots 0, 1, .. of `lens` tokens, the last one just stored."""
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    return Batch(torch.arange(len(lens)), page_table, seq_lens - 1, seq_lens, max_new_pages=1)


def attend_long_way(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """One query ``[num_q_heads, head_dim]`` to all of keys and values, head by head, in float64."""
    group = query.shape[0] // keys.shape[0]
    out = []
    for q_head in range(query.shape[0]):
        k, v = keys[q_head // group].numpy(), values[q_head // group].numpy()
        logits = scale * (k @ query[q_head].numpy())
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        top = logits.max()
        weights = np.exp(logits - top)
        total = weights.sum()
        if sink_logits is not None:
            total += np.exp(float(sink_logits[q_head]) - top)
        out.append(weights @ v / total)
    return torch.from_numpy(np.stack(out))
