"""A tiny model in a folder of its own, and the command: as a real process, or in this one where that is slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from kitty_cli.main import app
from kitty_runtime.texts import calibration_text

ROOT = Path(__file__).parents[2]
SPECIAL = ["<pad>", "<s>", "<end>", "<unk>", "<system>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Result:
    """What a command wrote and how it ended; `json` reads stdout, strictly."""

    stdout: str
    stderr: str
    code: int

    def json(self) -> dict[str, Any]:
        return json.loads(self.stdout, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """kitty's own folder, new for every test."""
    path = tmp_path / "kitty-home"
    monkeypatch.setenv("KITTY_HOME", str(path))
    for name in ("KITTY_MODEL", "KITTY_DEBUG", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return path


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words of the built-in text, one id each: what is decoded is encoded to the same ids again."""
    words = Tokenizer(WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    trainer = WordLevelTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    words.train_from_iterator([calibration_text().content], trainer)
    found = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="<end>", unk_token="<unk>"
    )
    found.chat_template = TEMPLATE
    return found


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, **changes: Any) -> Path:
    """A random model whose answers hold no special token but the end of an answer."""
    model = tiny_model(vocab_size=len(tokenizer), **changes)
    model.generation_config.suppress_tokens = [i for i in range(len(SPECIAL)) if i != 2]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, tokenizer) -> Path:
    """Two layers, two KV heads of 32 channels, 2048 positions."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny-llama", tokenizer)


@pytest.fixture(scope="session")
def short_model_dir(tmp_path_factory, tokenizer) -> Path:
    """Knows 64 positions."""
    return save_model(tmp_path_factory.mktemp("models") / "short", tokenizer, max_position_embeddings=64)


@pytest.fixture(scope="session")
def words(tmp_path_factory) -> Path:
    """A text file of about 4000 tokens of the tiny model."""
    path = tmp_path_factory.mktemp("texts") / "words.txt"
    path.write_text(calibration_text().content[:16000])
    return path


@pytest.fixture(scope="session")
def run() -> Command:
    """The real command in a process of its own."""

    def run(*args: object, stdin: str = "", **environment: str) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "kitty_cli.main", *map(str, args)],
            input=stdin,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            cwd=ROOT,
            check=False,
            timeout=120,
        )
        return Result(done.stdout, done.stderr, done.returncode)

    return run


@pytest.fixture(scope="session")
def call() -> Command:
    """The command in this process. An exception that would be a traceback is raised."""

    def call(*args: object, stdin: str | bytes = "") -> Result:
        done = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Result(done.stdout, done.stderr, done.exit_code)

    return call


@pytest.fixture(scope="session")
def refused(call) -> Callable[..., str]:
    """stderr of a command that must fail: nothing on stdout, one error line, then at most one line of advice."""

    def refused(code: int, *args: object, stdin: str | bytes = "") -> str:
        done = call(*args, stdin=stdin)
        assert done.code == code, done.stderr
        assert done.stdout == ""
        start = done.stderr.index("Error:")
        assert len(done.stderr[start:].strip().splitlines()) <= 2, done.stderr
        return done.stderr

    return refused


@pytest.fixture(scope="session")
def chat_model(model_dir) -> PreTrainedModel:
    """The tiny model in float64, where the answers of two ways to fill a cache are equal."""
    import torch

    from kitty_runtime.models.loading import load_model, resolve_model

    return load_model(resolve_model(str(model_dir)), attn_implementation="kitty").to(torch.float64)
