"""The harness's model `kitty`: what it generates and scores is read from the cache's pages, in batches too."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import logits_in_chunks, tiny_model

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer
from transformers import PreTrainedTokenizerFast

from kitty_runtime.accuracy import packed_fraction
from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.emulation import teacher_forced_logits
from kitty_runtime.errors import ConfigError, ModelLoadError, ProfileError, UnsupportedOperationError
from kitty_runtime.lm_eval.model import KittyLM
from kitty_runtime.texts import calibration_text

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "docs" / "examples" / "lm_eval"
SPECIAL = ["<pad>", "<s>", "<end>", "<unk>"]
WORDS = calibration_text().content.split()
QUANTIZED = ("kivi-2-g128", "kitty", "tuned")


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("KITTY_HOME", str(tmp_path / "kitty-home"))
    for name in ("KITTY_MODEL", "KITTY_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny random model, whose answers never end by themselves, with a tokenizer of 400 words."""
    words = Tokenizer(WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.train_from_iterator(
        [calibration_text().content],
        WordLevelTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="<end>", unk_token="<unk>"
    )
    model = tiny_model(vocab_size=len(tokenizer))
    model.generation_config.suppress_tokens = list(range(len(SPECIAL)))
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def make(folder):
    """The model in float64: what differs there is not rounding."""

    def make(preset="kitty", **arguments) -> KittyLM:
        lm = KittyLM(folder, preset=preset, **arguments)
        lm.model.to(torch.float64)
        return lm

    return make


def text(num_words: int, start: int = 0) -> str:
    return " ".join(WORDS[start : start + num_words])


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def scored(lm: HFLM, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    return lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)


def rolled(lm: HFLM, *texts: str) -> list[float]:
    return lm.loglikelihood_rolling(requests("loglikelihood_rolling", *((each,) for each in texts)), disable_tqdm=True)


def generated(lm: HFLM, *prompts: str, **settings) -> list[str]:
    settings = {"until": [], "max_gen_toks": 12, **settings}
    return lm.generate_until(requests("generate_until", *((each, settings) for each in prompts)), disable_tqdm=True)


PAIR = text(240), " " + text(20, 240)
RAGGED = [(text(n, n), " " + text(m, 2 * n)) for n, m in ((40, 3), (170, 20), (110, 1), (260, 7))]


@pytest.mark.parametrize("preset", QUANTIZED)
def test_a_loglikelihood_is_that_of_token_by_token_decode(make, preset):
    lm = make(preset)
    context, both = lm.tok_encode(PAIR[0]), torch.tensor(lm.tok_encode("".join(PAIR)))
    assert len(context) > 300
    logits = logits_in_chunks(lm.model, both[:-1], KittyCache(lm.model.config, lm.cache_config), 1)
    log_probs = logits.log_softmax(-1).gather(1, both[1:, None])[len(context) - 1 :]
    ((found, _),) = scored(lm, PAIR)
    assert found == pytest.approx(float(log_probs.sum()), abs=1e-4)
    ((dense, _),) = scored(make("16"), PAIR)
    assert abs(found - dense) > 0.1


@pytest.mark.parametrize("preset", QUANTIZED)
def test_each_token_generated_is_the_likeliest_that_its_pages_give(make, preset):
    lm = make(preset)
    prompt = text(260)
    (answer,) = generated(lm, prompt)
    before, new = lm.tok_encode(prompt), lm.tok_encode(answer)
    assert len(before) > 300
    assert len(new) == 12
    logits = torch.cat(list(teacher_forced_logits(lm.model, torch.tensor(before + new), lm.cache_config)))
    logits[:, : len(SPECIAL)] = -torch.inf
    assert logits[len(before) - 1 : -1].argmax(-1).tolist() == new
    assert generated(make("16"), prompt) != [answer]


@pytest.mark.parametrize("preset", ["16", *QUANTIZED])
def test_batches_change_nothing(make, preset):
    one, four = make(preset), make(preset, batch_size=4)
    prompts = [context for context, _ in RAGGED]
    assert generated(one, *prompts) == generated(four, *prompts)
    for (alone, greedy), (batched, same) in zip(scored(one, *RAGGED), scored(four, *RAGGED), strict=True):
        assert batched == pytest.approx(alone, abs=1e-6)
        assert same == greedy
    assert rolled(four, *prompts) == pytest.approx(rolled(one, *prompts), abs=1e-6)


@pytest.mark.parametrize("prefill", ["paged", "full"])
def test_the_harness_finds_the_batch_size(make, prefill):
    lm = make("kitty", prefill=prefill, batch_size="auto", max_batch_size=2, max_length=250)
    one = make("kitty", prefill=prefill, max_length=250)
    prompts = [context for context, _ in RAGGED[:3]]
    assert generated(lm, *prompts) == generated(one, *prompts)


def test_at_16_bits_it_is_the_harness_own_model(make, folder):
    lm, plain = make("16", batch_size=2), HFLM(folder, device="cpu", dtype="float32", batch_size=2)
    plain.model.to(torch.float64)
    prompts = [context for context, _ in RAGGED]
    assert generated(lm, *prompts) == generated(plain, *prompts)
    for found, expected in zip(scored(lm, *RAGGED), scored(plain, *RAGGED), strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
    assert rolled(lm, *prompts) == pytest.approx(rolled(plain, *prompts), abs=1e-6)


def test_rolling_windows_and_contexts_that_are_too_long(make):
    """Windows of 300 tokens are texts of their own; of a longer context the beginning is dropped."""
    lm, dense = make("kitty", max_length=300, batch_size=4), make("16", max_length=300)
    long = text(500)
    assert len(lm.tok_encode(long)) > 2 * 300
    assert rolled(lm, long) == pytest.approx(rolled(make("kitty", max_length=300), long), abs=1e-6)
    assert abs(rolled(lm, long)[0] - rolled(dense, long)[0]) > 0.1
    ((cut, _),) = scored(lm, (long, " " + text(2, 500)))
    assert cut < 0


def test_sampling_settings_reach_the_model(make):
    """As in the paper. One seed gives one answer, another seed another."""
    lm, settings = make("kitty"), {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers += generated(lm, text(260), **settings)
    assert answers[0] == answers[1] != answers[2]
    assert answers[0] != generated(lm, text(260))[0]


def test_the_paper_s_prefill_is_for_generation_only(make):
    prompt = text(260)
    full = make("kitty", prefill="full")
    assert generated(full, prompt) != generated(make("kitty"), prompt)
    with pytest.raises(UnsupportedOperationError, match="nothing would be measured"):
        scored(full, PAIR)


def test_settings_as_the_commands_take_them(make):
    lm = make(None, bits=4)
    assert (lm.cache_config.k_bits, lm.cache_config.v_bits, lm.cache_config.policy) == (4, 4, "weighted")
    assert make("kitty", boost=0.25).cache_config.boost_ratio == 0.25
    assert not make(16).cache_config.quantizes  # the harness reads the preset 16 as a number


@pytest.mark.parametrize(
    ("kind", "match", "arguments"),
    [
        (ConfigError, "No preset is called 'best'", {"preset": "best"}),
        (ConfigError, "k_bits is 3", {"bits": 3}),
        (ConfigError, "boost_ratio is 'much'", {"boost": "much"}),
        (ConfigError, "prefill is 'half'", {"prefill": "half"}),
        (ConfigError, "There is no model argument 'presett'", {"presett": "tuned"}),
        (ConfigError, "There is no model argument 'quack'", {"quack": 1}),
        (ConfigError, "does not take parallelize", {"parallelize": True}),
        (ConfigError, "does not take peft", {"peft": "adapter"}),
        (ProfileError, "There is no profile at nowhere", {"profile": "nowhere"}),
        (ConfigError, "no device 'tpu0'", {"device": "tpu0"}),
        (ModelLoadError, "dtype is 'float8'", {"dtype": "float8"}),
        (ModelLoadError, "There is no model demoo", {"pretrained": "demoo"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refuses_with_the_next_step(folder, kind, match, arguments):
    with pytest.raises(kind, match=match) as error:
        KittyLM(**{"pretrained": folder, **arguments})
    assert error.value.hint
    assert "\n" not in str(error.value.message)


def test_a_typing_error_gets_a_proposal(folder):
    with pytest.raises(ConfigError) as error:
        KittyLM(folder, presett="tuned")
    assert error.value.hint == "Did you mean preset?"


def test_a_model_argument_goes_before_a_flag_that_nobody_gave(folder):
    flags = {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"}  # what the harness passes by itself
    lm = KittyLM.create_from_arg_obj({"pretrained": folder, "batch_size": 4, "device": "cpu"}, flags)
    assert lm.batch_size == 4
    with pytest.raises(ConfigError, match="batch_size is a flag and a model argument"):
        KittyLM.create_from_arg_obj({"pretrained": folder, "batch_size": 4}, {"batch_size": 2})


def test_results_say_how_much_was_read_packed(make, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    lm = make("kitty")
    scored(lm, PAIR)
    context, both = len(lm.tok_encode(PAIR[0])), len(lm.tok_encode("".join(PAIR)))
    expected = packed_fraction(lm.cache_config, [both - 1], context - 1)
    assert 0.5 < expected < 1
    info = lm.get_model_info()["kitty"]
    assert info["packed_fraction"] == pytest.approx(expected)
    assert info["profile_sha256"] is None
    assert info["policy"] == "dynamic"
    assert "packed" not in caplog.text
    generated(lm, PAIR[0])
    answer = packed_fraction(lm.cache_config, [context - 1 + 12], context - 1)
    assert lm.packed_fraction == pytest.approx((expected * (both - context) + answer * 12) / (both - context + 12))


def test_warns_if_nothing_was_long_enough(make, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    lm = make("kitty")
    scored(lm, ("a the", " of"))
    assert lm.get_model_info()["kitty"]["packed_fraction"] == 0
    assert "No query read a packed page" in caplog.text
    assert "at token 160" in caplog.text


# --- the tasks in docs/examples ------------------------------------------------------------------------------------


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> TaskManager:
    """The two tasks, in a folder where their data is."""
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, TASKS / "make_data.py"], check=True)
    return TaskManager(include_path=str(TASKS), include_defaults=False)


def evaluated(lm: KittyLM, tasks: TaskManager, *names: str, limit: int) -> dict:
    return simple_evaluate(lm, tasks=list(names), limit=limit, task_manager=tasks, bootstrap_iters=0)["results"]


def test_the_example_tasks_run(make, tasks):
    found = {}
    for preset in ("16", "kivi-2-g128"):
        lm = make(preset, batch_size=2)
        found[preset] = evaluated(lm, tasks, "manual_copy", "manual_perplexity", limit=2)
        assert (lm.packed_fraction > 0.5) == (preset != "16")
    dense, packed = (each["manual_perplexity"]["bits_per_byte,none"] for each in found.values())
    assert abs(dense - packed) > 1e-3
    assert "exact_match,first-words" in found["16"]["manual_copy"]


@pytest.mark.slow
def test_on_the_demo_model_figures_follow_the_cache(tasks):
    """Perplexity of two pages: about 1.5 times that of 16 bits with the plain 2-bit cache, and nearly its own tuned."""
    shipped = str(ROOT / "profiles" / "SmolLM2-135M-Instruct.safetensors")
    presets = {"16": None, "kivi-2-g128": None, "tuned": shipped}
    models = {preset: KittyLM("demo", preset=preset, profile=profile) for preset, profile in presets.items()}
    found = {
        preset: evaluated(lm, tasks, "manual_perplexity", limit=2)["manual_perplexity"]["bits_per_byte,none"]
        for preset, lm in models.items()
    }
    assert found["16"] < found["tuned"] < 1.03 * found["16"]
    assert found["kivi-2-g128"] > 1.1 * found["16"]


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kitty_runtime.lm_eval", "run", "--model", "kitty", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_DATASETS_OFFLINE": "1"},
        cwd=folder,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_the_command(folder, tasks, tmp_path):
    which = ("--include_path", str(TASKS), "--tasks", "manual_perplexity", "--limit", "1")
    done = command(
        tmp_path, "--model_args", f"pretrained={folder},preset=16,batch_size=2", *which, "--output_path", "out"
    )
    assert done.returncode == 0, done.stderr
    assert "manual_perplexity" in done.stdout
    (report,) = (tmp_path / "out").rglob("results_*.json")
    cache = json.loads(report.read_text())["config"]["kitty"]
    assert (cache["k_bits"], cache["packed_fraction"]) == (16, 0)
    wrong = command(tmp_path, "--model_args", f"pretrained={folder},preset=best", *which)
    assert wrong.returncode == 2
    assert "Error: No preset is called 'best'.\nUse one of " in wrong.stderr
    assert "Traceback" not in wrong.stderr
