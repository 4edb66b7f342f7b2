"""One forward pass over a batch of sequences: who appends how much, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kitty_runtime.config import PAGE_SIZE, Windows


class PagesToPack(NamedTuple):
    """Pages that become packed after a decode step, one per row at most.

    rows: int64 ``[n]``; page_ids: int64 ``[n]``; ring_index: int64 ``[n, 128]``, the ring slots of their tokens.
    """

    rows: Tensor
    page_ids: Tensor
    ring_index: Tensor


class DecodeIndices(NamedTuple):
    """Device indices of a step that appends one token to every sequence."""

    slots: Tensor
    page_table: Tensor
    seq_lens: Tensor
    sink_rows: Tensor
    sink_index: Tensor
    ring_rows: Tensor
    k_ring_index: Tensor
    v_ring_index: Tensor
    keys_to_pack: PagesToPack | None
    values_to_pack: PagesToPack | None


@dataclass
class Step:
    """What one forward pass appends. All layers share it; indices are made once per device.

    Attributes:
        windows: of the cache.
        past_lens: tokens stored per sequence before the pass.
        new_lens: tokens each sequence appends.
        tables: page ids per sequence, those that become packed by this pass included.
        real: bool ``[num_seqs, n]`` on the host, which columns of the pass are tokens; None = all.
    """

    windows: Windows
    past_lens: list[int]
    new_lens: list[int]
    tables: list[list[int]]
    real: Tensor | None
    _indices: dict[torch.device, DecodeIndices] = field(default_factory=dict)

    @property
    def is_decode(self) -> bool:
        """One new token in every sequence."""
        return self.real is None and all(n == 1 for n in self.new_lens)

    def columns(self, row: int) -> Tensor | slice:
        """Columns of the pass that hold tokens of sequence `row`."""
        return slice(None) if self.real is None else self.real[row].nonzero().flatten()

    def decode_indices(self, device: torch.device) -> DecodeIndices:
        """Indices for `is_decode` steps, on `device`."""
        if device not in self._indices:
            self._indices[device] = self._make_indices(device)
        return self._indices[device]

    def _make_indices(self, device: torch.device) -> DecodeIndices:
        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        sink_len, windows = self.windows.sink_len, self.windows
        rows = range(len(self.past_lens))
        in_sink = [row for row in rows if self.past_lens[row] < sink_len]
        in_ring = [row for row in rows if self.past_lens[row] >= sink_len]
        offsets = [self.past_lens[row] - sink_len for row in in_ring]
        width = max((len(table) for table in self.tables), default=0)
        padded = [table + [-1] * (width - len(table)) for table in self.tables]
        before = [windows.packed_pages(n) for n in self.past_lens]
        after = [windows.packed_pages(n + 1) for n in self.past_lens]
        return DecodeIndices(
            slots=ints(list(rows)),
            page_table=torch.tensor(padded, dtype=torch.int32, device=device).view(len(rows), width),
            seq_lens=torch.tensor([n + 1 for n in self.past_lens], dtype=torch.int32, device=device),
            sink_rows=ints(in_sink),
            sink_index=ints([self.past_lens[row] for row in in_sink]),
            ring_rows=ints(in_ring),
            k_ring_index=ints([o % windows.k_ring_len for o in offsets]),
            v_ring_index=ints([o % windows.v_ring_len for o in offsets]),
            keys_to_pack=self._to_pack(before, after, 0, windows.k_ring_len, device),
            values_to_pack=self._to_pack(before, after, 1, windows.v_ring_len, device),
        )

    def _to_pack(
        self,
        before: list[tuple[int, int]],
        after: list[tuple[int, int]],
        part: int,
        ring_len: int,
        device: torch.device,
    ) -> PagesToPack | None:
        """The page each row completes in this step; part 0 is keys, 1 values."""
        rows = [row for row in range(len(before)) if after[row][part] > before[row][part]]
        if not rows:
            return None
        pages = torch.tensor([before[row][part] for row in rows], device=device)
        offsets = pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)
        ids = [self.tables[row][before[row][part]] for row in rows]
        return PagesToPack(torch.tensor(rows, device=device), torch.tensor(ids, device=device), offsets % ring_len)
