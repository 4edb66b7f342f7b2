"""Requests, and what they are answered one by one."""

from __future__ import annotations

import random

import torch

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.engine.request import Request, SamplingParams
from kitty_runtime.models.loading import cache_kwarg


def random_requests(count, longest, max_new, seed=0, vocab=96):
    """Prompts of 1 to `longest` tokens, most of them short, and answers of 1 to `max_new`."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        n = min(longest, max(1, int(longest ** rng.random())))
        ids = tuple(rng.randrange(3, vocab) for _ in range(n))
        sampling = SamplingParams(max_tokens=rng.randint(1, max_new), temperature=0)
        requests.append(Request(str(i), ids, sampling))
    return requests


def run(engine, requests, rng=None, check=True):
    """Add requests, staggered if `rng` is given, and step until all are done: tokens and last event of each."""
    todo, tokens, last = list(requests), {r.id: [] for r in requests}, {}
    while todo or engine.has_work:
        while todo and (rng is None or rng.random() < 0.3 or not engine.has_work):
            engine.add(todo.pop(0))
        for event in engine.step():
            if event.token_id is not None:
                tokens[event.request_id].append(event.token_id)
            if event.finish_reason is not None:
                assert event.request_id not in last
                last[event.request_id] = event
        if check:
            engine.check_integrity()
    return tokens, last


@torch.no_grad()
def one_by_one(model, config, request, profile=None):
    """Greedy tokens of a request alone, by plain forward passes through `KittyCache`."""
    model.set_attn_implementation("kitty")
    cache, tokens, ids = KittyCache(model.config, config, profile), [], torch.tensor([request.prompt_ids])
    for _ in range(request.sampling.max_tokens):
        logits = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_kwarg(model): cache}).logits
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] in request.sampling.stop_token_ids:
            break
        ids = torch.tensor([tokens[-1:]])
    return tokens
