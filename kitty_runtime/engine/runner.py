"""Forward passes of the engine: prompts in one packed row, decode steps on buffers that a CUDA graph can replay."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kitty_runtime.cache.step import PackedStep
from kitty_runtime.engine.cache import ENGINE_ATTENTION, EngineCache
from kitty_runtime.engine.compiled import compiled_layers
from kitty_runtime.engine.graphs import DecodeBuffers, DecodeGraphs, why_not_captured
from kitty_runtime.engine.sequence import PENDING, Sequence
from kitty_runtime.models.loading import cache_kwarg
from kitty_runtime.ops.operands import Batch
from kitty_runtime.ops.transfer import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Runner:
    """Owner of the model's passes and of the page table on the device.

    Args:
        model: its attention is set to the engine's.
        cache: with one slot more than sequences: the last is written by rows that only fill a batch up.
        max_pages: of one sequence.
        capture: replay decode steps as CUDA graphs where the device and the model allow it.
        compiled: with their layers compiled.
    """

    def __init__(
        self, model: PreTrainedModel, cache: EngineCache, max_pages: int, capture: bool = True, compiled: bool = False
    ) -> None:
        self.model = model
        self.cache = cache
        self.device = model.device
        self._filler = (0, 0, cache.num_slots - 1)
        self._table = torch.full((cache.num_slots, max(1, max_pages)), -1, dtype=torch.int32, device=self.device)
        self._chosen = torch.zeros(cache.num_slots, dtype=torch.int64, device=self.device)
        """Each slot's newest token, which the host may not have read."""
        self._on_device = [0] * cache.num_slots
        """Entries of each slot's row that the device has."""
        self._cache_argument = cache_kwarg(model)
        model.set_attn_implementation(ENGINE_ATTENTION)
        self.eager_reason = why_not_captured(model, self.device) if capture else "not asked for"
        """Why decode steps are not replayed as CUDA graphs; empty if they are."""
        self._graphs: DecodeGraphs | None = None
        if not self.eager_reason:
            around = partial(compiled_layers, model, cache) if compiled else nullcontext
            self._graphs = DecodeGraphs(self._decode, self._filler, around)

    def read_prompts(self, prompts: Rows[tuple[Sequence, int]]) -> Tensor:
        """Read the next n tokens of each sequence, one after the other in one row.

        Returns:
            ``[num_seqs, vocab_size]``: logits after each sequence's last token of the pass.
        """
        sequences, counts = [s for s, _ in prompts], [n for _, n in prompts]
        past_lens = [s.num_stored for s in sequences]
        for s in sequences:
            if not s.num_stored:  # the slot's row of the table is another sequence's
                self._on_device[_slot(s)] = 0
        self.cache.step = PackedStep(
            windows=self.cache.config.windows,
            past_lens=past_lens,
            new_lens=counts,
            tables=[list(s.table) for s in sequences],
            slots=[_slot(s) for s in sequences],
        )
        spans = list(zip(sequences, past_lens, counts, strict=True))
        ids = [token for s, past, n in spans for token in s.ids[past : past + n]]
        positions = [position for _, past, n in spans for position in range(past, past + n)]
        input_ids, position_ids = to_device(torch.tensor([ids, positions]), self.device)[:, None].unbind(0)
        last = to_device(torch.tensor(counts).cumsum(0) - 1, self.device)
        return self._forward(input_ids, position_ids, last)[0]

    def decode(self, sequences: Rows[Sequence]) -> Tensor:
        """Read each sequence's newest token.

        Returns:
            ``[num_seqs, vocab_size]``; overwritten by the next call.
        """
        self._update_table(sequences)
        size = len(sequences) if self._graphs is None else 1 << (len(sequences) - 1).bit_length()
        on_host = self._rows(sequences, size)
        if self._graphs is not None:
            return self._graphs.replay(on_host)[: len(sequences)]
        return self._decode(self._eager_buffers(on_host, sequences))

    def remember(self, sequences: Rows[Sequence], tokens: Tensor) -> None:
        """The tokens ``[num_seqs]`` that were chosen for sequences: their next decode step reads them on the device."""
        self._chosen[to_device(torch.tensor([_slot(s) for s in sequences]), self.device)] = tokens

    def _rows(self, sequences: Rows[Sequence], size: int) -> Tensor:
        """See `DecodeBuffers.rows`; on the host, filled up to `size`."""
        token, num_stored, slot = ([number] * (size - len(sequences)) for number in self._filler)
        tokens = [s.ids[-1] for s in sequences] + token
        lens = [s.num_stored for s in sequences] + num_stored
        slots = [s.slot for s in sequences] + slot
        return torch.tensor(tokens + lens + slots).view(3, size)  # flat: nested lists take long to read

    def _eager_buffers(self, rows: Tensor, sequences: Rows[Sequence]) -> DecodeBuffers:
        """Without a graph, operations do only what this step needs."""
        windows = self.cache.config.windows
        packs = any(windows.packed_pages(s.num_stored + 1) != windows.packed_pages(s.num_stored) for s in sequences)
        width = max(len(s.table) for s in sequences)
        return DecodeBuffers(to_device(rows, self.device), width, max_new_pages=int(packs))

    def _decode(self, buffers: DecodeBuffers) -> Tensor:
        """One decode step on buffers: everything here is captured."""
        ids, past_lens, slots = buffers.rows.unbind(0)
        ids = torch.where(ids == PENDING, self._chosen[slots], ids)
        lens = past_lens.to(torch.int32)
        table = self._table[slots]
        self.cache.step = Batch(
            slots=slots,
            page_table=table if buffers.width is None else table[:, : buffers.width].contiguous(),
            past_lens=lens,
            seq_lens=lens + 1,
            max_new_pages=buffers.max_new_pages,
        )
        return self._forward(ids[:, None], past_lens[:, None], 1)[:, 0]

    def _forward(self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        logits: Tensor = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{self._cache_argument: self.cache},
        ).logits
        self.cache.step = None
        return logits

    def _update_table(self, sequences: Rows[Sequence]) -> None:
        """Bring the pages that sequences got since their last decode step to the device, all at once."""
        changes: list[tuple[int, int, int]] = []
        for s in sequences:
            slot = _slot(s)
            if self._on_device[slot] != len(s.table):
                begin = min(self._on_device[slot], len(s.table))
                changes += [(slot, column, s.table[column]) for column in range(begin, len(s.table))]
                self._on_device[slot] = len(s.table)
        if changes:
            slots, columns, pages = to_device(torch.tensor(changes).T.contiguous(), self.device).unbind(0)
            self._table[slots, columns] = pages.to(torch.int32)

    def reset(self) -> None:
        """After a pass that failed: nothing is under way."""
        self.cache.step = None
        for layer in self.cache.layers:
            layer.reset()


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot
