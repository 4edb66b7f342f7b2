"""The scheduler alone, without a model: random schedules against its own bookkeeping."""

from __future__ import annotations

import random
import time

import pytest

from kitty_runtime.config import CacheConfig
from kitty_runtime.engine.request import Request, SamplingParams
from kitty_runtime.engine.scheduler import MAX_PROMPTS, MIN_PROMPT_BUDGET, Scheduler
from kitty_runtime.engine.sequence import Sequence
from kitty_runtime.errors import PoolError


def sequence(number, prompt_len, max_tokens=50, keep=False):
    request = Request(str(number), (5,) * prompt_len, SamplingParams(max_tokens=max_tokens), keep=keep)
    return Sequence(request, number, [5] * prompt_len, prompt_len + max_tokens)


def step(scheduler):
    """Do what an engine would with a plan; returns the plan."""
    plan = scheduler.schedule()
    for s, n in [*plan.prompts, *((s, 1) for s in plan.decodes)]:
        s.num_stored += n
        if s.num_unstored == 0:
            s.ids.append(7)
            if len(s.ids) >= s.max_len:
                scheduler.finish(s)
    return plan


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules(seed):
    """Arrivals, preemptions, aborts and kept sequences in any order: nothing is lost, nothing counted twice."""
    rng = random.Random(seed)
    budget = rng.choice([64, 300, 2048])
    scheduler = Scheduler(
        CacheConfig(), num_pages=rng.randint(8, 30), num_slots=rng.randint(2, 12), max_batch_tokens=budget
    )
    live, finished, number = {}, 0, 0
    for _ in range(1500):
        if rng.random() < 0.15 and number < 150:
            live[number] = sequence(number, rng.randint(1, 600), rng.randint(1, 300), keep=rng.random() < 0.2)
            scheduler.add(live[number])
            number += 1
        plan = step(scheduler)
        scheduler.check_integrity()
        planned = [s for s, _ in plan.prompts] + plan.decodes
        assert len(set(map(id, planned))) == len(planned)
        assert len(plan.prompts) <= MAX_PROMPTS
        allowed = max(budget - len(plan.decodes), MIN_PROMPT_BUDGET)
        assert sum(n for _, n in plan.prompts) <= allowed
        for n in [n for n, s in live.items() if len(s.ids) >= s.max_len]:
            del live[n]
            finished += 1
        if live and rng.random() < 0.01:
            scheduler.finish(live.pop(rng.choice(list(live))))
            finished += 1
            scheduler.check_integrity()
    while scheduler.has_work:
        step(scheduler)
        scheduler.check_integrity()
    assert finished + len(live) == number > 100
    for name in list(scheduler.kept):
        scheduler.drop_kept(name)
    assert scheduler.pool.num_used == 0
    scheduler.check_integrity()


def test_the_same_requests_make_the_same_plans():
    def plans():
        scheduler, rng = Scheduler(CacheConfig(), 12, 5, 256), random.Random(0)
        for number in range(40):
            scheduler.add(sequence(number, rng.randint(1, 500), rng.randint(1, 200)))
        found = []
        while scheduler.has_work:
            plan = step(scheduler)
            found.append(([(s.id, n) for s, n in plan.prompts], [s.id for s in plan.decodes]))
        return found

    assert plans() == plans()


def test_first_come_first_served():
    """A short request behind one that has no room yet waits: nobody is overtaken for ever."""
    scheduler = Scheduler(CacheConfig(), num_pages=6, num_slots=4, max_batch_tokens=2048)
    for number, prompt_len in enumerate((700, 700, 10)):
        scheduler.add(sequence(number, prompt_len))
    plan = step(scheduler)
    assert [s.id for s, _ in plan.prompts] == ["0"]
    assert [s.id for s in scheduler.waiting] == ["1", "2"]


def test_long_prompts_are_read_in_chunks_beside_decoding():
    scheduler = Scheduler(CacheConfig(), num_pages=100, num_slots=4, max_batch_tokens=256)
    scheduler.add(sequence(0, 10))
    step(scheduler)
    scheduler.add(sequence(1, 1000))
    chunks = []
    for _ in range(4):
        plan = step(scheduler)
        assert [s.id for s in plan.decodes] == ["0"]
        chunks.append(plan.prompts[0][1])
    assert chunks == [255, 255, 255, 235]


def test_integrity_finds_what_is_wrong():
    scheduler = Scheduler(CacheConfig(), num_pages=20, num_slots=4, max_batch_tokens=2048)
    scheduler.add(sequence(0, 300))
    step(scheduler)
    running = scheduler.running[0]
    for attribute, value, message in (
        ("num_stored", 10, "stores 10 tokens"),
        ("slot", 3, "slots"),
        ("table", [], "references"),
    ):
        before = getattr(running, attribute)
        setattr(running, attribute, value)
        with pytest.raises(PoolError, match=message):
            scheduler.check_integrity()
        setattr(running, attribute, before)
    scheduler.check_integrity()


def test_overhead_of_a_step():
    """Under a millisecond of CPU at 256 running sequences, measured apart from the model."""
    scheduler = Scheduler(CacheConfig(), num_pages=20000, num_slots=256, max_batch_tokens=4096)
    for number in range(256):
        scheduler.add(sequence(number, 100, max_tokens=5000))
    while len(scheduler.running) < 256 or not all(s.decodes for s in scheduler.running):
        step(scheduler)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(50):
            assert len(scheduler.schedule().decodes) == 256
        seconds.append((time.process_time() - start) / 50)
    assert min(seconds) < 1e-3, seconds
