"""One forward pass over a batch of sequences: who appends how much, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kitty_runtime.config import Windows
from kitty_runtime.ops.operands import Batch
from kitty_runtime.ops.transfer import to_device


@dataclass
class Step:
    """What one forward pass appends. All layers share it; device tensors are made once per device.

    Attributes:
        windows: of the cache.
        past_lens: tokens stored per sequence before the pass.
        new_lens: tokens each sequence appends.
        tables: page ids per sequence, those that become packed by this pass included.
        real: bool ``[num_seqs, n]`` on the host, which columns of the pass are tokens; None = all.
        slots: each sequence's row in sinks and rings; None = its number in the batch.
    """

    windows: Windows
    past_lens: list[int]
    new_lens: list[int]
    tables: list[list[int]]
    real: Tensor | None = None
    slots: list[int] | None = None
    _batches: dict[torch.device, Batch] = field(default_factory=dict)

    @property
    def is_decode(self) -> bool:
        """One new token in every sequence, a column of the pass."""
        return self.real is None and all(n == 1 for n in self.new_lens)

    @property
    def max_new_pages(self) -> int:
        """The most pages that one sequence completes in this pass, keys or values."""
        most = 0
        for past, new in zip(self.past_lens, self.new_lens, strict=True):
            before, after = self.windows.packed_pages(past), self.windows.packed_pages(past + new)
            most = max(most, after[0] - before[0], after[1] - before[1])
        return most

    def batch(self, device: torch.device) -> Batch:
        """The sequences as the operations see them, on `device`; copied there without a stop of the stream."""
        if device not in self._batches:
            self._batches[device] = self._make_batch(device)
        return self._batches[device]

    def _make_batch(self, device: torch.device) -> Batch:
        num_seqs = len(self.past_lens)
        width = max(len(table) for table in self.tables)
        seq_lens = [past + new for past, new in zip(self.past_lens, self.new_lens, strict=True)]
        slots = range(num_seqs) if self.slots is None else self.slots
        rows = [
            [slot, past, total, *table, *[-1] * (width - len(table))]
            for slot, past, total, table in zip(slots, self.past_lens, seq_lens, self.tables, strict=True)
        ]
        on_device = to_device(torch.tensor(rows, dtype=torch.int32), device)
        return Batch(
            slots=on_device[:, 0].long(),
            page_table=on_device[:, 3:].contiguous(),
            past_lens=on_device[:, 1].contiguous(),
            seq_lens=on_device[:, 2].contiguous(),
            max_new_pages=self.max_new_pages,
        )

    def compact(self, tokens: Tensor) -> Tensor:
        """Each sequence's real tokens ``[num_seqs, heads, n, head_dim]`` moved to the left; the rest is any of them."""
        if self.real is None:
            return tokens
        order = self._order(tokens)[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3])
        return tokens.gather(2, order)

    def expand(self, compacted: Tensor) -> Tensor:
        """Inverse of `compact`, zero at padding."""
        if self.real is None:
            return compacted
        real = self.real.to(compacted.device)
        place = (real.cumsum(1) - 1).clamp_min(0)[:, None, :, None]
        place = place.expand(-1, compacted.shape[1], -1, compacted.shape[3])
        return compacted.gather(2, place) * real[:, None, :, None]

    def _order(self, tokens: Tensor) -> Tensor:
        """int64 ``[num_seqs, n]``: the real columns of each row, in order, then the padding."""
        assert self.real is not None
        return (~self.real).to(torch.int8).argsort(dim=1, stable=True).to(tokens.device)


@dataclass
class PackedStep(Step):
    """A pass whose sequences lie one after the other in a single row, as the engine reads prompts: no padding."""

    _indices: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def is_decode(self) -> bool:
        return False

    def compact(self, tokens: Tensor) -> Tensor:
        """Tokens ``[1, heads, num_tokens, head_dim]`` as ``[num_seqs, heads, n, head_dim]``, n of the longest."""
        return tokens[0][:, self._index(tokens.device)[0]].transpose(0, 1)

    def expand(self, compacted: Tensor) -> Tensor:
        """Inverse of `compact`."""
        return compacted.transpose(0, 1).flatten(1, 2)[:, self._index(compacted.device)[1]][None]

    def _index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of each ``[num_seqs, n]`` its token (past a sequence's end its last), of each token its place there; made
        once for all layers."""
        if device not in self._indices:
            lens, column = torch.tensor(self.new_lens)[:, None], torch.arange(max(self.new_lens))
            token = lens.cumsum(0) - lens + column.minimum(lens - 1)
            place = (column < lens).flatten().nonzero()[:, 0]
            self._indices[device] = to_device(token, device), to_device(place, device)
        return self._indices[device]
