"""Malformed lines by the thousand among good ones: no crash, every good row answered, every bad one named."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from batch_case import comparable, records_of, run_files
from fake_engine import CONTEXT, FakeEngine, fake_model

from kitty_runtime.batch import lines, parameters, records, source
from kitty_runtime.batch.lines import parse_row
from kitty_runtime.batch.problems import LineError, RowError
from kitty_runtime.batch.requests import request_of

MANY = pytest.param(1000, marks=pytest.mark.slow)


def good(i):
    """A good row in one of the forms, with or without an id of its own."""
    message = {"role": "user", "content": f"row {i} \u00e9"}
    return [
        {"custom_id": f"g{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p", "max_tokens": 3}},
        {"custom_id": f"g{i}", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [message]}},
        {"id": f"g{i}", "prompt": f"row {i}", "max_tokens": 4},
        {"messages": [message], "max_tokens": 2},
    ][i % 4]


def good_line(i):
    return json.dumps(good(i)).encode()


def with_id(i, **body):
    """A simple line whose id can be read and whose request is wrong."""
    return json.dumps({"id": f"b{i}", "prompt": "hi", **body}).encode()


def cut(rng, i):
    line = good_line(i)
    return line[: rng.randrange(1, len(line))]


def flipped(rng, i):
    """One byte, set to one that JSON never has there."""
    line = bytearray(good_line(i))
    line[rng.randrange(len(line))] = rng.choice([0x00, 0x1F, 0xFF, 0xC0, 0x80])
    return bytes(line)


def surrogate(rng, i):
    return b'{"id": "b%d", "prompt": "a\\u%04x"}' % (i, rng.randrange(0xD800, 0xE000))


# Each makes one bad line. Those with an id that can be read get a 400, the others an error with their line.
UNREADABLE = {
    "cut off": cut,
    "a byte that is none": flipped,
    "random bytes": lambda rng, i: bytes(b for b in rng.randbytes(rng.randint(1, 200)) if b not in b"\n\r") + b"\xff",
    "latin-1": lambda rng, i: b'{"prompt": "caf\xe9 ' + bytes([rng.randrange(0xA0, 0x100)]) + b'"}',
    "utf-16": lambda rng, i: ("\ufeff" + json.dumps({"prompt": f"x{i}"})).encode("utf-16-le").replace(b"\n", b""),
    "nested too deeply": lambda rng, i: rng.choice([b"[", b'{"a":', b'{"prompt":[']) * rng.randint(3000, 5000),
    "no object": lambda rng, i: rng.choice([b"[]", b"null", b"true", b"0", b'"text"', b"[[1,2],{}]", b"-1e999"]),
    "no constants of JSON": lambda rng, i: (
        b'{"prompt": "x", "top_p": ' + rng.choice([b"NaN", b"Infinity", b"-Infinity"]) + b"}"
    ),
    "endless integers": lambda rng, i: b'{"prompt": "x", "seed": ' + b"7" * rng.randint(4301, 9000) + b"}",
    "keys twice": lambda rng, i: b'{"id": "b%d", "prompt": "x", "prompt": "y"}' % i,
    "two objects": lambda rng, i: good_line(i) + rng.choice([b"", b" ", b","]) + good_line(i),
    "nul": lambda rng, i: b"\x00" * rng.randint(1, 50) + good_line(i),
    "no id in an envelope": lambda rng, i: json.dumps(
        {"custom_id": rng.choice([None, "", 5, [], {}, True]), "url": "/v1/completions", "body": {"prompt": "x"}}
    ).encode(),
    "python": lambda rng, i: repr(good(i)).encode(),
    "csv": lambda rng, i: b"b%d,hello,0.7" % i,
}
WRONG = {
    "surrogates": surrogate,
    "types": lambda rng, i: (
        with_id(
            i,
            **{
                rng.choice(
                    ["max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "stop_token_ids"]
                ): rng.choice(["x", {"a": 1}, [{}], [[1]], "", "1e3"])
            },
        )
        .replace(b'"stop": "x"', b'"stop": 1')
        .replace(b'"stop": "1e3"', b'"stop": 2')
    ),
    "ranges": lambda rng, i: with_id(
        i,
        **dict(
            [
                rng.choice(
                    [
                        ("max_tokens", 0),
                        ("max_tokens", 2**31),
                        ("temperature", -1),
                        ("temperature", 1e308),
                        ("top_p", 0),
                        ("top_p", 1e-320 - 1),
                        ("top_k", 2**40),
                        ("min_p", 1.01),
                        ("seed", 2**63),
                        ("logprobs", 21),
                        ("n", rng.randint(2, 9)),
                        ("stop", [""]),
                        ("stop_token_ids", [999_999]),
                    ]
                )
            ]
        ),
    ),
    "prompts": lambda rng, i: json.dumps(
        {"id": f"b{i}", "prompt": rng.choice([None, 5, {}, [], ["a", "b"], [1, "a"], [-1], [10**9], [[]], True])}
    ).encode(),
    "messages": lambda rng, i: json.dumps(
        {
            "custom_id": f"b{i}",
            "url": "/v1/chat/completions",
            "body": {
                "messages": rng.choice(
                    [
                        [],
                        "hi",
                        [5],
                        [{}],
                        [{"role": "user"}],
                        [{"role": "cat", "content": "hi"}],
                        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                        [{"role": "user", "content": {"text": "x"}}],
                        [{"role": "user", "content": "refuse"}],
                    ]
                )
            },
        }
    ).encode(),
    "envelopes": lambda rng, i: json.dumps(
        {
            "custom_id": f"b{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x"},
            **rng.choice([{"method": "GET"}, {"url": "/v1/embeddings"}, {"url": 5}, {"body": []}, {"body": None}]),
        }
    ).encode(),
    "too long": lambda rng, i: with_id(i, prompt="x" * rng.randint(CONTEXT, CONTEXT + 100)),
    "unsupported": lambda rng, i: with_id(
        i, **rng.choice([{"tools": [{}]}, {"response_format": {"type": "json_object"}}, {"logit_bias": {"1": 5}}])
    ),
}


@pytest.mark.parametrize("num_lines", [40, MANY])
@pytest.mark.parametrize("name", [*UNREADABLE, *WRONG])
def test_many_lines_of_a_kind(name, num_lines, tmp_path):
    rng = random.Random(name)
    make = {**UNREADABLE, **WRONG}[name]
    bad: dict[int, bytes] = {}
    rows: list[bytes] = []
    good_ids = []
    for i in range(num_lines):
        if i % 20 == 0:
            rows.append(good_line(i // 20))
            good_ids.append(good(i // 20).get("custom_id", good(i // 20).get("id", f"line-{len(rows)}")))
        rows.append(make(rng, i).replace(b"\n", b" ").replace(b"\r", b" "))
        bad[len(rows)] = rows[-1]
    rng_ends = rng.choices([b"\n", b"\r\n", b"\n\n", b" \n"], k=len(rows))
    numbers = []  # of each row in the file, where blank lines count
    at = 1
    for end in rng_ends:
        numbers.append(at)
        at += end.count(b"\n")
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + b"".join(row + end for row, end in zip(rows, rng_ends, strict=True)).rstrip(b"\n")
    )
    out = tmp_path / "out.jsonl"
    engine = FakeEngine(max_num_seqs=32)
    summary = run_files(path, out, engine=engine)

    found = records_of(out)
    assert len(found) == len(rows)
    assert (summary.num_ok, summary.num_failed) == (len(good_ids), num_lines)
    by_line = {record["kitty"]["line"]: record for record in found}
    assert len(by_line) == len(rows)
    for row, number in enumerate(numbers, start=1):
        record = by_line[number]
        if row not in bad:
            assert record["response"]["status_code"] == 200
            assert record["error"] is None
            continue
        if name in UNREADABLE:
            assert (record["custom_id"], record["response"], record["error"]["line"]) == (None, None, number)
            problem = record["error"]
        else:
            assert (record["error"], record["response"]["status_code"]) == (None, 400)
            assert record["custom_id"].startswith("b")
            problem = record["response"]["body"]["error"]
            assert problem["type"] == "invalid_request_error"
            assert problem["param"]
        assert problem["code"]
        assert 0 < len(problem["message"]) < 300
    assert len(engine.seen) == len(good_ids)
    assert run_files(path, out, resume=True).num_kept == len(rows)
    assert len(comparable(out)) == len(rows)


VALUES = (None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, 1e308, -0.0, "", "x", "\ud800", "\x00", [], {}, [[]])
VALUES += ([None], [0], ["x"], [{}], {"type": "text"}, {"role": "user", "content": "x"}, "user", "stop", 1e-320)
NAMES = sorted(
    {*parameters.SUPPORTED, *parameters.NEUTRAL, "custom_id", "id", "url", "method", "body", "role", "content"}
)


def changed(rng, value):
    """The value with a part replaced, added or removed somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        found = dict(value)
        name = rng.choice([*found, rng.choice(NAMES)])
        if rng.random() < 0.15:
            found.pop(name, None)
        else:
            found[name] = changed(rng, found[name]) if name in found else rng.choice(VALUES)
        return found
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], changed(rng, value[at]), *value[at + rng.randrange(2) :]]
    return rng.choice(VALUES)


def test_requests_with_parts_changed():
    """Whatever a request holds, it is a request, a 400 that names a parameter, or a line that cannot be read."""
    rng = random.Random(0)
    model, outcomes = fake_model(), Counter()
    for i in range(4000):
        line = good(i)
        for _ in range(rng.randint(1, 3)):
            line = changed(rng, line)
        raw = json.dumps(line).encode()
        entry = source.RowEntry(lines.identify(raw, 7).key, 7, 0, len(raw), "row")
        try:
            request = request_of(parse_row(raw, 7), model)
        except LineError as error:
            outcomes["line"] += 1
            assert entry.custom_id is None
            record = records.line_error_record(entry, error, "s")
        except RowError as error:
            outcomes["row"] += 1
            assert entry.custom_id is not None
            record = records.row_error_record(entry, error, "s")
        else:
            outcomes["request"] += 1
            assert request.id == entry.key
            continue
        found = json.loads(records.encoded(record))
        assert found["custom_id"] == entry.custom_id
        assert found["error"] or found["response"]["body"]["error"]["param"]
    assert min(outcomes.values()) > 200


def test_lines_that_are_too_long_are_never_read_whole(tmp_path, monkeypatch):
    limit = 5000
    for module in (lines, source):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", limit)
    monkeypatch.setattr(source, "_PIECE_BYTES", 700)
    rows = []
    for i in range(40):
        filling = limit - len(json.dumps({"id": f"b{i}", "prompt": ""})) - 1
        rows += [good_line(i), with_id(i, prompt="x" * (filling + i % 3)), with_id(i, prompt="x" * (limit + 1000 * i))]
        rows[-2] = rows[-2].replace(b'"b', b'"c')
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(rows))
    out = tmp_path / "out.jsonl"
    run_files(path, out)
    found = {record["kitty"]["line"]: record for record in records_of(out)}
    assert len(found) == len(rows)
    for i in range(40):
        assert found[3 * i + 1]["response"]["status_code"] == 200
        assert found[3 * i + 3]["error"]["code"] == "line_too_large"
        edge = found[3 * i + 2]
        if i % 3 == 0:  # with its line end exactly as long as allowed
            assert edge["response"]["body"]["error"]["code"] == "context_length_exceeded"
        else:
            assert edge["error"]["code"] == "line_too_large"
    assert run_files(path, out, resume=True).num_kept == len(rows)
