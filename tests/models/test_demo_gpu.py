"""The demo model on a GPU in fp16 against the CPU in fp32: the same tokens through the same cache."""

from __future__ import annotations

import pytest
import torch

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import preset
from kitty_runtime.models.loading import load_model, load_tokenizer, resolve_model
from kitty_runtime.texts import held_out_text, tokenize

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROMPT, DECODED = 256, 512


@pytest.fixture(scope="module")
def tokens():
    text = held_out_text()
    return torch.as_tensor(tokenize(text, load_tokenizer(resolve_model("demo"))))[: PROMPT + DECODED].view(1, -1)


def log_probs(model, tokens, name):
    """After the prompt and after each decoded token, on the CPU."""
    cache = KittyCache(model.config, preset(name))
    tokens = tokens.to(model.device)
    with torch.inference_mode():
        logits = [model(tokens[:, :PROMPT], past_key_values=cache, use_cache=True).logits[:, -1]]
        logits += [
            model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True).logits[:, -1]
            for i in range(PROMPT, PROMPT + DECODED)
        ]
    return torch.cat(logits).float().log_softmax(-1).cpu()


@pytest.mark.parametrize("name", ["weighted", "kitty"])
def test_fp16_on_a_gpu_is_fp32_on_the_cpu_but_for_rounding(tokens, name):
    source = resolve_model("demo")
    cpu = load_model(source, dtype="float32", device="cpu", attn_implementation="kitty")
    gpu = load_model(source, dtype="float16", device="cuda", attn_implementation="kitty")
    expected, found = log_probs(cpu, tokens, name), log_probs(gpu, tokens, name)
    kl = (expected.exp() * (expected - found)).sum(-1).mean()
    assert kl <= 5e-3
