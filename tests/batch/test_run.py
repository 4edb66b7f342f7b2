"""The loop and its records: OpenAI's shapes, errors of single rows, what is kept in memory, interrupts."""

from __future__ import annotations

import io
import json
import os
import threading

import pytest
from batch_case import comparable, mixed_lines, records_of, run_files
from fake_engine import CONTEXT, END, OUT_OF_MEMORY, FakeEngine, fake_model

from kitty_runtime.batch import run as run_module
from kitty_runtime.batch.problems import LineError
from kitty_runtime.batch.records import Answer, answer_record, encoded, line_error_record
from kitty_runtime.batch.run import run_batch
from kitty_runtime.batch.source import RowEntry, open_input, same_file
from kitty_runtime.engine.request import Event, TokenLogprob
from kitty_runtime.errors import ConfigError, DataError, KittyError

ENTRY = RowEntry("a", 3, 0, 10, "row")
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def answered(tmp_path):
    """Runs rows; their records by custom_id."""

    def answered(*rows, **options):
        source = tmp_path / "in.jsonl"
        source.write_bytes(
            b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)
        )
        run_files(source, tmp_path / "out.jsonl", overwrite=True, **options)
        return {record["custom_id"]: record for record in records_of(tmp_path / "out.jsonl")}

    return answered


# --- records -----------------------------------------------------------------------------------------------------


def test_an_answer_of_each_kind(answered):
    found = answered(
        {"custom_id": "c", "url": "/v1/chat/completions", "body": {"messages": HI, "max_tokens": 2, "logprobs": True}},
        {"id": "p", "prompt": "hi", "max_tokens": 2, "ignore_eos": True, "logprobs": 1},
    )
    record = found["c"]
    assert list(record) == ["id", "custom_id", "response", "error", "kitty"]
    assert record["error"] is None
    assert record["response"]["status_code"] == 200
    body = record["response"]["body"]
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert body["usage"] == {"prompt_tokens": 19, "completion_tokens": 2, "total_tokens": 21}
    (choice,) = body["choices"]
    assert choice["finish_reason"] in ("length", "stop")
    assert choice["message"]["role"] == "assistant"
    text = choice["message"]["content"]
    logprobs = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in logprobs) == text
    assert logprobs[0] == {"token": text[0], "logprob": -0.5, "bytes": [ord(text[0])], "top_logprobs": []}

    body = found["p"]["response"]["body"]
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    first, second = choice["text"]
    assert choice["logprobs"]["tokens"] == [first, second]
    assert choice["logprobs"]["top_logprobs"] == [{first: -0.5}, {second: -0.5}]
    assert choice["logprobs"]["text_offset"] == [0, 1]


def test_one_row_that_fails_fails_alone(answered):
    found = answered(
        {"id": "good", "prompt": "hi"},
        {"id": "long", "prompt": "x" * CONTEXT},
        {"id": "memory", "prompt": OUT_OF_MEMORY},
        {"id": "wrong", "prompt": "hi", "temperature": -1},
        b"{\n",
    )
    assert found["good"]["response"]["status_code"] == 200
    for name, status, kind, param, code in [
        ("long", 400, "invalid_request_error", "prompt", "context_length_exceeded"),
        ("memory", 500, "server_error", None, "out_of_memory"),
        ("wrong", 400, "invalid_request_error", "temperature", "invalid_value"),
    ]:
        response = found[name]["response"]
        error = response["body"]["error"]
        assert (response["status_code"], found[name]["error"]) == (status, None)
        assert (error["type"], error["param"], error["code"]) == (kind, param, code)
    assert found["long"]["response"]["body"]["error"]["message"] == (
        "The prompt has 4001 tokens, the context is 4000. Shorten the prompt."
    )
    record = found[None]
    assert record["response"] is None
    assert record["error"]["line"] == 5
    assert record["error"]["code"] == "invalid_json"


def test_records_are_lines_of_utf8_for_every_reader():
    """Characters that some readers take for line ends are escaped, and so is half a surrogate pair; others are not."""
    plain = encoded({"text": "déß 你好"})
    assert plain == '{"text": "déß 你好"}\n'.encode()
    for text in ("a\u2028b", "a\x85b", "a\u2029b", "\ud800"):
        line = encoded({"text": text, "more": "\r\n\x1e\x0b\x0c"})
        assert line.isascii()
        assert len(line.decode().splitlines()) == 1
        assert json.loads(line) == {"text": text, "more": "\r\n\x1e\x0b\x0c"}


def test_logprobs_that_json_cannot_write_and_tokens_that_are_no_text():
    model = fake_model()
    half = 3 + 0xC3  # the first byte of a character
    answer = Answer(ENTRY, "chat", 1, 1, [], [TokenLogprob(half, float("-inf"), ((half, -1.0),))], "length")
    (found,) = answer_record(answer, "m", model.tokenizer, "s")["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert (found["token"], found["logprob"], found["bytes"]) == ("\ufffd", -9999.0, None)
    encoded(answer_record(answer, "m", model.tokenizer, "s"))


def test_what_resuming_needs_is_in_every_record():
    record = line_error_record(RowEntry(3, 3, 0, 10, "row"), LineError("invalid_json", "No."), "settings")
    assert record["kitty"] == {"line": 3, "row_sha256": "row", "settings_sha256": "settings"}
    assert record["custom_id"] is None


# --- the loop ----------------------------------------------------------------------------------------------------


def test_answers_do_not_depend_on_what_runs_beside_them(tmp_path):
    lines = mixed_lines(80)
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(lines))
    run_files(source, tmp_path / "a.jsonl", engine=FakeEngine(max_num_seqs=1))
    run_files(source, tmp_path / "b.jsonl", engine=FakeEngine(max_num_seqs=16))
    assert comparable(tmp_path / "a.jsonl") == comparable(tmp_path / "b.jsonl")
    order_a, order_b = ([r["kitty"]["line"] for r in records_of(tmp_path / f"{x}.jsonl")] for x in "ab")
    assert order_a != order_b


def test_few_rows_wait_in_memory(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "hi", "max_tokens": 3}\n' * 500)
    engine = FakeEngine(max_num_seqs=4)
    assert run_files(source, tmp_path / "out.jsonl", engine=engine).num_ok == 500
    assert engine.most_waiting <= 16


def test_records_are_written_as_they_finish(tmp_path):
    """Each before the next step, while others still run."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "a", "max_tokens": 1}\n{"prompt": "b", "max_tokens": 3, "ignore_eos": true}\n')
    written, seen = [], []
    with open_input(source, io.BytesIO()) as batch:
        run_batch(
            FakeEngine(),
            batch,
            batch.entries,
            fake_model(),
            written.append,
            max_waiting=4,
            on_step=lambda progress: seen.append((len(written), progress.done, progress.running)),
        )
    assert seen[0] == (0, 0, 0)
    assert (1, 1, 1) in seen
    assert seen[-1] == (2, 2, 0)


def test_progress_counts_what_was_done_before(tmp_path, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(run_module.time, "monotonic", lambda: float(next(clock)))
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "hi", "max_tokens": 2, "ignore_eos": true}\n' * 6 + b"{\n")
    seen, failures = [], []
    with open_input(source, io.BytesIO()) as batch:
        summary = run_batch(
            FakeEngine(max_num_seqs=2),
            batch,
            batch.entries[2:],
            fake_model(),
            lambda line: None,
            max_waiting=4,
            num_failed_kept=1,
            on_step=seen.append,
            on_failure=lambda entry, message: failures.append((entry.line, message)),
        )
    assert (seen[0].done, seen[0].total, seen[0].failed, seen[0].left_s) == (2, 7, 1, None)
    assert (seen[-1].done, seen[-1].failed, seen[-1].left_s) == (7, 2, 0)
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    assert all(progress.pages_total == 64 for progress in seen)
    assert max(progress.tok_per_s for progress in seen) > 0
    assert [line for line, _ in failures] == [7]
    assert (summary.num_ok, summary.num_failed, summary.num_kept, summary.num_failed_kept) == (4, 1, 2, 1)
    assert (summary.prompt_tokens, summary.generation_tokens) == (12, 8)
    assert summary.tok_per_s == 8 / summary.elapsed_s


def test_an_engine_that_can_do_no_more_leaves_whole_records(tmp_path):
    class Broken(FakeEngine):
        def step(self):
            if len(self.seen) > 20:
                raise KittyError("The device is gone.")
            return super().step()

    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"prompt": "hi"}\n' * 60)
    with pytest.raises(KittyError, match="The device is gone"):
        run_files(source, out, engine=Broken(max_num_seqs=2))
    done = len(records_of(out))
    assert 0 < done < 60
    assert run_files(source, out, resume=True).num_kept == done


def test_an_engine_that_forgets_a_request_is_found_out(tmp_path):
    class Forgetful(FakeEngine):
        def step(self):
            return [event for event in super().step() if event.request_id != "line-2"]

    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "hi"}\n' * 3)
    with pytest.raises(RuntimeError, match="idle without having answered"):
        run_files(tmp_path / "in.jsonl", tmp_path / "out.jsonl", engine=Forgetful())


def test_a_request_that_the_engine_aborts_is_an_error(answered):
    class Aborting(FakeEngine):
        def step(self):
            return [Event(e.request_id, END, "", None, "aborted") if e.finish_reason else e for e in super().step()]

    (record,) = answered({"prompt": "hi"}, engine=Aborting()).values()
    assert record["response"]["status_code"] == 500
    assert record["response"]["body"]["error"]["message"] == "The request was aborted."


# --- the input ---------------------------------------------------------------------------------------------------


def checked(path, stdin=b""):
    with open_input(path, io.BytesIO(stdin)) as batch:
        return batch


def test_blank_lines_count_and_a_missing_line_end_does_not(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\r\n\n{"prompt": "a"}\r\n  \t\n{"prompt": "b"}')
    assert [(entry.key, entry.line) for entry in checked(path).entries] == [("line-3", 3), ("line-5", 5)]


def test_ids_that_are_used_twice(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b'{"id": "a", "prompt": 1}\n{"prompt": 1}\n{"id": 7}\n{"id": "a"}\n{"custom_id": "7"}\n{"id": "line-2"}'
    )
    with pytest.raises(ConfigError, match="uses an id twice") as caught:
        checked(path)
    assert "'a' (lines 1 and 4), '7' (lines 3 and 5), 'line-2' (lines 2 and 6)." in caught.value.message
    path.write_bytes(b'{"id": "\\u001b[31m", "prompt": 1}\n' * 50)
    with pytest.raises(ConfigError, match="and 44 more") as caught:
        checked(path)
    assert caught.value.message.isprintable()


def test_inputs_that_are_none(tmp_path):
    with pytest.raises(DataError, match="There is no file"):
        checked(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        checked(tmp_path)
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        checked(tmp_path / ("x" * 300))
    for content in (b"", b"\n \r\n", b"\xef\xbb\xbf"):
        (tmp_path / "empty.jsonl").write_bytes(content)
        with pytest.raises(DataError, match="holds no requests"):
            checked(tmp_path / "empty.jsonl")
        with pytest.raises(DataError, match="stdin holds no requests"):
            checked(None, content)
    with pytest.raises(DataError, match="Standard input is closed"), open_input(None, None):
        pass


def test_a_pipe_is_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b'{"prompt": "a"}\n',))
    writer.start()
    assert run_files(pipe, tmp_path / "out.jsonl").num_ok == 1
    writer.join()


def test_an_input_that_is_changed_while_it_is_read(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n')
    with open_input(path, io.BytesIO()) as batch:
        path.write_bytes(b'{"prompt": "b"}\n')
        with pytest.raises(DataError, match=r"was changed while the batch ran \(line 1\)"):
            batch.read(batch.entries[0])


def test_one_file_by_two_names(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"")
    (tmp_path / "soft").symlink_to(path)
    (tmp_path / "hard").hardlink_to(path)
    for name in ("soft", "hard", "in.jsonl", "../" + tmp_path.name + "/in.jsonl"):
        assert same_file(path, tmp_path / name)
    assert not same_file(path, tmp_path / "other")
    (tmp_path / "dangling").symlink_to(tmp_path / "other")
    assert same_file(tmp_path / "other", tmp_path / "dangling")
