"""CUDA graphs of the decode step, captured when a batch size first runs; sizes are powers of two."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_ROPE_THAT_LOOKS_AT_LENGTHS = ("dynamic", "longrope")


@dataclass(frozen=True)
class DecodeBuffers:
    """What a decode step reads.

    Attributes:
        rows: int64 ``[3, batch_size]``: token ids, `PENDING` for those that were chosen last; stored tokens; slots.
        width: columns of the page table to read; None = all, whatever the lengths.
        max_new_pages: 1 if a sequence may complete a page, known on the device alone in a graph.
    """

    rows: Tensor
    width: int | None
    max_new_pages: int


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    buffers: DecodeBuffers
    logits: Tensor


class DecodeGraphs:
    """One graph per batch size, all in one memory pool.

    Args:
        decode: logits ``[batch_size, vocab_size]`` of a step, from operations that can be captured.
        filler: a row of `DecodeBuffers` that belongs to no sequence.
        compiled: entered while a step is captured, see `kitty_runtime.engine.compiled`.
    """

    def __init__(
        self,
        decode: Callable[[DecodeBuffers], Tensor],
        filler: tuple[int, int, int],
        compiled: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._decode = decode
        self._filler = filler
        self._compiled = compiled
        self._captured: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def replay(self, rows: Tensor) -> Tensor:
        """Run a step.

        Args:
            rows: int64 ``[3, batch_size]`` on the host, see `DecodeBuffers`.
        Returns:
            the graph's own logits, overwritten by the next replay of this size.
        """
        size = rows.shape[1]
        if size not in self._captured:
            self._captured[size] = self._capture(rows)
        captured = self._captured[size]
        captured.buffers.rows.copy_(rows.pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.logits

    def _capture(self, rows: Tensor) -> _Captured:
        """Warm up and capture on filler rows alone: sequences are stepped by the replay."""
        try:
            with self._compiled():
                return self._warm_up_and_capture(rows)
        except torch._dynamo.exc.TorchDynamoException as problem:
            logger.warning("the decode step is not compiled: %s", str(problem).strip().split("\n")[0])
            self._compiled = nullcontext
            return self._warm_up_and_capture(rows)

    def _warm_up_and_capture(self, rows: Tensor) -> _Captured:
        logger.info("capturing the decode step of %d sequences", rows.shape[1])
        filler = torch.tensor([self._filler] * rows.shape[1]).T.contiguous()
        buffers = DecodeBuffers(filler.to("cuda"), width=None, max_new_pages=1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and fills the allocator's pools
                self._decode(buffers)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._decode(buffers)
        return _Captured(graph, buffers, logits)


def why_not_captured(model: PreTrainedModel, device: torch.device) -> str:
    """Why a model's decode step cannot be a CUDA graph; empty if it can, as far as its config tells."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {r.get("rope_type") for r in rope.values() if isinstance(r, dict)}
    if kinds & set(_ROPE_THAT_LOOKS_AT_LENGTHS):
        return "its rotary embedding looks at lengths on the host"
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        return "its experts are chosen on the host"
    return ""
