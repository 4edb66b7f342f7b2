"""A whole batch on files with the fake engine, and what tests compare of its output."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, fake_model

from kitty_runtime.batch.journal import open_journal
from kitty_runtime.batch.resume import check_same_batch, plan_resume
from kitty_runtime.batch.run import BatchSummary, run_batch
from kitty_runtime.batch.source import open_input


def run_files(
    source: Path,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    retry_failed: bool = False,
    engine: FakeEngine | None = None,
    settings: str = "settings",
    stop_after: int | None = None,
) -> BatchSummary:
    """What `kitty batch` does, without a command line. `stop_after` steps, if it is given, the batch is interrupted."""
    engine = engine or FakeEngine()
    steps = 0

    def should_stop() -> bool:
        nonlocal steps
        steps += 1
        return stop_after is not None and steps > stop_after

    with open_input(source, io.BytesIO()) as batch, open_journal(out, resume, overwrite) as journal:
        stored = journal.stored() if resume else ()
        check_same_batch(batch.entries, stored)
        plan = plan_resume(batch.entries, stored, settings, retry_failed)
        journal.start(plan.keep, plan.replaced)
        return run_batch(
            engine,
            batch,
            plan.todo,
            fake_model(settings_sha256=settings),
            journal.write,
            max_waiting=16,
            num_failed_kept=plan.num_failed_kept,
            should_stop=should_stop,
        )


def records_of(path: Path) -> list[dict[str, Any]]:
    """Records of an output, strictly read."""
    raw = path.read_bytes()
    assert raw.endswith(b"\n") or not raw
    return [json.loads(line) for line in raw.decode().split("\n")[:-1]]


def comparable(path: Path) -> dict[str, Any]:
    """Records by row, each row once, without what every run makes anew: ids and times."""
    found: dict[str, Any] = {}
    for record in records_of(path):
        key = record["custom_id"] if record["custom_id"] is not None else f"error in line {record['error']['line']}"
        assert key not in found, key
        assert record.pop("id").startswith("batch_req_")
        if record["response"] is not None:
            assert record["response"].pop("request_id").startswith("req_")
            record["response"]["body"].pop("id", None)
            record["response"]["body"].pop("created", None)
        found[key] = record
    return found


def mixed_lines(num_rows: int, seed: int = 0) -> list[bytes]:
    """Rows of all forms, most of them good."""
    rng = random.Random(seed)
    lines = []
    for i in range(num_rows):
        text = "".join(rng.choices("abc déß你好\u2028", k=rng.randint(1, 60)))
        body: dict[str, Any] = {"temperature": rng.choice([0, 0.5, 1.0]), "max_tokens": rng.randint(1, 30)}
        message = {"role": "user", "content": text}
        line: Any = rng.choice(
            [
                {"custom_id": f"r{i}", "url": "/v1/chat/completions", "body": {**body, "messages": [message]}},
                {"custom_id": f"r{i}", "url": "/v1/completions", "body": {**body, "prompt": text, "logprobs": 2}},
                {"id": f"r{i}", "prompt": text, **body},
                {"prompt": text, **body},
                {"id": i, "messages": [message]},
            ]
        )
        if rng.random() < 0.05:
            line["temperature" if "body" not in line else "url"] = "hot"
        lines.append(b"{broken" if rng.random() < 0.03 else json.dumps(line, ensure_ascii=rng.random() < 0.5).encode())
    return lines
