"""One line of a batch: what is read out of it, and what is wrong with it."""

from __future__ import annotations

import json

import pytest
from fake_engine import fake_model

from kitty_runtime.batch import lines
from kitty_runtime.batch.lines import identify, parse_row, row_sha256, strip_line
from kitty_runtime.batch.problems import LineError, RowError
from kitty_runtime.batch.requests import request_of
from kitty_runtime.batch.settings import row_seed, settings_sha256
from kitty_runtime.config import preset
from kitty_runtime.engine.request import SamplingParams

HI = [{"role": "user", "content": "hi"}]


def chat(**body):
    return {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": HI, **body},
    }


def completion(**body):
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", **body}}


def parse(line, number=1):
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    return parse_row(strip_line(raw), number)


def sampling(line):
    return dict(parse(line).sampling.values)


# --- good lines --------------------------------------------------------------------------------------------------


def test_both_forms_of_both_kinds():
    row = parse(chat(model="gpt-4o-mini", user="me"))
    assert (row.custom_id, row.kind, row.messages, row.prompt) == (
        "a",
        "chat",
        ({"role": "user", "content": "hi"},),
        None,
    )
    assert parse({"id": "a", "messages": HI}) == row
    row = parse(completion())
    assert (row.kind, row.messages, row.prompt) == ("completions", None, "hi")
    assert parse({"id": "a", "prompt": "hi"}) == row
    assert parse(completion(prompt=[5, 6])).prompt == (5, 6)
    assert parse(completion(prompt=["hi"])).prompt == "hi"
    assert parse(completion(prompt=[[5, 6]])).prompt == (5, 6)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "line-7"),
        ({"id": "x"}, "x"),
        ({"id": 12}, "12"),
        ({"custom_id": "y", "id": "x"}, "y"),
        ({"id": None}, "line-7"),
    ],
)
def test_ids_of_simple_lines(given, expected):
    line = {"prompt": "hi", **given}
    assert parse(line, 7).custom_id == expected
    assert identify(json.dumps(line).encode(), 7).key == expected


def test_content_in_parts_and_the_newer_name_of_a_role():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = parse(chat(messages=[{"role": "developer", "content": "be nice"}, {"role": "user", "content": parts}]))
    assert row.messages == ({"role": "system", "content": "be nice"}, {"role": "user", "content": "a\nb"})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5.0}, {"max_tokens": 5}),
        (
            {"temperature": 1, "top_p": 0.5, "top_k": 4, "min_p": 0.1},
            {"temperature": 1.0, "top_p": 0.5, "top_k": 4, "min_p": 0.1},
        ),
        ({"top_k": -1}, {"top_k": 0}),
        ({"temperature": 1e-300}, {"temperature": 1e-300}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "\n"]}, {"stop": ("x", "\n")}),
        ({"stop": []}, {"stop": ()}),
        ({"stop_token_ids": [1, 2], "min_tokens": 3}, {"stop_token_ids": (1, 2), "min_tokens": 3}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"logprobs": True}, {"num_logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 5}, {"num_logprobs": 5}),
        ({"logprobs": False}, {}),
        ({"temperature": None, "stop": None, "tools": None, "nonsense": None}, {}),
        ({"n": 1, "stream": False, "tools": [], "response_format": {"type": "text"}, "logit_bias": {}}, {}),
        ({"presence_penalty": 0.0, "frequency_penalty": 0, "tool_choice": "none"}, {}),
        ({"user": "u", "metadata": {"a": 1}, "store": True, "service_tier": "flex"}, {}),
    ],
)
def test_parameters(body, expected):
    assert sampling(chat(**body)) == expected
    assert sampling({"messages": HI, **body}) == expected


def test_parameters_of_completions():
    assert sampling(completion(logprobs=3)) == {"num_logprobs": 3}
    assert sampling(completion(logprobs=False, echo=False, suffix="", best_of=1)) == {}
    assert parse(completion(ignore_eos=True)).sampling.ignore_eos


def test_simple_lines_may_have_columns_of_their_own():
    line = {"prompt": "hi", "answer": 42, "category": "math", "model": "gpt-4"}
    assert sampling(line) == {}
    identity = identify(json.dumps(line).encode(), 1)
    assert (identity.model, identity.ignored) == ("gpt-4", ("answer", "category"))
    assert identify(json.dumps(chat(model="m", nonsense=1)).encode(), 1).ignored == ()


def test_variables_for_the_template():
    assert parse(chat(chat_template_kwargs={"enable_thinking": False})).template_options == {"enable_thinking": False}
    with pytest.raises(RowError, match="cannot set tokenize"):
        parse(chat(chat_template_kwargs={"tokenize": True}))


@pytest.mark.parametrize("around", [b"%s", b"%s\r\n", b"\xef\xbb\xbf%s\n", b" \t%s  \r\n", b"\r\n\xef\xbb\xbf %s"])
def test_what_is_around_a_line_is_no_part_of_it(around):
    line = json.dumps(chat()).encode()
    assert strip_line(around % line) == line
    assert row_sha256(strip_line(around % line)) == row_sha256(line)
    assert parse(around % line) == parse(chat())


# --- requests that are wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"messages": None}, "messages", "missing_parameter"),
        ({"messages": []}, "messages", "invalid_type"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [*HI, {"role": "tool", "content": "hi"}]}, "messages[1].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]", "unsupported_content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "invalid_type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "unsupported_content",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "invalid_unicode"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "unsupported_parameter",
        ),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"max_tokens": 5.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_tokens": 10**40}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": 1, "min_tokens": 2}, "min_tokens", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": 1000}, "temperature", "invalid_value"),
        ({"temperature": 10**400}, "temperature", "invalid_value"),
        ({"temperature": [1]}, "temperature", "invalid_type"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_p": 1.1}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"seed": "x"}, "seed", "invalid_type"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": [1]}, "stop", "invalid_type"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"stop": ["\udfff"]}, "stop", "invalid_unicode"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_type"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "invalid_type"),
        ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
        ({"logprobs": 5}, "logprobs", "invalid_type"),
        ({"top_logprobs": 5}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"n": True}, "n", "unsupported_parameter"),
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"logit_bias": {"50256": -100}}, "logit_bias", "unsupported_parameter"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
        ({"frequency_penalty": -1}, "frequency_penalty", "unsupported_parameter"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
    ],
)
def test_wrong_requests_name_the_parameter(body, param, code):
    with pytest.raises(RowError) as chat_form:
        parse(chat(**body))
    assert (chat_form.value.param, chat_form.value.code) == (param, code)
    assert chat_form.value.message.startswith(param)
    assert len(chat_form.value.message) < 200
    if "messages" not in body:
        with pytest.raises(RowError) as simple_form:
            parse({"messages": HI, **body})
        assert simple_form.value.message == chat_form.value.message


@pytest.mark.parametrize(
    ("line", "param", "code"),
    [
        ({**chat(), "method": "GET"}, "method", "invalid_value"),
        ({**chat(), "url": "/v1/embeddings"}, "url", "invalid_url"),
        ({**chat(), "url": None}, "url", "invalid_url"),
        ({**chat(), "url": ["/v1/completions"]}, "url", "invalid_url"),
        ({**chat(), "body": "hi"}, "body", "invalid_type"),
        ({"custom_id": "a", "url": "/v1/completions"}, "body", "invalid_type"),
        (chat(max_token=5), "max_token", "unknown_parameter"),
        (chat(**{"\n" * 500: 5}), None, "unknown_parameter"),
        (completion(prompt=None), "prompt", "missing_parameter"),
        (completion(prompt=5), "prompt", "invalid_type"),
        (completion(prompt=["a", "b"]), "prompt", "invalid_value"),
        (completion(prompt=[1, "b"]), "prompt", "invalid_type"),
        (completion(prompt=[1, -1]), "prompt", "invalid_type"),
        (completion(prompt=[10**30]), "prompt", "invalid_type"),
        (completion(prompt="\ud83d"), "prompt", "invalid_unicode"),
        (completion(echo=True), "echo", "unsupported_parameter"),
        (completion(suffix="x"), "suffix", "unsupported_parameter"),
        (completion(best_of=2), "best_of", "unsupported_parameter"),
        (completion(logprobs=True), "logprobs", "invalid_type"),
        (completion(logprobs=21), "logprobs", "invalid_value"),
        (completion(top_logprobs=2), "top_logprobs", "invalid_value"),
        ({"id": "a"}, "prompt", "missing_parameter"),
        ({"id": "a", "prompt": "x", "messages": HI}, "prompt", "missing_parameter"),
    ],
)
def test_wrong_requests_of_other_forms(line, param, code):
    with pytest.raises(RowError) as caught:
        parse(line)
    assert (caught.value.code, len(caught.value.message) < 200) == (code, True)
    assert param in (None, caught.value.param)
    assert identify(json.dumps(line).encode(), 1).key == "a"


# --- lines that cannot be read -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"{", "invalid_json"),
        (b'{"prompt": "hi"', "invalid_json"),
        (b'{"prompt": "hi"}}', "invalid_json"),
        (b'{"prompt": "hi"} {"prompt": "hi"}', "invalid_json"),
        (b"{'prompt': 'hi'}", "invalid_json"),
        (b'{"prompt": "a\tb"}', "invalid_json"),
        (b'{"prompt": "a\x00b"}', "invalid_json"),
        (b"\x00" * 40, "invalid_json"),
        (b'{"prompt": "\\x"}', "invalid_json"),
        (b'{"prompt": "hi", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "hi", "temperature": -Infinity}', "invalid_json"),
        (b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
        (b'{"prompt": "hi", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "invalid_json"),
        (b'{"prompt": "hi", "prompt": "ho"}', "duplicate_key"),
        (b'{"prompt": "hi", "metadata": {"a": 1, "a": 2}}', "duplicate_key"),
        (b"[1, 2]", "not_an_object"),
        (b'"hi"', "not_an_object"),
        (b"5", "not_an_object"),
        (b"null", "not_an_object"),
        (b'{"prompt": "caf\xe9"}', "not_utf8"),
        (b"\xff\xfe{\x00}\x00", "not_utf8"),
        (b'{"id": "", "prompt": "hi"}', "invalid_custom_id"),
        (b'{"id": "\\ud800", "prompt": "hi"}', "invalid_custom_id"),
        (b'{"id": true, "prompt": "hi"}', "invalid_custom_id"),
        (b'{"id": [1], "prompt": "hi"}', "invalid_custom_id"),
        (b'{"id": 1.5, "prompt": "hi"}', "invalid_custom_id"),
        (b'{"id": "' + b"x" * 513 + b'", "prompt": "hi"}', "invalid_custom_id"),
        (b'{"url": "/v1/completions", "body": {"prompt": "hi"}}', "invalid_custom_id"),
        (b'{"custom_id": 5, "url": "/v1/completions", "body": {"prompt": "hi"}}', "invalid_custom_id"),
    ],
)
def test_lines_that_cannot_be_read(raw, code):
    with pytest.raises(LineError) as caught:
        parse(raw, 3)
    assert caught.value.code == code
    assert caught.value.message.isascii()
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 200
    assert identify(strip_line(raw), 3).key == 3


def test_a_line_that_is_too_long(monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    with pytest.raises(LineError, match="The line has 123 bytes, 100 are the limit") as caught:
        parse(b'{"prompt": "' + b"x" * 109 + b'"}')
    assert caught.value.code == "line_too_large"


# --- requests for the engine -------------------------------------------------------------------------------------


def test_a_request_for_the_engine():
    request = request_of(parse(chat(temperature=0, seed=5, max_tokens=3, stop_token_ids=[9, 1])), fake_model())
    assert request.id == "a"
    assert bytes(i - 3 for i in request.prompt_ids).decode() == "<user>hi<assistant>"
    assert request.sampling == SamplingParams(max_tokens=3, temperature=0.0, seed=5, stop_token_ids=(9, 1))


def test_special_tokens_are_for_prompts_alone():
    """A template writes its own."""
    assert request_of(parse(completion()), fake_model()).prompt_ids[0] == 2
    assert request_of(parse(completion(prompt=[7])), fake_model()).prompt_ids == (7,)


def test_the_lines_values_go_over_the_defaults():
    model = fake_model({"temperature": 0.3, "top_k": 7, "max_tokens": 11})
    row = parse(chat(temperature=0.9, ignore_eos=True))
    seed = row_seed(0, "a")
    assert request_of(row, model).sampling == SamplingParams(max_tokens=11, temperature=0.9, top_k=7, seed=seed)


def test_the_seed_of_a_row_is_that_of_its_id():
    """Neither its place nor what else runs has a part in it, and 63 bits hold it."""
    seeds = {row_seed(seed, name) for seed in range(10) for name in ("a", "b", "\ud800")}
    assert len(seeds) == 30
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(1, "a") == row_seed(1, "a")


def test_the_hash_is_of_all_settings():
    def of(config="weighted", seed=0, weights="w", **sampling):
        return settings_sha256(preset(config), SamplingParams(**sampling), seed, {"weights": weights})

    others = [of("kitty"), of(seed=1), of(weights="x"), of(temperature=0.5), of(max_tokens=5), of(stop_token_ids=(1,))]
    assert len({of(), *others}) == 7
    assert of() == of()


@pytest.mark.parametrize(
    ("line", "param", "code"),
    [
        (completion(prompt=[]), "prompt", "invalid_value"),
        (completion(prompt=[1, 259]), "prompt", "invalid_token"),
        (completion(stop_token_ids=[259]), "stop_token_ids", "invalid_token"),
        (completion(min_tokens=12), "min_tokens", "invalid_value"),
        (chat(messages=[{"role": "user", "content": "refuse"}]), "messages", "chat_template_error"),
        (chat(messages=[{"role": "user", "content": "hi"}]), "messages", "no_chat_template"),
    ],
)
def test_requests_that_the_model_cannot_answer(line, param, code):
    model = fake_model({"max_tokens": 11})
    if code == "no_chat_template":
        model.tokenizer.chat_template = None
    with pytest.raises(RowError) as caught:
        request_of(parse(line), model)
    assert (caught.value.param, caught.value.code) == (param, code)
