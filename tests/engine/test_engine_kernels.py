"""The engine on the Triton kernels: a prompt pass and decode steps on a graph's buffers, beside the reference.

On a machine without a GPU the interpreter runs them, on few tokens.
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_ids, tiny_model

from kitty_runtime.config import preset
from kitty_runtime.engine.graphs import DecodeBuffers
from kitty_runtime.engine.request import Request, SamplingParams

LENGTHS = (3, 40, 223)
"""The last completes a page with its next token."""


@pytest.mark.parametrize("name", ["tuned", "16"])
def test_equals_the_reference(make_engine, monkeypatch, name):
    model, sampling = tiny_model(dtype=torch.float16, num_hidden_layers=1), SamplingParams(max_tokens=9, temperature=0)

    def logits_of_two_steps(backend):
        monkeypatch.setenv("KITTY_BACKEND", backend)
        engine = make_engine(model, preset(name), num_pages=4, num_slots=4, max_model_len=300)
        for i, n in enumerate(LENGTHS):
            engine.add(Request(str(i), tuple(random_ids(n, seed=i).tolist()), sampling))
        found = []
        with torch.inference_mode():
            plan = engine.scheduler.schedule()
            found.append(engine.runner.read_prompts(plan.prompts))
            for sequence, n in plan.prompts:
                sequence.num_stored = n
                sequence.ids.append(7)
            for _ in range(2):
                decodes = engine.scheduler.schedule().decodes
                engine.runner._update_table(decodes)
                rows = engine.runner._rows(decodes, 4)
                found.append(engine.runner._decode(DecodeBuffers(rows, None, 1))[: len(decodes)].clone())
                for sequence in decodes:
                    sequence.num_stored += 1
                    sequence.ids.append(9)
        assert engine.scheduler.pool.num_used == 1
        return torch.cat(found).float()

    expected, found = (logits_of_two_steps(backend) for backend in ("reference", "triton"))
    assert float(expected.abs().max()) > 1
    assert float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())
