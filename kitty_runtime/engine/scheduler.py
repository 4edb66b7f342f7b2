"""Who runs in the next step: a pure function of the requests and the pool. No torch here.

First come, first served. A step decodes one token of every sequence whose prompt is read, and reads prompts under a
token budget. When pages run out, kept conversations are dropped first, then the youngest sequence is preempted: its
pages go back and it waits in front, to be read again. Since what a query reads depends on its position alone
(`CacheConfig.packed_pages`), that changes no answer. The oldest sequence always gets its pages, so all finish.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field

from kitty_runtime.cache.page_pool import PagePool
from kitty_runtime.config import CacheConfig
from kitty_runtime.engine.sequence import Sequence
from kitty_runtime.errors import PoolError

MAX_PROMPTS = 16
"""Prompts in one pass: its rows are padded to the longest of them inside attention."""

MIN_PROMPT_BUDGET = 128
"""Prompt tokens that a step may read however many sequences decode."""


@dataclass(frozen=True)
class Plan:
    """One step.

    Attributes:
        prompts: sequences to read and how many tokens of each, in one pass.
        decodes: sequences that decode one token, in another.
        preempted: sequences that lost their pages while this was planned.
    """

    prompts: list[tuple[Sequence, int]] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owner of the queues, the slots and, with the pool, the pages.

    Args:
        config: settings of the cache, for `packed_pages`.
        num_pages: of the pool.
        num_slots: sequences that can be stored at once.
        max_batch_tokens: tokens that a step reads at the most, decoded ones included.
    """

    def __init__(self, config: CacheConfig, num_pages: int, num_slots: int, max_batch_tokens: int) -> None:
        self._windows = config.windows
        self.pool = PagePool(num_pages)
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.kept: dict[str, Sequence] = {}
        self.num_preemptions = 0
        self._num_slots = num_slots
        self._free_slots = list(reversed(range(num_slots)))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def pages_for(self, num_tokens: int) -> int:
        """Pages of a sequence that stores so many tokens."""
        return self._windows.packed_pages(num_tokens)[0]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by its arrival; one that continues a kept one joins with what is stored."""
        if sequence.slot is not None:
            bisect.insort(self.running, sequence, key=lambda s: s.arrival)
        else:
            self._wait(sequence)

    def schedule(self) -> Plan:
        """Choose the next step and assign the pages that it completes; see the module's docstring for the rules."""
        plan = Plan()
        decoding = [s for s in self.running if s.decodes and not s.is_full]
        for sequence in [s for s in decoding if s.alone][:1] or decoding:
            fits = sequence.num_stored < sequence.capacity  # nearly always
            if sequence.slot is not None and (fits or self._extend(sequence, 1, plan)):
                plan.decodes.append(sequence)
        budget = max(self.max_batch_tokens - len(plan.decodes), MIN_PROMPT_BUDGET)
        budget = self._read_running(plan, budget)
        self._admit(plan, budget)
        # A prompt that made room by preempting took back what had been planned for the victim.
        plan.decodes[:] = [s for s in plan.decodes if s.slot is not None]
        plan.prompts[:] = [(s, n) for s, n in plan.prompts if s.slot is not None]
        return plan

    def _read_running(self, plan: Plan, budget: int) -> int:
        """Go on with prompts that are partly read; returns what is left of the budget."""
        for sequence in [s for s in self.running if not s.decodes and not s.is_full]:
            if sequence.slot is None or not self._may_join(sequence, plan, budget):
                continue
            n = min(sequence.num_unstored, budget)
            if self._extend(sequence, n, plan):
                plan.prompts.append((sequence, n))
                budget -= n
        return budget

    def _admit(self, plan: Plan, budget: int) -> None:
        """Let waiting sequences in, in order, while slots, pages and the budget last."""
        while self.waiting and self._may_join(self.waiting[0], plan, budget):
            sequence = self.waiting[0]
            if sequence in plan.preempted or not self._has_room(sequence):
                return
            self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            bisect.insort(self.running, sequence, key=lambda s: s.arrival)
            n = min(sequence.num_unstored, budget)
            self._add_pages(sequence, self.pages_for(n))
            plan.prompts.append((sequence, n))
            budget -= n

    def _may_join(self, sequence: Sequence, plan: Plan, budget: int) -> bool:
        if budget <= 0 or len(plan.prompts) >= MAX_PROMPTS:
            return False
        return not plan.prompts or not (sequence.alone or plan.prompts[0][0].alone)

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence can be let in: all that is waiting to be read fits, and each running sequence
        could pack one more page before anyone is preempted."""
        committed = sum(self.pages_for(len(s.ids)) - len(s.table) for s in self.running)
        margin = len(self.running)
        need = self.pages_for(len(sequence.ids)) + max(0, committed) + margin
        while self.kept and (need > self.pool.num_free or not self._free_slots):
            self.drop_kept(next(iter(self.kept)))
        return bool(self._free_slots) and need <= self.pool.num_free

    def _extend(self, sequence: Sequence, n: int, plan: Plan) -> bool:
        """Give a running sequence the pages that its next `n` tokens complete; False if it was preempted itself."""
        count = self.pages_for(sequence.num_stored + n) - len(sequence.table)
        while count > self.pool.num_free:
            if self.kept:
                self.drop_kept(next(iter(self.kept)))
                continue
            victim = self.running[-1]
            self.preempt(victim)
            plan.preempted.append(victim)
            if victim is sequence:
                return False
        self._add_pages(sequence, count)
        return True

    def _add_pages(self, sequence: Sequence, count: int) -> None:
        sequence.table += self.pool.allocate(count)
        sequence.capacity = self._windows.longest(len(sequence.table))

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages and slot back; it waits to be read again."""
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        self._wait(sequence)

    def finish(self, sequence: Sequence) -> None:
        """A sequence leaves, wherever it is; one to be kept keeps its pages and slot."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.request.keep:
            self.kept[sequence.id] = sequence
        else:
            self._release(sequence)

    def drop_kept(self, request_id: str) -> None:
        """Forget what a kept sequence has stored."""
        self._release(self.kept.pop(request_id))

    def check_integrity(self) -> None:
        """Verify queues, slots, tables and the pool against each other, between two steps.

        Raises:
            PoolError: names what is wrong.
        """
        stored = [*self.running, *self.kept.values()]
        self.pool.check_integrity([s.table for s in stored])
        slots = [s.slot for s in stored if s.slot is not None]
        if sorted([*slots, *self._free_slots]) != list(range(self._num_slots)):
            raise PoolError(f"slots {sorted(slots)} are taken and {sorted(self._free_slots)} free")
        for sequence in stored:
            if len(sequence.table) != self.pages_for(sequence.num_stored):
                raise PoolError(
                    f"request {sequence.id} stores {sequence.num_stored} tokens on {len(sequence.table)} pages"
                )
        for sequence in self.waiting:
            if sequence.table or sequence.num_stored or sequence.slot is not None:
                raise PoolError(f"request {sequence.id} waits and stores {sequence.num_stored} tokens")
        arrivals = [s.arrival for s in self.running]
        if arrivals != sorted(arrivals) or list(self.waiting) != sorted(self.waiting, key=lambda s: s.arrival):
            raise PoolError("a queue is out of order")

    def _wait(self, sequence: Sequence) -> None:
        if not self.waiting or self.waiting[-1].arrival < sequence.arrival:
            self.waiting.append(sequence)
            return
        bisect.insort(self.waiting, sequence, key=lambda s: s.arrival)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.table)
        sequence.table = []
        sequence.num_stored = sequence.capacity = 0
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None
