"""One request on its way through the engine. Host bookkeeping only: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from kitty_runtime.engine.request import Request, SamplingParams

PENDING = -1
"""Stands in `Sequence.ids` for a token that is chosen on the device and that the host has not read yet."""


@dataclass(eq=False)
class Sequence:
    """A request, its tokens and where they are stored.

    Attributes:
        arrival: number of the request; the order in which sequences are served and the reverse of preemption.
        ids: prompt and generated tokens; the last two may be `PENDING`.
        num_stored: how many of them have their keys and values in the cache.
        slot: row in sinks and rings; None = nothing is stored.
        table: page ids, in order; capacity: tokens that can be stored before another is needed.
        max_len: prompt and new tokens at the most.
        alone: run in a pass of its own, because a pass with others failed.
    """

    request: Request
    arrival: int
    ids: list[int]
    max_len: int
    num_stored: int = 0
    slot: int | None = None
    table: list[int] = field(default_factory=list)
    capacity: int = 0
    alone: bool = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_new(self) -> int:
        """Tokens generated."""
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def num_unstored(self) -> int:
        return len(self.ids) - self.num_stored

    @property
    def decodes(self) -> bool:
        """Whether its next pass reads one token behind stored ones."""
        return 0 < self.num_stored == len(self.ids) - 1

    @property
    def is_full(self) -> bool:
        """Whether it has all its tokens, the last of them perhaps not read by the host."""
        return len(self.ids) >= self.max_len
