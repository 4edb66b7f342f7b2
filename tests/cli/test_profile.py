"""`kitty profile` on a tiny model: what it writes, that it repeats, and what it refuses before it starts."""

from __future__ import annotations

import json

import pytest
import torch

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import PRESETS
from kitty_runtime.profiles import load_profile
from kitty_runtime.texts import calibration_text

SMALL = ("--num-samples", "1", "--max-seq-length", "512", "--no-held-out")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "tiny.safetensors"


def test_document(call, model_dir, words, path):
    done = call("profile", model_dir, "--data", words, *SMALL, "-o", path, "--json")
    assert done.code == 0
    assert done.stderr.strip() == "tiny-llama: 1 x 512 tokens of words.txt, metric query"
    document = done.json()
    written = load_profile(path)
    assert list(document) == [
        "schema_version",
        "model",
        "path",
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "metric",
        "boost_ratio",
        "boost_levels",
        "layers",
        "held_out",
    ]
    assert document["schema_version"] == 1
    assert (document["model"], document["path"], document["metric"]) == ("tiny-llama", str(path), "query")
    assert (document["num_layers"], document["num_kv_heads"], document["head_dim"]) == (2, 2, 32)
    assert (document["boost_ratio"], document["boost_levels"]) == (0.125, [0, 0.0625, 0.125, 0.25, 0.5])
    assert document["held_out"] is None
    budgets = written.budgets(0.125)
    assert document["layers"] == [
        {"layer": i, "num_boosted": budgets[i], "kl": list(written.layers[i].kl)} for i in (0, 1)
    ]
    assert sum(budgets.values()) == 8


def test_provenance_repeats_the_file(call, model_dir, words, path):
    """The command that the profile names makes the same bytes; another seed does not."""
    rows = words.parent / "rows.jsonl"
    rows.write_text(json.dumps({"body": words.read_text()}) + "\n")
    arguments = ("--data", rows, "--data-column", "body", "--seed", "3", *SMALL)
    assert call("profile", model_dir, *arguments, "-o", path).code == 0
    provenance = load_profile(path).provenance
    assert (provenance.num_tokens, provenance.kl_tokens, provenance.seed) == (512, 1024, 3)
    assert (provenance.data, provenance.metric, provenance.model) == ("rows.jsonl", "query", "tiny-llama")
    kitty, *command = provenance.command.split()
    assert kitty == "kitty"
    before = path.read_bytes()
    assert call(*command, "--no-held-out", "-o", path).code == 0
    assert path.read_bytes() == before
    assert call("profile", model_dir, *arguments, "--seed", "4", "-o", path).code == 0
    assert path.read_bytes() != before


def test_tables_for_people(call, model_dir, home):
    """The default text, and the comparison on text that was held out."""
    done = call("profile", model_dir, "--num-samples", "1", "--max-seq-length", "512")
    assert done.code == 0
    assert "\x1b" not in done.stdout
    text = done.stdout
    assert "Each layer alone at 2 bits" in text
    path = home / "profiles" / "tiny-llama.safetensors"
    assert text.splitlines()[-1] == f"Wrote {path}"
    maps = [line for line in text.splitlines() if line.strip().startswith(("0 |", "1 |"))]
    assert [len(line.split("|")[1]) for line in maps] == [32, 32]
    rows = {line.split("  ")[1].strip(): line.split() for line in text.splitlines() if line.startswith("  ")}
    assert "2048 tokens of builtin:python-manual/b, against 16 bits" in text
    for name in ("16 bits", "kitty", "this profile"):
        assert name in rows, text
    kitty, profile = (float(rows[name][len(name.split())]) for name in ("kitty", "this profile"))
    assert kitty > 0
    assert profile > 0


def test_found_by_info_and_chat(call, model_dir, words, home):
    assert call("profile", model_dir, "--data", words, *SMALL).code == 0
    path = home / "profiles" / "tiny-llama.safetensors"
    assert f"profile: {path}\n" in call("info", model_dir).stdout
    assert call("info", model_dir, "--json").json()["bytes_by_part"]["1024"]["statistics"] == 0
    done = call("chat", model_dir, "the value", "--max-tokens", "2")
    assert (done.code, f"profile: {path}\n" in done.stderr) == (0, True)
    assert f"profile: {path}" not in call("chat", model_dir, "the", "--max-tokens", "2", "--preset", "kitty").stderr


@pytest.mark.parametrize("metric", ["query", "magnitude", "attention"])
def test_metrics(call, model_dir, words, path, metric):
    done = call("profile", model_dir, "--data", words, *SMALL, "--metric", metric, "-o", path, "--json")
    assert done.json()["metric"] == metric
    found = load_profile(path)
    assert found.provenance.metric == metric
    layer = found.layers[0]
    scale = {"query": (0.1, 100), "magnitude": (0.01, 10), "attention": (0, 1e-3)}[metric]
    assert scale[0] < float(layer.channel_scores.mean()) < scale[1]


def test_tokens_are_windows(call, model_dir, words, path):
    done = call("profile", model_dir, "--data", words, "--tokens", "1100", "--max-seq-length", "512", "-o", path)
    assert (done.code, load_profile(path).provenance.num_tokens) == (0, 1024)
    assert "2 x 512 tokens" in done.stderr


def test_skipped_layers_stay_native(call, model_dir, chat_model, words, home):
    assert call("profile", model_dir, "--data", words, *SMALL, "--skip-layers", "0").code == 0
    path = home / "profiles" / "tiny-llama.safetensors"
    assert list(load_profile(path).layers) == [1]
    document = call("info", model_dir, "--json").json()
    assert document["layers_quantized"] == [1]
    assert document["layers_kept"] == [{"layer": 0, "reason": "skipped by the profile"}]
    cache = KittyCache(chat_model.config, PRESETS["weighted"], load_profile(path))
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicLayer", "KittyLayer"]
    done = call("chat", model_dir, "the value", "--max-tokens", "3")
    assert (done.code, str(path) in done.stderr) == (0, True)


@pytest.fixture
def never_loads(monkeypatch):
    """Fails the test if weights are loaded."""
    from kitty_runtime.models import loading

    monkeypatch.setattr(loading, "load_model", lambda *args, **kwargs: pytest.fail("weights were loaded"))


@pytest.mark.usefixtures("never_loads")
@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--tokens", "512", "--num-samples", "1"], 2, "--tokens and --num-samples"),
        (["--skip-layers", "first"], 2, "--skip-layers is 'first'"),
        (["--skip-layers", "2"], 2, "no layer 2 to skip"),
        (["--skip-layers", "-1"], 2, "no layer -1 to skip"),
        (["--skip-layers", "0,1"], 2, "Every layer is skipped"),
        (["--boost", "1.01"], 2, "boost_ratio is 1.01"),
        (["--max-seq-length", "300"], 2, "Windows of 300 tokens are too short"),
        (["--data", "none.jsonl"], 1, "There is no file none.jsonl"),
        (["--data", "./none"], 1, "There is no file ./none"),
        (["--num-samples", "1000"], 1, "1002 x 1024 are needed"),
        (["--output", "/dev/null/below"], 1, "/dev/null/below cannot be written"),
        (["--output", ""], 1, "is a folder"),
        (["--output", "/tmp"], 1, "/tmp is a folder"),
        (["--output", "/dev/null"], 1, "/dev/null is no file"),
    ],
)
def test_refused_before_weights_load(refused, model_dir, flags, code, said):
    assert said in refused(code, "profile", model_dir, *flags)


@pytest.mark.usefixtures("never_loads")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no text"),
        (b"caf\xe9", "is not UTF-8 text (byte 3)"),
        (b"too short", "2 tokens, 3 x 512 are needed"),
    ],
)
def test_text_that_is_refused(refused, model_dir, tmp_path, content, said):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    assert said in refused(1, "profile", model_dir, "--data", file, *SMALL)


@pytest.mark.parametrize("flags", [["--metric", "mood"], ["--tokens", "0"], ["--num-samples", "-1"], ["--seed", "x"]])
def test_usage_errors(call, model_dir, flags):
    done = call("profile", model_dir, *flags)
    assert (done.code, done.stdout) == (2, "")
    assert flags[0] in done.stderr


@pytest.mark.usefixtures("never_loads")
def test_model_with_too_short_a_context(refused, short_model_dir):
    assert "Windows of 64 tokens are too short" in refused(2, "profile", short_model_dir)


def test_home_that_cannot_be_written(refused, model_dir, monkeypatch):
    monkeypatch.setenv("KITTY_HOME", "/dev/null/home")
    assert "cannot be written" in refused(1, "profile", model_dir)


def test_layer_without_sense_is_named(refused, tokenizer, tmp_path, words):
    from tiny_models import tiny_model

    model = tiny_model(vocab_size=len(tokenizer))
    torch.nn.init.zeros_(model.model.layers[1].self_attn.k_proj.weight)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "Layer 1: keys are all zero" in refused(1, "profile", tmp_path, "--data", words, *SMALL)


def test_default_text_is_the_builtin_one(call, model_dir, path):
    assert call("profile", model_dir, *SMALL, "-o", path).code == 0
    assert load_profile(path).provenance.data == calibration_text().name


def test_fewer_tokens_than_a_window_are_not_exceeded(call, model_dir, words, path):
    done = call("profile", model_dir, "--data", words, "--tokens", "400", "--no-held-out", "-o", path)
    assert done.code == 0, done.stderr
    assert load_profile(path).provenance.num_tokens == 400


def test_home_of_nobody(refused):
    assert "~nobody-of-that-name/model" in refused(1, "profile", "~nobody-of-that-name/model")
