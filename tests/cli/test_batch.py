"""`kitty batch`: where answers and notes go, what is refused before weights load, resuming; the fake engine answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_engine import FakeEngine, fake_model

from kitty_cli import batch_report
from kitty_cli.commands import batch
from kitty_runtime.engine.limits import EngineLimits
from kitty_runtime.engine.request import SamplingParams
from kitty_runtime.errors import DataError, MemoryLimitError, ModelLoadError

HI = [{"role": "user", "content": "hi"}]
ROWS = (
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-5", "messages": HI}},
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"model": "fake", "prompt": "hi"}},
    {"prompt": "hi", "max_tokens": 4, "label": "greeting"},
)


def write_rows(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def source(tmp_path):
    return write_rows(tmp_path / "in.jsonl", *ROWS)


@pytest.fixture
def opened(monkeypatch):
    """The fake engine in place of a model; what it was opened with, and the settings' hash of the next run."""
    calls = []

    def fake_open(where, asked, seed, flags):
        asked = {name: value for name, value in asked.items() if value is not None}
        calls.append((where, asked, seed, flags))
        return FakeEngine(max_num_seqs=flags.max_num_seqs), fake_model(asked, seed, repr((asked, seed)))

    monkeypatch.setattr(batch, "_open", fake_open)
    return calls


@pytest.fixture
def never_opens(monkeypatch):
    monkeypatch.setattr(batch, "_open", lambda *args: pytest.fail("the model was loaded"))


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def ids(found):
    return sorted(record["custom_id"] for record in found)


# --- where things go ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("opened")
def test_a_file_of_requests(call, source):
    """Answers beside the input, nothing on stdout, everything else on stderr."""
    done = call("batch", source)
    out = source.with_name("in.out.jsonl")
    assert (done.code, done.stdout) == (0, "")
    assert ids(records(out)) == ["a", "b", "line-3"]
    lines = done.stderr.splitlines()
    assert lines[0] == "Lines ask for 'gpt-5'; fake answers all of them."
    assert lines[1] == "Fields that are no parameters are left alone: 'label'."
    assert lines[2] == f"3 rows to {out}"
    assert lines[3].startswith("3 rows: 3 ok, 0 failed | prompt 25 tok | generation ")
    assert lines[4:] == [f"Wrote {out}"]


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("name", "expected"),
    [("in.jsonl", "in.out.jsonl"), ("in.json", "in.out.jsonl"), ("in", "in.out.jsonl"), ("in.v2", "in.v2.out.jsonl")],
)
def test_the_output_beside_the_input(call, tmp_path, name, expected):
    assert call("batch", "-i", write_rows(tmp_path / name, *ROWS)).code == 0
    assert ids(records(tmp_path / expected)) == ["a", "b", "line-3"]


@pytest.mark.usefixtures("opened")
def test_streams(call, source, tmp_path):
    """`-` twice is a filter; either alone works too."""
    done = call("batch", "-", stdin=source.read_bytes())
    assert (done.code, ids(map(json.loads, done.stdout.splitlines()))) == (0, ["a", "b", "line-3"])
    assert "Wrote" not in done.stderr
    done = call("batch", source, "-o", "-")
    assert ids(map(json.loads, done.stdout.splitlines())) == ["a", "b", "line-3"]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    done = call("batch", "-", "--output-file", tmp_path / "out.jsonl", stdin=source.read_bytes())
    assert (done.stdout, ids(records(tmp_path / "out.jsonl"))) == ("", ["a", "b", "line-3"])
    done = call("batch", "-", "-o", tmp_path / "out.jsonl", "--resume", stdin=source.read_bytes())
    assert "has 3 of 3 rows; 0 to do." in done.stderr


@pytest.mark.usefixtures("opened")
def test_a_summary_for_machines(call, source, tmp_path):
    write_rows(source, *ROWS, "{\n")
    done = call("batch", source, "--json", "-o", tmp_path / "out.jsonl")
    found = done.json()
    assert done.code == 1
    assert found.pop("elapsed_s") > 0
    assert found.pop("generation_tok_per_s") > 0
    assert found.pop("generation_tokens") > 3
    assert found == {
        "schema_version": 1,
        "input": str(source),
        "output": str(tmp_path / "out.jsonl"),
        "model": "fake",
        "num_rows": 4,
        "num_ok": 3,
        "num_failed": 1,
        "num_kept": 0,
        "num_failed_kept": 0,
        "prompt_tokens": 25,
        "num_preemptions": 0,
        "interrupted": False,
    }


def test_flags_reach_the_engine_and_the_sampling(call, opened, source):
    flags = ["--model", "some/model", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1"]
    flags += ["--max-tokens", "7", "--seed", "3", "--repetition-penalty", "1.2", "--kv-bytes", "1GiB"]
    flags += ["--max-num-seqs", "3", "--max-batch-tokens", "99", "--gpu-memory-utilization", "0.5", "--bits", "16"]
    flags += ["--no-compile"]
    assert call("batch", source, *flags).code == 0
    ((where, asked, seed, engine),) = opened
    assert (where.model, where.config.k_bits, where.device, where.dtype) == ("some/model", 16, "auto", "auto")
    assert SamplingParams(**asked) == SamplingParams(7, 0.5, 5, 0.9, 0.1, 1.2)
    assert seed == 3
    assert engine == EngineLimits(
        gpu_memory_utilization=0.5, kv_bytes=2**30, max_num_seqs=3, max_batch_tokens=99, compiled=False
    )


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("opened")
def test_rows_that_fail_are_named_and_the_rest_is_answered(call, source, tmp_path):
    write_rows(source, *ROWS, '{"id": "x[red]\\u001b", "prompt": "hi", "top_p": 2}\n', "{\n" * 8)
    done = call("batch", source)
    assert (done.code, done.stdout) == (1, "")
    assert len(records(tmp_path / "in.out.jsonl")) == 12
    assert "Warning: line 4, 'x[red]\\x1b': top_p is 2.0. Use a share above 0, up to 1." in done.stderr
    assert "Warning: line 5: The line is not JSON" in done.stderr
    assert done.stderr.count("Warning: ") == 5
    assert "Further failures are named in the output only." in done.stderr
    assert "12 rows: 3 ok, 9 failed" in done.stderr


@pytest.mark.usefixtures("never_opens")
def test_what_is_refused_before_weights_load(refused, source, tmp_path):
    assert "There is no input." in refused(2, "batch")
    assert "The input is named twice." in refused(2, "batch", source, "-i", source)
    assert "There is no file" in refused(1, "batch", tmp_path / "none.jsonl")
    assert "cannot be read: Is a directory." in refused(1, "batch", tmp_path)
    assert "cannot be read: File name too long." in refused(1, "batch", "x" * 300)
    assert "is the input." in refused(2, "batch", source, "-o", source)
    (tmp_path / "link.jsonl").symlink_to(source)
    assert "is the input." in refused(2, "batch", source, "-o", tmp_path / "link.jsonl")
    assert "is no plain file" in refused(2, "batch", "/dev/null")
    assert "is a folder." in refused(2, "batch", source, "-o", tmp_path)
    assert "--output-file is empty." in refused(2, "batch", source, "-o", "")
    assert "Leave one of them out." in refused(2, "batch", source, "--resume", "--overwrite")
    assert "stdin holds no requests." in refused(1, "batch", "-")
    for flag in ("--resume", "--retry-failed", "--overwrite", "--json"):
        assert "Name a file: -o FILE" in refused(2, "batch", "-", flag)
        assert "Name a file: -o FILE" in refused(2, "batch", source, "-o", "-", flag)
    assert "'x' is not a size of memory." in refused(2, "batch", source, "--kv-bytes", "x")
    assert "--temperature is inf." in refused(2, "batch", source, "--temperature", "inf")
    assert "top_p is 0.0." in refused(2, "batch", source, "--top-p", "0")
    assert "k_bits is 8" in refused(2, "batch", source, "--bits", "8")
    source.write_text('{"id": "a", "prompt": "x"}\n' * 2)
    assert "uses an id twice: 'a' (lines 1 and 2)." in refused(2, "batch", source)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "in.jsonl",
        "link.jsonl",
    ]


@pytest.mark.usefixtures("opened")
def test_an_output_with_records_needs_a_word(call, refused, source):
    out = source.with_name("in.out.jsonl")
    call("batch", source)
    before = out.read_bytes()
    said = refused(2, "batch", source)
    assert f"{out} has records already." in said
    assert "--resume" in said
    assert "--overwrite" in said
    assert out.read_bytes() == before
    assert call("batch", source, "--overwrite").code == 0
    assert out.read_bytes() != before


@pytest.mark.usefixtures("opened")
def test_a_model_that_does_not_load_leaves_the_records(refused, call, source, monkeypatch):
    def not_there(*args):
        raise ModelLoadError("There is no ./nothing.", "Check the path.")

    call("batch", source)
    before = source.with_name("in.out.jsonl").read_bytes()
    monkeypatch.setattr(batch, "_open", not_there)
    for flag in ("--overwrite", "--resume"):
        assert "There is no ./nothing." in refused(1, "batch", source, flag)
        assert source.with_name("in.out.jsonl").read_bytes() == before


def test_another_batchs_output_is_refused_before_weights_load(refused, call, opened, source, monkeypatch):
    call("batch", source)
    source.write_text('{"id": "other", "prompt": "x"}\n')
    monkeypatch.setattr(batch, "_open", lambda *args: pytest.fail("the model was loaded"))
    assert "None of the 3 records in the output answers a row" in refused(2, "batch", source, "--resume")
    source.with_name("in.out.jsonl").write_text("hello\n")
    assert "is no record of kitty batch." in refused(2, "batch", source, "--resume")


# --- resuming ----------------------------------------------------------------------------------------------------


def test_resuming_says_what_it_does(call, opened, source, tmp_path):
    out = tmp_path / "in.out.jsonl"
    write_rows(source, *ROWS, "{\n")
    assert call("batch", source, "--resume").code == 1  # nothing there: from the start
    done = call("batch", source, "--resume")
    assert done.code == 1
    assert f"{out} has 4 of 4 rows, 1 of them failed; 0 to do." in done.stderr
    assert "4 rows: 0 ok, 0 failed, 4 from before (1 failed) | prompt 0 tok" in done.stderr
    assert "--retry-failed does the failed rows again." in done.stderr

    done = call("batch", source, "--retry-failed")
    assert (done.code, "1 row had failed: done again." in done.stderr) == (1, True)
    assert "has 3 of 4 rows; 1 to do." in done.stderr

    write_rows(source, ROWS[0], {**ROWS[1], "body": {"prompt": "ho"}}, ROWS[2])
    done = call("batch", source, "--resume")
    assert "1 row was edited since: done again." in done.stderr
    assert "1 record answers no row of the input: taken out." in done.stderr
    assert "moved to in.out.stale.jsonl beside it." in done.stderr
    assert done.code == 0

    done = call("batch", source, "--resume", "--temperature", "0")
    assert "3 rows were answered with another model or settings: done again." in done.stderr
    assert (done.code, ids(records(out))) == (0, ["a", "b", "line-3"])
    assert len(records(tmp_path / "in.out.stale.jsonl")) == 4
    assert call("batch", source, "--resume", "--temperature", "0").stderr.count("done again") == 0


@pytest.mark.usefixtures("opened")
def test_an_interrupted_run_says_how_to_go_on(call, source, tmp_path, monkeypatch):
    """A signal during the first step; nothing is cut in the middle."""
    step = FakeEngine.step

    def interrupted(self):
        if not self.running:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        patched.setattr(FakeEngine, "step", interrupted)
        done = call("batch", source, "--json")
    assert done.code == 130
    assert done.json()["interrupted"] is True
    assert done.stderr.splitlines()[-2:] == ["The same command with --resume does the rest.", "Interrupted."]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert call("batch", source, "--resume").code == 0
    assert ids(records(tmp_path / "in.out.jsonl")) == ["a", "b", "line-3"]


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "Interrupted."),
        (MemoryLimitError("The device is gone."), 1, "Error: The device is gone."),
    ],
)
def test_a_run_that_breaks_off_says_how_to_go_on(call, source, tmp_path, monkeypatch, problem, code, said):
    """Ctrl-C twice, or a device that fails."""

    def broken(self):
        if self.running:
            raise problem
        return step(self)

    step = FakeEngine.step
    with monkeypatch.context() as patched:
        patched.setattr(FakeEngine, "step", broken)
        done = call("batch", source, "--max-num-seqs", "1")
    assert (done.code, done.stdout) == (code, "")
    assert f"The same command with --resume does the rest.\n{said}\n" in done.stderr
    assert call("batch", source, "--resume").code == 0
    assert ids(records(tmp_path / "in.out.jsonl")) == ["a", "b", "line-3"]


def test_a_signal_while_the_model_loads(call, source, monkeypatch):
    monkeypatch.setattr(batch, "_open", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    done = call("batch", source)
    assert (done.code, done.stderr.strip()) == (130, "Interrupted.")
    assert not source.with_name("in.out.jsonl").exists()


# --- progress ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("opened")
def test_plain_lines_of_progress_in_a_pipe(call, source, monkeypatch):
    monkeypatch.setattr(batch_report, "LINE_EVERY_S", 0.0)
    done = call("batch", source, "--max-num-seqs", "2")
    lines = [line for line in done.stderr.splitlines() if " running" in line]
    assert lines[0] == "0/3 rows | 0 tok/s | 0 running, 0 waiting | pages 0/64"
    assert lines[-1].startswith("3/3 rows | ")
    assert lines[-1].endswith(" | pages 0/64 | 0:00 left")
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr


def test_durations():
    assert [batch_report._duration(s) for s in (0, 59.6, 3599, 3600, 90_000)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "25:00:00",
    ]


def test_what_holds_where_a_line_says_nothing():
    def describe(**values):
        return batch_report.describe_sampling(SamplingParams(**values), 3)

    assert describe() == "temperature 1, up to the context's end, seed 3"
    assert describe(temperature=0, top_p=0.9, max_tokens=7) == "greedy, up to 7 tokens, seed 3"
    some = describe(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2)
    assert (
        some
        == "temperature 0.5, top_k 5, top_p 0.9, min_p 0.1, repetition_penalty 1.2, up to the context's end, seed 3"
    )


# --- a real model ------------------------------------------------------------------------------------------------


def test_a_tiny_model_answers(call, model_dir, tmp_path):
    """Both kinds, a row that is too long and one that is wrong; resumed with one row more."""
    text = "the value of the list is not a name"
    rows = [
        {"id": "chat", "messages": [{"role": "user", "content": text}], "max_tokens": 8},
        {"id": "text", "prompt": text, "max_tokens": 8, "logprobs": 2},
        {"id": "ids", "prompt": [5, 9, 200], "max_tokens": 3, "ignore_eos": True},
        {"id": "long", "prompt": text * 400},
        {"id": "id", "prompt": [10**6]},
    ]
    source = write_rows(tmp_path / "in.jsonl", *rows)
    flags = ["--model", model_dir, "--temperature", "0", "--max-num-seqs", "4", "--kv-bytes", "30MB"]
    done = call("batch", source, *flags)
    assert done.code == 1
    assert "tiny-llama on cpu, float32; backend: torch reference on CPU" in done.stderr
    assert "sampling where a line says nothing: greedy, up to the context's end, seed 0" in done.stderr
    found = {record["custom_id"]: record["response"] for record in records(tmp_path / "in.out.jsonl")}
    assert {name: response["status_code"] for name, response in found.items()} == {
        "chat": 200,
        "text": 200,
        "ids": 200,
        "long": 400,
        "id": 400,
    }
    assert found["long"]["body"]["error"]["code"] == "context_length_exceeded"
    assert found["id"]["body"]["error"]["code"] == "invalid_token"
    assert found["ids"]["body"]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    choice = found["text"]["body"]["choices"][0]
    assert choice["text"].strip()
    assert len(choice["logprobs"]["tokens"]) == found["text"]["body"]["usage"]["completion_tokens"]

    write_rows(source, *rows, {"id": "more", "prompt": text, "max_tokens": 8})
    done = call("batch", source, *flags, "--resume")
    assert "has 5 of 6 rows, 2 of them failed; 1 to do." in done.stderr
    again = {record["custom_id"]: record["response"] for record in records(tmp_path / "in.out.jsonl")}
    assert again["more"]["body"]["choices"][0]["text"] == choice["text"]
    done = call("batch", source, *flags, "--resume", "--bits", "16")
    assert "6 rows were answered with another model or settings: done again." in done.stderr


def test_the_answer_of_chat_and_the_answer_of_batch(call, model_dir, tmp_path):
    """Greedy, the same words."""
    source = write_rows(tmp_path / "in.jsonl", {"messages": [{"role": "user", "content": "the value"}]})
    flags = ["--temperature", "0", "--max-tokens", "12"]
    done = call("batch", source, "-o", "-", "--model", model_dir, "--kv-bytes", "30MB", "--max-num-seqs", "2", *flags)
    content = json.loads(done.stdout)["response"]["body"]["choices"][0]["message"]["content"]
    assert content == call("chat", model_dir, "the value", *flags).stdout.rstrip("\n")


@pytest.mark.slow
def test_a_tiny_model_killed_and_resumed(model_dir, tmp_path):
    """The real engine in a real process; at 16 bits, where float32 rounding decides no token."""
    words = ["the", "value", "of", "the", "list", "is", "not", "a", "name", "in", "this", "class"]
    rows = [
        {"id": f"r{i}", "prompt": " ".join(words[i % 5 : 6 + i % 7]), "max_tokens": 8 + i % 90, "ignore_eos": True}
        for i in range(80)
    ]
    source = write_rows(tmp_path / "in.jsonl", *rows)
    command = [sys.executable, "-m", "kitty_cli.main", "batch", source, "--model", model_dir, "--preset", "16"]
    command += ["--temperature", "0", "--max-num-seqs", "8", "--kv-bytes", "60MB"]

    def start(*flags):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        return subprocess.Popen([*command, *flags], cwd=root, env=environment, stderr=subprocess.DEVNULL)

    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert start("-o", whole).wait(timeout=120) == 0
    process = start("-o", out)
    while process.poll() is None and not (out.exists() and out.stat().st_size > 0.4 * whole.stat().st_size):
        time.sleep(0.001)
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert 0 < out.read_bytes().count(b"\n") < len(rows)
    assert start("-o", out, "--resume").wait(timeout=120) == 0
    choices = [{r["custom_id"]: r["response"]["body"]["choices"] for r in records(path)} for path in (whole, out)]
    assert len(records(out)) == len(choices[1]) == len(rows)
    assert choices[0] == choices[1]


def test_the_module_is_importable_without_torch():
    code = (
        "import sys, kitty_cli.commands.batch, kitty_runtime.batch.run, kitty_runtime.batch.resume\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


def test_the_engine_gets_the_limits_of_the_flags(call, source, model_dir, monkeypatch):
    """Real flags to a real engine: each ends up where its name says."""
    from kitty_runtime.engine import engine

    made = []

    class Watched(engine.Engine):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(engine, "Engine", Watched)
    flags = ["--kv-bytes", "9MB", "--max-num-seqs", "3", "--max-batch-tokens", "77", "--gpu-memory-utilization", "0.5"]
    assert call("batch", source, "--model", model_dir, "--max-tokens", "2", *flags).code == 0
    (opened,) = made
    limits = opened.limits
    assert (limits.kv_bytes, limits.max_num_seqs, limits.max_batch_tokens) == (9_000_000, 3, 77)
    assert (limits.gpu_memory_utilization, limits.num_pages) == (0.5, None)
    assert opened.pool_size.num_slots == 3
    assert opened.pool_size.total_bytes <= 9_000_000


def test_memory_for_nothing_is_one_error(refused, source, model_dir):
    assert "one sequence needs" in refused(1, "batch", source, "--model", model_dir, "--kv-bytes", "1")


def test_a_reader_that_leaves_is_an_error(monkeypatch):
    """Answers that nobody took are not delivered: that is said, and is no success."""

    def broken(line):
        raise BrokenPipeError

    monkeypatch.setattr(batch.output, "data", broken)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards
    with pytest.raises(DataError, match="The reader of standard output has left; the other answers are not delivered"):
        batch._deliver(b"{}\n")


def test_a_folder_that_is_not_there(refused, source, tmp_path, never_opens):
    assert "cannot be written: No such file or directory" in refused(
        1, "batch", source, "-o", tmp_path / "x" / "y.jsonl"
    )
    assert not (tmp_path / "x").exists()
