"""What a bench shows: the same report as a table, Markdown, CSV or one JSON document."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from kitty_cli import output
from kitty_cli.commands.env import backend, versions
from kitty_cli.open_model import OpenedModel
from kitty_runtime.bench.load import Load, LoadResult
from kitty_runtime.bench.metrics import PERCENTILES
from kitty_runtime.bench.shapes import BenchMethod, ShapeResult
from kitty_runtime.memory import SequenceBytes, sequence_bytes

HOW = "in process, no HTTP"

DENSE = "16"
"""The method that kitty's settings are measured against."""


@dataclass(frozen=True)
class BenchReport:
    """What every format says beside the figures; `kv_bytes` is what `memory_bytes` leaves for the cache."""

    opened: OpenedModel
    methods: dict[str, BenchMethod]
    memory_bytes: int | None
    kv_bytes: int | None
    command: str

    def document(self) -> dict[str, Any]:
        model = self.opened.model
        return {
            "model": self.opened.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "backend": backend(model.device.type, model.dtype),
            "how": HOW,
            "versions": versions(),
            "command": self.command,
            "memory_bytes": self.memory_bytes,
            "methods": {name: asdict(method.config) for name, method in self.methods.items()},
        }

    def effective_bits(self, method: str, num_tokens: int) -> float:
        """Bits per key or value element of a sequence of that length, everything counted."""
        cost = self._cost(method, num_tokens)
        return 16 * cost.total / cost.dense

    def _cost(self, method: str, num_tokens: int) -> SequenceBytes:
        used, dtype = self.methods[method], self.opened.model.dtype
        return sequence_bytes(self.opened.geometry.layers, used.config, num_tokens, used.profile, dtype)

    def largest_batch(self, method: str, num_tokens: int) -> int | None:
        """Sequences of that length in `kv_bytes`."""
        return None if self.kv_bytes is None else self.kv_bytes // self._cost(method, num_tokens).total


def start(
    opened: OpenedModel,
    methods: dict[str, BenchMethod],
    memory_bytes: int | None,
    kv_bytes: int | None,
    command: str,
) -> BenchReport:
    """Say how it is measured."""
    output.note(f"bench: {HOW}; {' against '.join(methods)}; versions: " + _version_line())
    if opened.model.dtype.itemsize > 2:
        dtype = str(opened.model.dtype).removeprefix("torch.")
        output.note(f"the model is in {dtype}: unpacked tokens, and all of method {DENSE}, are too")
    return BenchReport(opened, methods, memory_bytes, kv_bytes, command)


def _version_line() -> str:
    found = versions()
    return ", ".join(f"{name} {found[name]}" for name in ("kitty", "python", "torch", "transformers", "triton"))


@dataclass(frozen=True)
class _Row:
    """One line of a table: raw values, None where there is none."""

    method: str
    batch: int
    test: str
    kv_bytes: int
    effective_bits: float
    largest_batch: int | None
    tok_per_s: float | None = None
    tok_per_s_sd: float | None = None
    ratio_to_16: float | None = None
    peak_bytes: int | None = None
    error: str = ""


def _shape_rows(report: BenchReport, results: Sequence[ShapeResult]) -> list[_Row]:
    dense = {(r.shape, label): mean for r in results if r.method == DENSE for label, mean, _, _ in r.tests}
    rows = []
    for result in results:
        shape = result.shape
        num_tokens = shape.input_len + shape.output_len
        largest = report.largest_batch(result.method, num_tokens)
        facts = (result.kv_bytes, report.effective_bits(result.method, num_tokens), largest)
        peaks = (result.prompt_peak_bytes, result.generation_peak_bytes)
        for (label, mean, sd, _), peak in zip(result.tests, peaks, strict=False):
            base = dense.get((shape, label))
            ratio = mean / base if base and result.method != DENSE else None
            rows.append(_Row(result.method, shape.batch_size, label, *facts, mean, sd, ratio, peak))
        if result.error:
            label = f"pp{shape.input_len}, tg{shape.output_len}"
            rows.append(_Row(result.method, shape.batch_size, label, *facts, error=result.error))
    return rows


def show_shapes(report: BenchReport, results: Sequence[ShapeResult], format: str) -> None:
    """Tokens per second of prompts (pp) and of generation (tg) at a depth (d), mean +- standard deviation."""
    rows = _shape_rows(report, results)
    if format == "json":
        samples = [
            {
                **asdict(r.shape),
                "method": r.method,
                "prompt_tok_per_s": r.prompt_tok_per_s,
                "generation_tok_per_s": r.generation_tok_per_s,
            }
            for r in results
        ]
        output.json_document({**report.document(), "results": [asdict(row) for row in rows], "samples": samples})
        return
    if format == "csv":
        _csv([asdict(row) for row in rows])
        return
    has_peaks = any(row.peak_bytes is not None for row in rows)
    columns = ["method", "batch", "test", "tok/s", "x of 16 bits", "KV", "bits/element"]
    columns += ["peak"] if has_peaks else []
    columns += ["largest batch"] if report.memory_bytes else []
    lines = []
    for row in rows:
        rate = row.error or f"{row.tok_per_s:.2f} +- {row.tok_per_s_sd:.2f}"
        ratio = "" if row.ratio_to_16 is None else f"{row.ratio_to_16:.2f}"
        line = [
            row.method,
            str(row.batch),
            row.test,
            rate,
            ratio,
            output.size(row.kv_bytes),
            f"{row.effective_bits:.2f}",
        ]
        line += ["" if row.peak_bytes is None else output.size(row.peak_bytes)] if has_peaks else []
        line += [str(row.largest_batch)] if report.memory_bytes else []
        lines.append(line)
    _table(columns, lines, format, text_columns=3)


_LOAD_FIGURES = (
    "completed", "failed", "duration_s", "request_throughput", "output_throughput", "total_token_throughput",
    "max_running", "num_preemptions", "prompts_share", "decode_share",
)  # fmt: skip


def show_load(report: BenchReport, load: Load, results: Sequence[LoadResult], format: str) -> None:
    """A line per figure, a column per method."""
    if format == "json":
        described = asdict(load) | {"request_rate": None if math.isinf(load.request_rate) else load.request_rate}
        found = [{"method": r.method, **r.figures, "kv_bytes": r.kv_bytes, "peak_bytes": r.peak_bytes} for r in results]
        samples = {r.method: [asdict(times) for times in r.samples] for r in results}
        output.json_document({**report.document(), "load": described, "results": found, "samples": samples})
        return
    if format == "csv":
        _csv([{"method": r.method, **r.figures, "kv_bytes": r.kv_bytes} for r in results])
        return
    names = list(_LOAD_FIGURES)
    for kind in ("ttft", "tpot", "itl", "e2el"):
        names += [f"{which}_{kind}_ms" for which in ("mean", "median", *(f"p{p}" for p in PERCENTILES))]
    lines = [[name, *(_figure(r.figures.get(name)) for r in results)] for name in names]
    lines.append(["KV cache allocated", *(output.size(r.kv_bytes) for r in results)])
    _table(["", *(r.method for r in results)], lines, format, text_columns=1)


def _figure(value: float | int | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"


def _csv(rows: Sequence[dict[str, Any]]) -> None:
    """Raw values under their names."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    output.text(text.getvalue(), end="")


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]], format: str, text_columns: int) -> None:
    if format == "md":
        rule = ["---" if i < text_columns else "--:" for i in range(len(columns))]
        for line in (columns, rule, *lines):
            output.text("| " + " | ".join(line) + " |")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < text_columns else "right", overflow="fold")
    for line in lines:
        table.add_row(*line)
    output.show(table)
