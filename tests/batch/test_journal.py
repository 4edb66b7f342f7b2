"""The output file: one writer, torn lines at every byte, rows and settings that change, errors done again."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from batch_case import comparable, mixed_lines, records_of, run_files
from fake_engine import OUT_OF_MEMORY, FakeEngine

from kitty_runtime.batch import journal as journal_module
from kitty_runtime.batch.journal import open_journal
from kitty_runtime.batch.resume import plan_resume
from kitty_runtime.batch.source import open_input
from kitty_runtime.errors import ConfigError, DataError


def write_lines(path, lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "in.jsonl", [{"id": f"r{i}", "prompt": f"row {i}"} for i in range(4)])


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def test_a_last_line_that_was_cut_anywhere(source, out, monkeypatch):
    """At every byte of the last record: it is done again, the others are not; a whole one without its end is kept."""
    monkeypatch.setattr(journal_module.os, "fsync", lambda fd: None)  # 2000 of them take seconds
    source.write_bytes(b"".join(source.read_bytes().splitlines(keepends=True)[:2]))
    run_files(source, out)
    whole, expected = out.read_bytes(), comparable(out)
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start, len(whole) + 1):
        out.write_bytes(whole[:end])
        engine = FakeEngine()
        summary = run_files(source, out, resume=True, engine=engine)
        is_whole = end >= len(whole) - 1
        assert (summary.num_ok, summary.num_kept) == ((0, 2) if is_whole else (1, 1)), end
        assert len(engine.seen) == summary.num_ok
        assert comparable(out) == expected
        assert out.read_bytes()[:start] == whole[:start]


@pytest.mark.parametrize("tail", [b"\x00" * 5000, b'{"id": "batch_req_', b"\xff\xfe", b"{}", b"null", b'{"kitty": 1}'])
def test_other_tails(source, out, tail):
    run_files(source, out)
    expected = comparable(out)
    with out.open("ab") as file:
        file.write(tail)
    assert run_files(source, out, resume=True).num_kept == 4
    assert comparable(out) == expected


def test_resuming_what_is_done_and_what_is_not_there(source, out):
    assert run_files(source, out, resume=True).num_ok == 4
    before = out.read_bytes()
    summary = run_files(source, out, resume=True)
    assert (summary.num_ok, summary.num_kept, out.read_bytes()) == (0, 4, before)
    out.write_bytes(b"")
    assert run_files(source, out).num_ok == 4


def test_records_are_not_overwritten_unasked(source, out):
    run_files(source, out)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match="has records already"):
        run_files(source, out)
    assert out.read_bytes() == before
    assert run_files(source, out, overwrite=True).num_ok == 4
    assert len(records_of(out)) == 4
    assert out.read_bytes() != before


def test_an_interrupted_batch_goes_on(tmp_path, out):
    lines = mixed_lines(60)
    source = write_lines(tmp_path / "in.jsonl", [line + b"\n" for line in lines])
    run_files(source, tmp_path / "whole.jsonl")
    first = run_files(source, out, stop_after=10)
    assert first.interrupted
    assert 0 < first.num_ok < 60
    second = run_files(source, out, resume=True)
    assert second.num_kept == first.num_ok + first.num_failed
    assert comparable(out) == comparable(tmp_path / "whole.jsonl")


# --- rows and settings that change -------------------------------------------------------------------------------


def test_edited_rows_are_done_again(source, out, tmp_path):
    run_files(source, out)
    before = {record["custom_id"]: record for record in records_of(out)}
    rows = [{"id": "r0", "prompt": "row 0"}, {"id": "r1", "prompt": "new"}, {"id": "r3", "prompt": "row 3"}]
    write_lines(source, rows)
    engine = FakeEngine()
    assert run_files(source, out, resume=True, engine=engine).num_kept == 2
    assert [request.id for request in engine.seen] == ["r1"]
    after = {record["custom_id"]: record for record in records_of(out)}
    assert set(after) == {"r0", "r1", "r3"}
    assert (after["r0"], after["r3"]) == (before["r0"], before["r3"])
    aside = records_of(tmp_path / "out.stale.jsonl")
    assert {record["custom_id"]: record for record in aside} == {"r1": before["r1"], "r2": before["r2"]}
    write_lines(tmp_path / "new.jsonl", rows)
    run_files(tmp_path / "new.jsonl", tmp_path / "fresh.jsonl")
    assert (
        after["r1"]["response"]["body"]["choices"]
        == comparable(tmp_path / "fresh.jsonl")["r1"]["response"]["body"]["choices"]
    )


def test_blanks_around_a_row_are_no_edit(source, out):
    run_files(source, out)
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes().replace(b"\n", b"  \r\n\r\n").rstrip())
    assert run_files(source, out, resume=True).num_kept == 4


def test_rows_without_ids_are_known_by_line_and_content(tmp_path, out):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    run_files(source, out)
    write_lines(source, [{"prompt": "a"}, {"prompt": "c"}, {"prompt": "c"}])
    engine = FakeEngine()
    assert run_files(source, out, resume=True, engine=engine).num_kept == 2
    assert [request.id for request in engine.seen] == ["line-2"]


def test_other_settings_do_every_row_again(source, out, tmp_path):
    run_files(source, out, settings="old")
    before = records_of(out)
    assert run_files(source, out, resume=True, settings="new").num_ok == 4
    assert {record["kitty"]["settings_sha256"] for record in records_of(out)} == {"new"}
    assert len(records_of(out)) == 4
    assert records_of(tmp_path / "out.stale.jsonl") == before


def test_a_plan_says_why(source, out):
    run_files(source, out, settings="old")
    write_lines(source, [{"id": "r0", "prompt": "new"}, {"id": "r1", "prompt": "row 1"}])
    with open_input(source, io.BytesIO()) as batch, open_journal(out, True, False) as journal:
        plan = plan_resume(batch.entries, journal.stored(), "new")
    assert dict(plan.reasons) == {"edited": 1, "settings": 1, "gone": 2}


def test_the_output_of_another_batch_is_left_alone(source, out, tmp_path):
    run_files(source, out)
    before = out.read_bytes()
    other = write_lines(tmp_path / "other.jsonl", [{"id": "x", "prompt": "hi"}])
    with pytest.raises(ConfigError, match="None of the 4 records in the output answers a row of this input"):
        run_files(other, out, resume=True)
    assert out.read_bytes() == before


@pytest.mark.parametrize("line", [b"hello\n", b'{"custom_id": "r0", "response": null}\n', b"\x00\x01\n", b"[]\n"])
def test_other_files_are_left_alone(source, out, line):
    run_files(source, out)
    out.write_bytes(line + out.read_bytes())
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=r"Line 1 of .* is no record of kitty batch"):
        run_files(source, out, resume=True)
    assert out.read_bytes() == before


def test_a_row_that_was_answered_twice_is_kept_once(source, out):
    run_files(source, out)
    expected = comparable(out)
    out.write_bytes(out.read_bytes() * 2)
    assert run_files(source, out, resume=True).num_kept == 4
    assert comparable(out) == expected


# --- errors ------------------------------------------------------------------------------------------------------


def test_errors_are_done_again_when_asked(tmp_path, out):
    rows = [
        {"id": "good", "prompt": "a"},
        {"id": "memory", "prompt": OUT_OF_MEMORY},
        {"id": "wrong", "prompt": 5},
        b"{\n",
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    first = run_files(source, out)
    assert (first.num_ok, first.num_failed) == (1, 3)
    expected = comparable(out)
    kept = run_files(source, out, resume=True)
    assert (kept.num_ok, kept.num_failed, kept.num_kept, kept.num_failed_kept) == (0, 0, 4, 3)
    engine = FakeEngine()
    again = run_files(source, out, resume=True, retry_failed=True, engine=engine)
    assert (again.num_ok, again.num_failed, again.num_kept, again.num_failed_kept) == (0, 3, 1, 0)
    assert [request.id for request in engine.seen] == ["memory"]
    assert comparable(out) == expected
    assert not (tmp_path / "out.stale.jsonl").exists()


# --- the file ----------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused(source, out, tmp_path):
    link = tmp_path / "link.jsonl"
    with open_journal(out, False, False) as journal:
        journal.start()
        link.symlink_to(out)
        for name in (out, link):
            with pytest.raises(ConfigError, match="Another process is writing"):
                run_files(source, name, resume=True)
    assert run_files(source, out).num_ok == 4


def test_the_lock_of_a_process_that_died_holds_nobody_up(source, out):
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom kitty_runtime.batch.journal import open_journal\n"
        "with open_journal(Path(sys.argv[1]), False, False): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(out)], check=False).returncode == 9
    assert run_files(source, out).num_ok == 4


def test_links_stay_links_and_modes_stay(source, out, tmp_path):
    run_files(source, out)
    out.chmod(0o640)
    link = tmp_path / "link.jsonl"
    link.symlink_to(out)
    run_files(source, link, resume=True, settings="new")
    assert link.is_symlink()
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_a_kill_while_the_file_is_rewritten_loses_nothing(source, out, monkeypatch):
    """Until the new file has taken its place the old one is whole."""
    run_files(source, out)
    before = out.read_bytes()

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run_files(source, out, resume=True, settings="new")
    assert out.read_bytes() == before
    assert run_files(source, out, resume=True, settings="new").num_ok == 4


def test_places_that_cannot_be_written(source, tmp_path):
    for path, error, said in [
        (tmp_path, ConfigError, "is a folder"),
        (Path("/dev/null"), ConfigError, "is no plain file"),
        (tmp_path / ("x" * 300), DataError, "cannot be written: File name too long"),
        (Path("/proc/self/out.jsonl"), DataError, "cannot be written: No such file or directory"),
        (source / "below", DataError, "cannot be written"),
        (Path("/proc/none/out.jsonl"), DataError, "cannot be written"),
    ]:
        with pytest.raises(error, match=said):
            run_files(source, path)
    with pytest.raises(DataError, match="cannot be written: No such file or directory"):
        run_files(source, tmp_path / "new" / "folder" / "out.jsonl")
    assert not (tmp_path / "new").exists()


def test_a_write_in_pieces_and_a_full_disk(source, out, monkeypatch):
    """The system may take part of a line; a disk that is full ends the run, and what is whole stays whole."""
    real = os.write
    monkeypatch.setattr(journal_module.os, "write", lambda fd, data: real(fd, data[:100]))
    run_files(source, out)
    expected = comparable(out)
    calls = 0

    def full(fd, data):
        nonlocal calls
        calls += 1
        if calls > 25:
            raise OSError(28, "No space left on device")
        return real(fd, data[:100])

    monkeypatch.setattr(journal_module.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        run_files(source, out, overwrite=True)
    monkeypatch.undo()
    assert not out.read_bytes().endswith(b"\n")
    summary = run_files(source, out, resume=True)
    assert 0 < summary.num_ok < 4
    assert comparable(out) == expected
