"""`kitty batch` as a process that is killed, interrupted and resumed: every row once, as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from batch_case import comparable, mixed_lines, records_of

TESTS = Path(__file__).parents[1]
NUM_ROWS = 150
STEP_S = 0.002
NUM_POINTS = 20
QUICK_POINT = 3
"""Of the twenty, the one that the quick tests try."""


def start(*arguments: object, step_s: float = STEP_S) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("killable.py")), str(step_s), "batch", *map(str, arguments)]
    return subprocess.Popen(
        [*command, "--max-num-seqs", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))},
    )


def finish(*arguments: object) -> tuple[int, str]:
    """Exit code and stderr of a run that nobody disturbs; nothing is on stdout."""
    process = start(*arguments, step_s=0)
    stdout, stderr = process.communicate(timeout=60)
    assert stdout == ""
    assert "Traceback" not in stderr
    return process.returncode, stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    path.write_bytes(b"\n".join(mixed_lines(NUM_ROWS)))
    return path


@pytest.fixture(scope="module")
def whole(source):
    """The output of a run that was left alone."""
    path = source.with_name("whole.jsonl")
    assert finish(source, "-o", path)[0] == 1  # some rows are wrong
    return path


def wait_until(size: int, path: Path, process: subprocess.Popen[str]) -> None:
    """Until the output has so many bytes, or the process is over."""
    while process.poll() is None and not (path.exists() and path.stat().st_size >= size):
        time.sleep(0.0005)


@pytest.mark.parametrize(
    "point", [pytest.param(i, marks=() if i == QUICK_POINT else pytest.mark.slow) for i in range(NUM_POINTS)]
)
def test_killed_and_resumed(point, source, whole, tmp_path):
    """At a random size of the output and a random moment after it; killed once more while it resumes."""
    rng = random.Random(point)
    out = tmp_path / "out.jsonl"
    total = whole.stat().st_size
    sizes = sorted(rng.randrange(total) for _ in range(2))
    for attempt, size in enumerate(sizes):
        process = start(source, "-o", out, *["--resume"] * attempt)
        wait_until(size, out, process)
        time.sleep(rng.random() * 4 * STEP_S)
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode in (-signal.SIGKILL, 1)  # 1: it was done already
    before = out.read_bytes() if out.exists() else b""
    whole_lines = before[: before.rfind(b"\n") + 1]
    num_whole = whole_lines.count(b"\n")
    code, said = finish(source, "-o", out, "--resume")
    assert code == 1
    assert f"has {num_whole} of {NUM_ROWS} rows" in said or not num_whole
    assert out.read_bytes().startswith(whole_lines)
    assert comparable(out) == comparable(whole)
    assert len(records_of(out)) == NUM_ROWS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(number, source, whole, tmp_path):
    """What is done is whole lines, the exit code says so, and stderr how to go on."""
    out = tmp_path / "out.jsonl"
    process = start(source, "-o", out)
    wait_until(whole.stat().st_size // 3, out, process)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-2:] == ["The same command with --resume does the rest.", "Interrupted."]
    done = len(records_of(out))
    assert 0 < done < NUM_ROWS
    assert f"{out} has {done} of {NUM_ROWS} rows" in finish(source, "-o", out, "--resume")[1]
    assert comparable(out) == comparable(whole)


def test_two_at_once(source, tmp_path):
    """The second leaves the first alone."""
    out = tmp_path / "out.jsonl"
    process = start(source, "-o", out, step_s=0.2)
    wait_until(1, out, process)
    for flag in ("--resume", "--overwrite"):
        code, said = finish(source, "-o", out, flag)
        assert (code, f"Another process is writing {out}." in said) == (2, True)
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=60)
    assert finish(source, "-o", out, "--resume")[0] == 1
    assert len(comparable(out)) == NUM_ROWS


def test_a_reader_that_leaves(source):
    """As `head` does: the answers that it does not take are said to be undelivered."""
    process = start(source, "-o", "-")
    assert process.stdout.readline().startswith('{"id": "batch_req_')
    process.stdout.close()
    process.wait(timeout=60)
    said = process.stderr.read()
    assert process.returncode == 1
    assert "The reader of standard output has left" in said
    assert "Traceback" not in said
