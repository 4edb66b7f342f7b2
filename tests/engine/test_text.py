"""Streamed text equals the whole, never shows half a character, and ends before a stop string."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from kitty_runtime.engine.text import TextStream
from kitty_runtime.models.demo import demo_model_dir

TEXTS = [
    "Hello, world! Two  spaces and\n\nlines.",
    "Zażółć gęślą jaźń — naïve café, 東京都 and 🦊🐈‍⬛ 👩‍👩‍👧‍👦!",
    " leading space, trailing \t tabs\t",
    "हिन्दी 한국어 العربية ไทย",
]


class ByteTokenizer:
    """A token per byte, which splits every character that has more than one."""

    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.fixture(scope="module")
def demo_tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_dir())


def stream(tokenizer, ids, stop=(), context=()):
    text, pieces = TextStream(tokenizer, context, stop), []
    for token in ids:
        pieces.append(text.add(token))
        if text.stopped:
            break
    else:
        pieces.append(text.finish())
    return pieces, text.stopped


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_the_whole(text, demo_tokenizer):
    for tokenizer, ids in ((ByteTokenizer(), list(text.encode())), (demo_tokenizer, demo_tokenizer(text).input_ids)):
        pieces, stopped = stream(tokenizer, ids)
        assert "".join(pieces) == text
        assert not stopped
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_stops_before_a_stop_string(text):
    ids = list(text.encode())
    rng = random.Random(0)
    for _ in range(30):
        at = rng.randrange(1, len(text) - 1)
        stop = text[at : at + rng.randint(1, 6)]
        pieces, stopped = stream(ByteTokenizer(), ids, (stop, "not in it"))
        assert stopped
        assert "".join(pieces) == text[: text.index(stop)]


def test_what_might_have_been_a_stop_string_comes_later():
    pieces, stopped = stream(ByteTokenizer(), b"ab<|xy<|end", ("<|end|>",))
    assert pieces == ["a", "b", "", "", "<|x", "y", "", "", "", "", "", "<|end"]
    assert not stopped


def test_bytes_that_are_no_text():
    pieces, _ = stream(ByteTokenizer(), [0xFF] * 20 + [65])
    assert "".join(pieces).endswith("A")
    assert "\ufffd" in "".join(pieces)


def test_the_first_word_keeps_its_space(demo_tokenizer):
    ids = demo_tokenizer("The answer is here").input_ids
    pieces, _ = stream(demo_tokenizer, ids[1:], context=ids[:1])
    assert "".join(pieces) == " answer is here"
