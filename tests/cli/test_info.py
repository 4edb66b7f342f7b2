"""`kitty info`: bytes from the config alone, for people and for machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_config

from kitty_runtime.config import PRESETS
from kitty_runtime.profile_store import shipped_profiles_dir

SHIPPED = shipped_profiles_dir() / "SmolLM2-135M-Instruct.safetensors"


@pytest.fixture(scope="module")
def sliding_dir(tmp_path_factory):
    """Gemma 2, one layer of two with a window of 48 tokens; its config alone."""
    folder = tmp_path_factory.mktemp("models") / "sliding"
    tiny_config("gemma2").save_pretrained(folder)
    return folder


def expected_bytes(num_tokens: int, num_boosted: int, statistics: bool) -> int:
    """Two layers, two KV heads of 32 channels; sinks of 32 tokens, rings of 64 + 128; 16-bit elements.

    A head's page: 2-bit keys and values, boosted keys' second plane, scales and zeros of 32 channels and 128
    tokens, channel ids in a 16-byte row.
    """
    head = 32 * 32 + 32 * num_boosted + 32 * 32 + 2 * 32 * 2 + 2 * 128 * 2 + (16 if num_boosted else 0)
    pages = (num_tokens - 32 - 64) // 128
    per_layer = pages * 2 * head + (32 + 64 + 128) * 2 * 2 * 32 * 2 + (2 * 32 * 4 if statistics else 0)
    return 2 * per_layer


@pytest.mark.parametrize(("boost", "num_boosted"), [("0", 0), ("0.125", 4), ("0.5", 16)])
def test_bytes_are_the_formulas(call, model_dir, boost, num_boosted):
    document = call("info", model_dir, "--boost", boost, "--json").json()
    assert document["schema_version"] == 1
    assert (document["layers_quantized"], document["layers_kept"], document["memory"]) == ([0, 1], [], None)
    assert list(document["ratio"]) == list(document["bytes_per_token"]) == ["1024", "8192", "32768", "131072"]
    for n in (1024, 8192, 32768, 131072):
        total = expected_bytes(n, num_boosted, num_boosted > 0)
        assert document["bytes_per_token"][str(n)] == round(total / n, 3)
        assert document["ratio"][str(n)] == round(n * 2 * 2 * 2 * 32 * 2 / total, 4)
        parts = document["bytes_by_part"][str(n)]
        assert sum(parts[name] for name in ("pages", "sinks", "rings", "statistics", "kept_layers")) == total


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(call, model_dir, preset):
    document = call("info", model_dir, "--preset", preset, "--json").json()
    assert document["config"]["k_bits"] == PRESETS[preset].k_bits
    assert (document["ratio"]["131072"] > 1.5) == (preset != "16")
    assert document["ratio"]["131072"] <= 8


def test_table_for_people(call, model_dir):
    done = call("info", model_dir)
    assert (done.code, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny-llama: llama, ")
    assert lines[1] == "layers: 2 of 2 paged; 4 query heads, 2 KV heads of 32"
    assert f"profile: none; make one with: kitty profile {model_dir}" in lines
    row = next(line.split() for line in lines if line.strip().startswith("8K"))
    total = expected_bytes(8192, 4, True)
    assert row[-4:] == [f"{total / 8192:,.0f}", "4.0", "MiB", f"{8192 * 512 / total:.2f}x"]
    assert "The model was made for contexts up to 2048 tokens." in lines


def test_sliding_layers_are_kept_and_say_why(call, sliding_dir):
    document = call("info", sliding_dir, "--json").json()
    assert document["layers_quantized"] == [1]
    assert document["layers_kept"] == [{"layer": 0, "reason": "sliding window of 48 tokens"}]
    assert document["bytes_by_part"]["8192"]["kept_layers"] == 2 * 48 * 2 * 32 * 2
    text = call("info", sliding_dir).stdout
    assert "kept as they are (sliding window of 48 tokens): layers 0\n" in text
    assert "layers: 1 of 2 paged" in text
    assert "kept layers" in text


def test_memory_line(call, model_dir):
    text = call("info", model_dir, "--memory", "80GB").stdout
    plan = call("info", model_dir, "--memory", "80GB", "--json").json()["memory"]
    expected = f"KV cache: {plan['num_tokens']:,} tokens, {plan['largest_batch']} sequences of 2048 at once"
    assert expected in text
    assert plan["kv_bytes"] == 80 * 10**9 - 4 * 10**9 - plan["weights_bytes"]
    assert plan["largest_batch"] == plan["kv_bytes"] // expected_bytes(2048, 4, True)
    assert plan["dense_batch"] == plan["kv_bytes"] // (2048 * 512)
    assert plan["longest_context"] == 2048
    assert plan["largest_batch"] > plan["dense_batch"]


def test_too_little_memory_says_what_to_change(call, model_dir):
    text = call("info", model_dir, "--memory", "500MB").stdout
    assert "It does not fit: weights and runtime alone take 1.0 GiB. Use more memory or a smaller model." in text
    plan = call("info", model_dir, "--memory", "500MB", "--json").json()["memory"]
    assert (plan["kv_bytes"], plan["num_tokens"], plan["longest_context"], plan["largest_batch"]) == (0, 0, 0, 0)


@pytest.mark.parametrize("size", ["", "lots", "-3GB", "0", "nan", "inf", "80GX", "1e30GB"])
def test_sizes_that_are_none(refused, model_dir, size):
    assert f"{size!r} is not a size of memory" in refused(2, "info", model_dir, "--memory", size)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--bits", "3"], "3"),
        (["--k-bits", "16", "--v-bits", "2"], "16 bits means keys and values both"),
        (["--bits", "4", "--boost", "0.1"], "boost"),
        (["--boost", "1.5"], "1.5"),
        (["--boost", "nan"], "nan"),
        (["--preset", "kitten"], "'kitten'"),
    ],
)
def test_settings_that_contradict(refused, model_dir, flags, said):
    assert said in refused(2, "info", model_dir, *flags)


@pytest.mark.parametrize("name", ["./nothing", "nothing.gguf", "no/such/model"])
def test_models_that_are_none(refused, name):
    assert name in refused(1, "info", name)


@pytest.mark.parametrize(("name", "said"), [("x" * 5000, "(5000 characters) is no model"), (" ", "MODEL is empty")])
def test_arguments_that_can_be_no_model(refused, name, said):
    assert said in refused(1, "info", name)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"model_type": "llava"}', "llava has no text-generation model"),
        ('{"model_type": "llama", "hidden_size": -64, "num_attention_heads": 0}', "cannot be read"),
    ],
)
def test_configs_that_no_decoder_has(refused, tmp_path, config, said):
    (tmp_path / "config.json").write_text(config)
    assert said in refused(1, "info", tmp_path)


def test_colons_in_what_was_typed_are_no_emoji(refused, model_dir):
    assert "'nope:b:c'" in refused(2, "info", model_dir, "--preset", "nope:b:c")


def test_architecture_without_full_attention(refused, tmp_path):
    config = tiny_config("gemma2", layer_types=["sliding_attention", "sliding_attention"])
    config.save_pretrained(tmp_path)
    assert "no full-attention layer" in refused(1, "info", tmp_path)


def test_a_profile_and_where_it_comes_from(call):
    document = call("info", SHIPPED, "--json").json()
    assert document["schema_version"] == 1
    assert document["provenance"]["model"] == "SmolLM2-135M-Instruct"
    assert document["boost_levels"] == [0.0, 0.0625, 0.125, 0.25, 0.5]
    assert len(document["layers"]) == 30
    assert sum(layer["num_boosted"] for layer in document["layers"]) <= 30 * 8
    done = call("info", SHIPPED)
    lines = done.stdout.splitlines()
    for name in document["provenance"]:
        assert any(line.startswith(f"{name}: ") or line == f"{name}: " for line in lines), name
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("flag", [("--memory", "8GB"), ("--bits", "4"), ("--preset", "kitty")])
def test_flags_that_say_nothing_about_a_profile(refused, flag):
    assert f"{flag[0]} is about a model" in refused(2, "info", SHIPPED, *flag)


def test_a_report_whose_name_is_too_long(refused, tmp_path):
    assert "cannot be written: File name too long" in refused(
        2, "info", SHIPPED, "--report", tmp_path / f"{'x' * 300}.html"
    )


def test_a_file_that_is_no_profile(refused, tmp_path, model_dir):
    assert "There is no profile" in refused(1, "info", tmp_path / "none.safetensors")
    assert "not a boost profile" in refused(1, "info", model_dir / "model.safetensors")


def test_no_weights_are_read(call, sliding_dir):
    assert not list(sliding_dir.glob("*.safetensors"))
    assert call("info", sliding_dir).code == 0


def test_names_with_brackets_stay(call, tmp_path, model_dir):
    folder = tmp_path / "odd [red] name"
    folder.mkdir()
    (folder / "config.json").write_text((model_dir / "config.json").read_text())
    assert call("info", folder).stdout.startswith("odd [red] name: llama")
    assert call("info", folder, "--json").json()["model"] == "odd [red] name"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("flags", [(), ("--json",), ("--help",)])
def test_a_full_disk_is_one_line(model_dir, flags):
    command = [sys.executable, "-m", "kitty_cli.main", "info", str(model_dir), *flags]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "no space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(("closed", "code", "said"), [(1, 1, "Error: There is no output"), (2, 0, "")])
def test_closed_streams(model_dir, closed, code, said):
    command = [sys.executable, "-m", "kitty_cli.main", "info", str(model_dir)]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}>&-', "sh", *command], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr.startswith(said)) == (code, True)
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == (code == 0)


def test_a_pipe_gets_plain_json(run):
    done = run("info", SHIPPED, "--json", COLUMNS="20", FORCE_COLOR="1")
    assert (done.code, done.stderr) == (0, "")
    assert json.dumps(done.json(), indent=2) + "\n" == done.stdout


def test_float_type_of_the_checkpoint_changes_no_bytes(call, tmp_path):
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        config = tiny_config(dtype=dtype)
        config.save_pretrained(tmp_path)
        found.append(call("info", tmp_path, "--json").json()["bytes_per_token"])
    assert found[0] == found[1]


def test_memory_without_a_unit(refused, model_dir):
    assert "--memory 80 is 80 bytes" in refused(2, "info", model_dir, "--memory", "80")
