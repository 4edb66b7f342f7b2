"""`kitty bench`: every format, dummy weights, and what is refused."""

from __future__ import annotations

import csv
import io

import pytest

SHAPE = ("--input-len", "150", "--output-len", "3", "-r", "2")
LOAD = ("--num-prompts", "4", "--input-len", "5:30", "--output-len", "2:4")


def test_a_table_of_shapes(call, model_dir):
    done = call("bench", model_dir, *SHAPE, "--batch-size", "1,2")
    assert done.code == 0
    for words in ("tuned", "16", "pp150", "tg3 @ d150", "+-", "x of 16 bits"):
        assert words in done.stdout
    assert "bench: in process, no HTTP; tuned against 16; versions: kitty" in done.stderr
    assert "backend: torch reference on CPU" in done.stderr


def test_shapes_as_json(call, model_dir):
    done = call("bench", model_dir, *SHAPE, "--preset", "kitty", "--memory", "80GB", "--format", "json")
    document = done.json()
    assert document["schema_version"] == 1
    assert (document["how"], document["backend"]) == ("in process, no HTTP", "torch reference on CPU")
    assert document["methods"]["kitty"]["policy"] == "dynamic"
    assert [(r["method"], r["test"]) for r in document["results"]] == [
        ("kitty", "pp150"), ("kitty", "tg3 @ d150"), ("16", "pp150"), ("16", "tg3 @ d150"),
    ]  # fmt: skip
    for row, sample in zip(document["results"][::2], document["samples"], strict=True):
        assert row["tok_per_s"] == pytest.approx(sum(sample["prompt_tok_per_s"]) / 2)
        assert row["peak_bytes"] is None
        assert row["largest_batch"] > 1000
    assert document["results"][0]["ratio_to_16"] > 0
    assert document["results"][2]["ratio_to_16"] is None


def test_shapes_as_csv_and_markdown(call, model_dir):
    done = call("bench", model_dir, *SHAPE, "--format", "csv", "--no-baseline")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["test"] for row in rows] == ["pp150", "tg3 @ d150"]
    assert float(rows[0]["tok_per_s"]) > 0
    lines = call("bench", model_dir, *SHAPE, "--format", "md", "--no-baseline").stdout.splitlines()
    assert lines[0].startswith("| method | batch | test | tok/s |")
    assert lines[1].startswith("| --- | --- | --- | --: |")
    assert len(lines) == 4


def test_a_load(call, model_dir):
    done = call("bench", model_dir, *LOAD)
    assert done.code == 0
    for name in ("output_throughput", "total_token_throughput", "p99_ttft_ms", "mean_itl_ms", "decode_share"):
        assert name in done.stdout
    document = call("bench", model_dir, *LOAD, "--format", "json", "--request-rate", "50").json()
    assert [r["method"] for r in document["results"]] == ["tuned", "16"]
    assert [r["completed"] for r in document["results"]] == [4, 4]
    assert document["load"]["request_rate"] == 50
    assert len(document["samples"]["16"]) == 4
    outputs = {r["total_output_tokens"] for r in document["results"]}
    assert len(outputs) == 1
    assert call("bench", model_dir, *LOAD, "--format", "json", "--no-baseline").json()["load"]["request_rate"] is None


def test_dummy_weights_need_only_a_config(call, model_dir, tmp_path):
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    done = call("bench", tmp_path, "--load-format", "dummy", *SHAPE)
    assert done.code == 0
    assert "(random weights) on cpu" in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--batch-size", "0"], "--batch-size is '0'"),
        (["--input-len", "x"], "--input-len is 'x'"),
        (["--input-len", "5:30"], "add --num-prompts"),
        (["--num-prompts", "2", "--output-len", "9:3"], "--output-len is '9:3'"),
        (["--memory", "lots"], "is not a size of memory"),
        (["--request-rate", "3"], "--request-rate 3.0 without a load"),
        (["--num-prompts", "2", "-b", "4"], "--batch-size 4 with a load"),
        (["--num-prompts", "2", "--output-len", "5:9000"], "come to 9512, the model's context is 2048"),
    ],
)
def test_flags_that_say_nothing(refused, model_dir, flags, said):
    assert said in refused(2, "bench", model_dir, *flags)


@pytest.mark.parametrize("flags", [LOAD, SHAPE])
def test_memory_that_the_weights_take(refused, model_dir, flags):
    assert "leaves nothing for the cache: the weights take" in refused(1, "bench", model_dir, *flags, "--memory", "9KB")


def test_shapes_beyond_the_context(call, short_model_dir):
    done = call("bench", short_model_dir, "--input-len", "100", "--output-len", "3", "-r", "1")
    assert done.code == 2
    assert "come to 103, the model's context is 64" in done.stderr
