"""Calibration and held-out text: what is read, what is refused, and windows that repeat."""

from __future__ import annotations

import hashlib

import pytest
import torch

from kitty_runtime.errors import DataError
from kitty_runtime.texts import (
    Text,
    calibration_text,
    held_out_text,
    load_check_text,
    load_text,
    source_text,
    token_sha256,
    tokenize,
    windows_of,
)


@pytest.fixture(autouse=True)
def _datasets_cache(tmp_path, monkeypatch):
    """`datasets` reads its folder on import, or from its config afterwards."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_check_reads_what_no_profile_is_measured_on(tmp_path):
    assert load_check_text("builtin") == held_out_text()
    assert load_check_text("source") == source_text()
    path = tmp_path / "source"
    path.write_text("words")
    assert load_check_text(str(path)) == Text("source", "words")


def test_builtin_halves():
    """Pages of the manual quote one another, so some text is in both halves."""
    first, second = ([p for p in t().content.split("\n\n") if p] for t in (calibration_text, held_out_text))
    shared = sum(len(paragraph) for paragraph in second if paragraph in set(first))
    assert shared < sum(map(len, second)) / 5
    assert min(sum(map(len, first)), sum(map(len, second))) > 200_000
    assert load_text("builtin") == calibration_text()
    assert len({calibration_text().name, held_out_text().name, source_text().name}) == 3


def test_source_text_is_source():
    import argparse
    from pathlib import Path

    assert Path(argparse.__file__).read_text() in source_text().content


def test_text_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes("\ufeffGrüße, 世界\r\nend".encode())
    assert load_text(str(path)) == Text("words.txt", "Grüße, 世界\nend")
    other = tmp_path / "no suffix"
    other.write_text("more")
    assert load_text(str(other)).content == "more"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no text"),
        (b" \n\t ", "holds no text"),
        (b"good\xff\xfe", r"is not UTF-8 text \(byte 4\)"),
    ],
)
def test_text_file_that_is_refused(tmp_path, content, said):
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        load_text(str(path))
    assert str(path) in caught.value.message


@pytest.mark.parametrize("name", ["none.txt", "./none", "/none/of/it", "none.jsonl", "none.csv", "none.parquet"])
def test_no_such_file(name):
    with pytest.raises(DataError, match=f"There is no file {name}"):
        load_text(name)


def test_rows_of_a_file(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one", "n": 1}\n{"text": "", "n": 2}\n{"text": "three [red]", "n": 3}\n')
    assert load_text(str(rows)) == Text("rows.jsonl", "one\n\nthree [red]")
    assert load_text(str(rows), column="n").content == "1\n\n2\n\n3"
    with pytest.raises(DataError, match="has no column 'body'; it has text, n"):
        load_text(str(rows), column="body")
    table = tmp_path / "rows.csv"
    table.write_text('text,n\n"a, b",1\nc,2\n')
    assert load_text(str(table)).content == "a, b\n\nc"


def test_rows_without_text(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "", "n": 1}\n')
    with pytest.raises(DataError, match=r"The column 'text' of .* holds no text"):
        load_text(str(rows))


def test_empty_rows(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    with pytest.raises(DataError, match=r"rows\.jsonl is empty"):
        load_text(str(rows))


@pytest.mark.parametrize("content", ["\n\n", "not json\n", '{"text": "one"}\n{"text": \n'])
def test_damaged_rows(tmp_path, content):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(content)
    with pytest.raises(DataError, match=r"rows\.jsonl cannot be loaded") as caught:
        load_text(str(rows))
    assert str(rows) in caught.value.message
    assert "\n" not in caught.value.message


def test_names_of_datasets(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*name, **options):
        asked.append((name, options))
        return datasets.Dataset.from_dict({"body": ["a", None, "b"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_text("owner/set:part", "test", "body") == Text("owner/set:part[test]", "a\n\nb")
    assert load_text("set", column="body").name == "set[train]"
    assert asked == [(("owner/set", "part"), {"split": "test"}), (("set",), {"split": "train"})]


def test_dataset_that_is_not_there(monkeypatch):
    import datasets

    def load_dataset(*name, **options):
        raise ConnectionError("Couldn't reach it\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="The dataset owner/set cannot be loaded") as caught:
        load_text("owner/set")
    assert caught.value.message.endswith(": Couldn't reach it")


def test_tokens_without_special_ones():
    asked = {}

    def tokenizer(text, **options):
        asked.update(options)
        return {"input_ids": [ord(c) for c in text]}

    ids = tokenize(Text("t", "abc"), tokenizer)
    assert ids.tolist() == [97, 98, 99]
    assert ids.dtype == torch.int64
    assert asked["add_special_tokens"] is False


def test_windows_do_not_overlap_and_repeat():
    text, ids = Text("t", ""), torch.arange(1050)
    windows = windows_of(text, ids, 10, 100)
    assert [len(window) for window in windows] == [100] * 10
    assert sorted(torch.cat(windows).tolist()) == list(range(1000))
    for window in windows:
        assert torch.equal(window, torch.arange(int(window[0]), int(window[0]) + 100))
    assert all(torch.equal(a, b) for a, b in zip(windows, windows_of(text, ids, 10, 100), strict=True))
    others = windows_of(text, ids, 10, 100, seed=1)
    assert not all(torch.equal(a, b) for a, b in zip(windows, others, strict=True))
    fewer = windows_of(text, ids, 3, 100)
    assert all(torch.equal(a, b) for a, b in zip(windows[:3], fewer, strict=True))


def test_a_text_that_is_too_short():
    with pytest.raises(DataError, match="t has 99 tokens, 1 x 100 are needed"):
        windows_of(Text("t", ""), torch.arange(99), 1, 100)
    assert len(windows_of(Text("t", ""), torch.arange(100), 1, 100)) == 1


def test_hash_is_of_the_ids():
    windows = [torch.tensor([1, 2]), torch.tensor([3])]
    expected = hashlib.sha256(b"".join(n.to_bytes(8, "little") for n in (1, 2, 3))).hexdigest()
    assert token_sha256(windows) == token_sha256([torch.tensor([1, 2, 3], dtype=torch.int32)]) == expected
