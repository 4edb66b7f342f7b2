"""From a name to a model; every failure is one error that names the value and the next step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import errors as hub
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kitty_runtime.errors import ConfigError, ModelLoadError, UnsupportedModelError
from kitty_runtime.models import demo, loading, preflight
from kitty_runtime.models.loading import (
    ModelSource,
    cache_kwarg,
    load_config,
    load_model,
    load_tokenizer,
    resolve_model,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _no_preference(monkeypatch):
    monkeypatch.delenv("KITTY_MODEL", raising=False)


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama with a tokenizer."""
    path = tmp_path / "tiny-llama"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path)
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(path)
    return path


def refusal(call, *arguments, kind=ModelLoadError, **options) -> str:
    """The error's text, after checking its form: one line, then one line with the next step."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.hint
    return str(caught.value)


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


# Names


@pytest.mark.parametrize("name", [None, "demo"])
def test_the_demo_is_the_default(name, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "demo_model_dir", lambda progress: tmp_path)
    assert resolve_model(name) == ModelSource("SmolLM2-135M-Instruct", str(tmp_path))


@pytest.mark.parametrize("name", [None, "demo"])
def test_kitty_model_replaces_the_demo_only(name, folder, monkeypatch):
    monkeypatch.setenv("KITTY_MODEL", str(folder))
    assert resolve_model(name).path == str(folder)
    assert resolve_model("owner/name").path == "owner/name"
    monkeypatch.setenv("KITTY_MODEL", "/no/such")
    assert refusal(resolve_model, name).startswith("KITTY_MODEL: There is no /no/such.")


def test_folder_gguf_file_and_hub_id(folder, tmp_path, monkeypatch):
    assert resolve_model(str(folder)) == ModelSource("tiny-llama", str(folder))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny-llama") == ModelSource("tiny-llama", "tiny-llama")
    (tmp_path / "x.Q4.gguf").write_bytes(b"GGUF")
    assert resolve_model("./x.Q4.gguf") == ModelSource("x.Q4", ".", gguf_file="x.Q4.gguf")
    assert resolve_model("gpt2") == ModelSource("gpt2", "gpt2")
    assert resolve_model("owner/name@v1") == ModelSource("owner/name@v1", "owner/name", revision="v1")


@pytest.mark.parametrize("name", ["./nope", "/nope/x", "~/nope-kitty", "../nope", "nope.gguf", "a/b/c"])
def test_a_mistyped_path_is_not_taken_for_a_hub_id(name):
    assert f"There is no {name}." in refusal(resolve_model, name)


def test_a_folder_that_is_no_model(tmp_path):
    assert "has no config.json, so it is not a model" in refusal(resolve_model, str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"")
    assert f"Name its GGUF file: {tmp_path / 'm.gguf'}" in refusal(resolve_model, str(tmp_path))


def test_a_file_that_is_no_gguf(folder):
    assert "no GGUF file" in refusal(resolve_model, str(folder / "model.safetensors"))


# The hub, simulated at the one call that fetches a file


def http_error(kind: type[Exception]) -> Exception:
    return kind("refused", response=SimpleNamespace(headers={}, request=None))


HUB_ERRORS = [
    (lambda: http_error(hub.GatedRepoError), "owner/name is gated", "hf auth login"),
    (lambda: http_error(hub.RepositoryNotFoundError), "no model on the hub", "spelling"),
    (lambda: http_error(hub.RevisionNotFoundError), "no revision 'v1'", "@"),
    (lambda: http_error(hub.HfHubHTTPError), "The hub refused owner/name", "again later"),
    (lambda: hub.LocalEntryNotFoundError("offline"), "Cannot reach the hub", "needs no network"),
]


@pytest.mark.parametrize(("error", "message", "hint"), HUB_ERRORS)
@pytest.mark.parametrize("load", [load_config, load_tokenizer])
def test_hub_errors(load, error, message, hint, monkeypatch):
    def fail(*_, **__):
        raise error()

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", fail)
    monkeypatch.setattr("transformers.utils.hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    text = refusal(load, ModelSource("owner/name", "owner/name", revision="v1"))
    assert message in text
    assert hint in text


def test_offline_by_choice_says_so(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = refusal(load_config, ModelSource("owner/never-downloaded", "owner/never-downloaded"))
    assert "HF_HUB_OFFLINE is set" in text


def test_a_name_that_cannot_be_a_hub_id():
    assert "cannot be a hub id" in refusal(load_config, resolve_model("two words"))


def test_a_repository_without_config(monkeypatch):
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", lambda *_, **__: ({}, {}))
    assert "has no config.json" in refusal(load_config, ModelSource("o/n", "o/n"))


# Configs


@pytest.mark.parametrize("content", [b"{bad", b"\xff\xfe\x00", b"[1]", b"", b"null"])
def test_a_damaged_config(folder, content):
    (folder / "config.json").write_bytes(content)
    assert "tiny-llama" in refusal(load_config, resolve_model(str(folder)))


def test_a_config_with_a_wrong_value(folder):
    edit_config(folder, hidden_size="wide")
    assert "hidden_size" in refusal(load_config, resolve_model(str(folder)))


def test_a_config_without_a_type(folder):
    (folder / "config.json").write_text('{"hidden_size": 64}')
    assert "no model_type" in refusal(load_config, resolve_model(str(folder)))


def test_an_unknown_architecture(folder):
    edit_config(folder, model_type="holographic")
    text = refusal(load_config, resolve_model(str(folder)), kind=UnsupportedModelError)
    assert "'holographic'" in text
    assert "pip install -U transformers" in text


CONFIG_CODE = "from transformers import LlamaConfig\nclass C(LlamaConfig):\n    model_type = 'homemade'\n"
MODEL_CODE = (
    "from transformers import LlamaForCausalLM\nfrom .config_code import C\n"
    "class M(LlamaForCausalLM):\n    config_class = C\n"
)


def test_code_from_the_repository_runs_only_when_trusted(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "config_code.py").write_text(CONFIG_CODE)
    (folder / "model_code.py").write_text(MODEL_CODE)
    auto_map = {"AutoConfig": "config_code.C", "AutoModelForCausalLM": "model_code.M"}
    edit_config(folder, model_type="homemade", auto_map=auto_map)
    source = resolve_model(str(folder))
    text = refusal(load_model, source, device="cpu")
    assert "runs Python code from its repository" in text
    assert "--trust-remote-code" in text
    model = load_model(source, device="cpu", trust_remote_code=True)
    assert type(model).__name__ == "M"


# Tokenizers


def test_a_tokenizer(folder):
    assert load_tokenizer(resolve_model(str(folder)))("b a")["input_ids"] == [1, 0]


def test_a_missing_tokenizer(folder):
    for file in folder.glob("token*"):
        file.unlink()
    text = refusal(load_tokenizer, resolve_model(str(folder)))
    assert "The tokenizer of tiny-llama cannot be read" in text
    assert "tokenizer.json" in text


# Weights


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16"])
def test_a_model_loads_in_eval_mode_and_without_output(folder, dtype, capfd):
    model = load_model(resolve_model(str(folder)), device="cpu", dtype=dtype, attn_implementation="eager")
    assert not model.training
    assert model.dtype == getattr(torch, "float32" if dtype == "auto" else dtype)
    assert model.config._attn_implementation == "eager"
    assert capfd.readouterr() == ("", "")


def test_cache_kwarg_names_a_parameter_of_forward(folder):
    model = load_model(resolve_model(str(folder)), device="cpu")
    assert cache_kwarg(model) in ("cache", "past_key_values")
    assert model(torch.tensor([[1]]), **{cache_kwarg(model): None}).logits.shape == (1, 1, 64)
    assert cache_kwarg(SimpleNamespace(forward=lambda cache: cache)) == "cache"
    assert cache_kwarg(SimpleNamespace(forward=lambda past_key_values: 0)) == "past_key_values"


@pytest.fixture
def unloadable(monkeypatch):
    """Fails the test if transformers gets as far as the weights."""
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("weights were loaded")
    )


@pytest.mark.usefixtures("unloadable")
class TestBeforeWeightsLoad:
    def test_unsupported(self, folder):
        edit_config(folder, head_dim=24)
        text = refusal(load_model, resolve_model(str(folder)), device="cpu", kind=UnsupportedModelError)
        assert "head_dim 24" in text

    def test_no_weights(self, folder):
        (folder / "model.safetensors").unlink()
        assert "has no weights" in refusal(load_model, resolve_model(str(folder)), device="cpu")

    def test_a_missing_shard(self, folder):
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder, max_shard_size="30KB")
        (folder / "model.safetensors").unlink(missing_ok=True)
        shards = sorted(folder.glob("model-*.safetensors"))
        shards[1].unlink()
        text = refusal(load_model, resolve_model(str(folder)), device="cpu")
        assert f"lacks 1 of its {len(shards)} weight files, such as {shards[1].name}" in text

    @pytest.mark.parametrize("index", ["{bad", "[]", "{}", '{"weight_map": 3}'])
    def test_a_damaged_index(self, folder, index):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(index)
        assert "index.json" in refusal(load_model, resolve_model(str(folder)), device="cpu")

    def test_a_truncated_file(self, folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        text = refusal(load_model, resolve_model(str(folder)), device="cpu")
        assert "model.safetensors of tiny-llama is damaged" in text

    def test_a_git_lfs_pointer(self, folder):
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
        assert "git lfs pull" in refusal(load_model, resolve_model(str(folder)), device="cpu")

    def test_too_large(self, folder, monkeypatch):
        monkeypatch.setattr(preflight, "free_bytes", lambda device: 1000)
        text = refusal(load_model, resolve_model(str(folder)), device="cpu")
        assert "tiny-llama needs 0.0 GB for its weights in float32, but cpu has 0.0 GB" in text
        assert "smaller model" in text

    def test_no_such_dtype(self, folder):
        text = refusal(load_model, resolve_model(str(folder)), device="cpu", dtype="int8")
        assert "dtype is 'int8'" in text

    @pytest.mark.parametrize("device", ["gpu0", "meta"])
    def test_no_such_device(self, folder, device):
        assert repr(device) in refusal(load_model, resolve_model(str(folder)), device=device, kind=ConfigError)

    def test_no_cuda(self, folder, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        text = refusal(load_model, resolve_model(str(folder)), device="cuda")
        assert "cuda was asked for" in text
        assert "--device cpu" in text

    def test_no_such_cuda_index(self, folder, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert "the last device is cuda:1" in refusal(load_model, resolve_model(str(folder)), device="cuda:2")

    @pytest.mark.parametrize("content", [b"nonsense", b"GGUFxx", b"GGUF" + bytes(60)])
    def test_a_damaged_gguf_file(self, tmp_path, content):
        (tmp_path / "m.gguf").write_bytes(content)
        text = refusal(load_model, resolve_model(str(tmp_path / "m.gguf")), device="cpu")
        assert "The config of m cannot be read" in text


def test_weights_are_weighed_in_gigabytes():
    cpu = torch.device("cpu")
    text = refusal(preflight.check_memory, "big", 10**18, "float32", cpu)
    assert "big needs 1000000000.0 GB for its weights in float32" in text
    preflight.check_memory("small", 1, "float32", cpu)


@pytest.mark.parametrize(
    ("device", "checkpoint", "expected"),
    [
        ("cpu", "bfloat16", "float32"),
        ("cuda", "float16", "float16"),
        ("cuda", "bfloat16", "bfloat16"),
        ("cuda", "float32", "bfloat16"),
    ],
)
def test_dtype_auto(device, checkpoint, expected):
    assert preflight.pick_dtype("auto", torch.device(device), checkpoint) == expected


def test_a_checkpoint_that_lacks_tensors_is_not_filled_with_random_numbers(folder):
    edit_config(folder, num_hidden_layers=3)
    text = refusal(load_model, resolve_model(str(folder)), device="cpu")
    assert "lack 9 tensors, such as model.layers.2." in text


@pytest.mark.slow
def test_a_gguf_file_loads_dequantized(capfd):
    source = resolve_model(str(demo._packaged_gguf()))
    model = load_model(source, device="cpu")
    assert source.name == "SmolLM2-135M-Instruct.Q4_1"
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert load_tokenizer(source)("hi")["input_ids"]
    assert capfd.readouterr() == ("", "")


def test_a_checkpoint_of_other_shapes(folder):
    edit_config(folder, vocab_size=65)
    text = refusal(load_model, resolve_model(str(folder)), device="cpu")
    assert "have other shapes than its config says for 2 tensors, such as lm_head.weight" in text


@pytest.mark.parametrize("name", ["dmeo", "Demo", "demos"])
def test_a_mistyped_demo_is_answered_at_once(name):
    assert "Did you mean demo?" in refusal(resolve_model, name)


def test_the_reason_of_an_error_is_kept():
    """Some libraries announce it with a colon and a line end."""
    found = loading._first_line(ValueError("Class validation error for 'heads':\n\n    9 heads for 64 channels.\nmore"))
    assert found == "Class validation error for 'heads': 9 heads for 64 channels."
    assert loading._first_line(ValueError("one of:")) == "one of:"
    assert loading._first_line(KeyError()) == "KeyError"
