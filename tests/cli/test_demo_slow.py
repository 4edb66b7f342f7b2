"""What is promised of the demo model: the profile's gain, and how soon the first token comes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
from conftest import ROOT

from kitty_runtime.accuracy import Method, measure_divergence
from kitty_runtime.config import DEFAULT_PRESET, preset
from kitty_runtime.home import kitty_home
from kitty_runtime.memory import sequence_bytes
from kitty_runtime.models.demo import DEMO_NAME, demo_model_dir
from kitty_runtime.models.geometry import layers_of
from kitty_runtime.profile_store import shipped_profiles_dir
from kitty_runtime.profiles import BoostProfile, load_profile
from kitty_runtime.texts import held_out_text, source_text, tokenize, windows_of

pytestmark = pytest.mark.slow
NUM_TOKENS = 2048


@pytest.fixture(autouse=True)
def home():
    """kitty's folder stays what it is: the demo model is converted there once."""
    return kitty_home()


@pytest.fixture(scope="module")
def demo():
    """Model and tokenizer."""
    from kitty_runtime.models.loading import load_model, load_tokenizer, resolve_model

    source = resolve_model(None)
    return load_model(source, dtype="float32", attn_implementation="kitty"), load_tokenizer(source)


@dataclass(frozen=True)
class Uniform(BoostProfile):
    """The profile's energies with the same budget in every layer, as the paper has it."""

    def budgets(self, boost_ratio: float) -> dict[int, int]:
        return {index: int(boost_ratio * layer.query_energy.shape[1]) for index, layer in self.layers.items()}


@pytest.mark.parametrize(("text", "uniform_limit", "num_windows"), [(held_out_text, 0.70, 3), (source_text, 0.80, 1)])
def test_profile_halves_the_divergence(demo, text, uniform_limit, num_windows):
    """At 12.5 % and the bytes of `kitty`: its windows with the profile's energies alone, then with layer budgets; and
    the default preset, whose windows hold as many vectors, with layer budgets."""
    model, tokenizer = demo
    profile = load_profile(shipped_profiles_dir() / f"{DEMO_NAME}.safetensors")
    kitty, weighted, default = preset("kitty"), replace(preset("kitty"), policy="weighted"), preset(DEFAULT_PRESET)
    methods = {
        "kitty": Method(kitty),
        "uniform": Method(weighted, Uniform(profile.layers, profile.boost_levels, profile.provenance)),
        "budgets": Method(weighted, profile),
        "default": Method(default, profile),
    }
    layers = layers_of(model.config)
    sizes = {name: sequence_bytes(layers, m.config, 160 + 128 * 20, m.profile).total for name, m in methods.items()}
    assert sizes["uniform"] == sizes["kitty"]
    assert sizes["budgets"] <= sizes["kitty"]
    assert sizes["default"] <= sizes["kitty"]
    windows = windows_of(text(), tokenize(text(), tokenizer), num_windows, NUM_TOKENS)
    first = {name: divergence.kl for name, divergence in measure_divergence(model, windows[:1], methods).items()}
    assert first["kitty"] > 0.01
    assert first["uniform"] <= uniform_limit * first["kitty"], first
    assert first["default"] <= 0.50 * first["kitty"], first
    # On the manual the closest of the promises: on more text, since single windows scatter by a few percent.
    kl = {name: first[name] for name in ("kitty", "budgets")}
    if num_windows > 1:
        rest = measure_divergence(model, windows[1:], {name: methods[name] for name in kl})
        kl = {name: (first[name] + (num_windows - 1) * rest[name].kl) / num_windows for name in kl}
    assert kl["budgets"] <= 0.50 * kl["kitty"], kl


BARE = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
messages = [{"role": "user", "content": "hi"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = model.generate(**inputs, max_new_tokens=1, do_sample=False)
print(tokenizer.decode(out[0, inputs["input_ids"].shape[1]:]), flush=True)
"""


def cpu_seconds_to_first_byte(*command: str) -> float:
    """User and system time that a process has spent when its first output arrives."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    with open(f"/proc/{process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    process.communicate()
    assert first
    assert process.returncode == 0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_first_token_comes_nearly_as_soon_as_without_kitty():
    """Import, load, prefill, one token; least of two alternating runs."""
    folder = str(demo_model_dir())
    bare, kitty = [], []
    for _ in range(2):
        bare.append(cpu_seconds_to_first_byte("-c", BARE, folder))
        chat = ("-m", "kitty_cli.main", "chat", "demo", "hi", "--temperature", "0", "--max-tokens", "1")
        kitty.append(cpu_seconds_to_first_byte(*chat))
    assert min(kitty) <= 1.5 * min(bare), f"bare {bare} s, kitty {kitty} s"
