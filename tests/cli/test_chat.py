"""`kitty chat`: one answer in a pipe, a conversation on one cache, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, TEMPLATE, save_model

from kitty_cli import chat_loop
from kitty_runtime.chat import ChatSession
from kitty_runtime.config import PRESETS, preset
from kitty_runtime.errors import DataError, ModelLoadError

GREEDY = {"max_tokens": 12, "temperature": 0}
LONG = "the value of the list is not a name in this class and the function returns an object . " * 20


# --- one answer --------------------------------------------------------------------------------------------------


def test_a_pipe_gets_one_answer(run, model_dir):
    """The real process: only the answer on stdout, one line each for model, cache, profile and figures on stderr."""
    done = run("chat", model_dir, "--max-tokens", "8", "--temperature", "0", stdin="the value\n", FORCE_COLOR="")
    assert done.code == 0
    assert done.stdout.endswith("\n")
    assert len(done.stdout.splitlines()) == 1
    assert done.stdout.strip()
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == "tiny-llama on cpu, float32; backend: torch reference on CPU"
    said = "keys 2 bits, 0.125 of the key channels at 4 bits (weighted), clipped, values 2 bits, rotated; "
    assert lines[1].startswith(f"cache: {said}")
    assert lines[2].startswith("profile: none for this model")
    assert lines[3].startswith("prompt 5 tok, ")
    assert "generation 8 tok" in lines[3]
    assert len(lines) == 4


def test_an_argument_is_a_message_too(call, model_dir):
    asked = call("chat", model_dir, "the value", "--max-tokens", "8", "--temperature", "0")
    piped = call("chat", model_dir, "--max-tokens", "8", "--temperature", "0", stdin="the value\n")
    assert asked.code == piped.code == 0
    assert asked.stdout == piped.stdout != ""


def test_stdin_is_not_read_when_there_is_a_message(call, model_dir):
    done = call("chat", model_dir, "the value", "--max-tokens", "2", stdin=b"\xff\xfe")
    assert done.code == 0


@pytest.mark.parametrize("name", PRESETS)
def test_presets(call, model_dir, name):
    """A prompt long enough to pack pages."""
    done = call("chat", model_dir, LONG, "--preset", name, "--max-tokens", "4")
    assert done.code == 0
    assert done.stdout.strip()
    described = "16-bit pages" if name == "16" else f"values {PRESETS[name].v_bits} bits"
    assert described in done.stderr
    used = "profile: none for this model" if PRESETS[name].uses_profile else "profile: not used by this preset"
    assert used in done.stderr
    assert " 0 pages packed" not in done.stderr
    assert " pages packed" in done.stderr


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:x"])
def test_a_device_that_is_none(refused, model_dir, device):
    assert "Use auto, cpu, cuda or cuda:N." in refused(2, "chat", model_dir, "hi", "--device", device)


def test_bits_and_boost(call, model_dir):
    done = call("chat", model_dir, "the", "--bits", "2", "--boost", "0.1", "--max-tokens", "2")
    assert (done.code, "cache: keys 2 bits, 0.1 of the key channels at 4 bits" in done.stderr) == (0, True)
    done = call("chat", model_dir, "the", "-ctk", "4", "-ctv", "2", "--max-tokens", "2")
    assert (done.code, "cache: keys 4 bits, clipped, values 2 bits, rotated" in done.stderr) == (0, True)
    done = call("chat", model_dir, "the", "--bits", "16", "--max-tokens", "2")
    assert (done.code, "cache: 16-bit pages" in done.stderr) == (0, True)


@pytest.fixture
def never_loads(monkeypatch):
    """Fails the test if weights are loaded."""
    from kitty_runtime.models import loading

    monkeypatch.setattr(loading, "load_model", lambda *args, **kwargs: pytest.fail("weights were loaded"))


@pytest.mark.usefixtures("never_loads")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--bits", "4", "--boost", "0.1"], "boost_ratio 0.1 with k_bits 4"),
        (["--k-bits", "16"], "k_bits 16 with v_bits 2"),
        (["--bits", "8"], "k_bits is 8"),
        (["--boost", "-0.1"], "boost_ratio is -0.1"),
        (["--preset", "kitten"], "No preset is called 'kitten'"),
    ],
)
def test_flags_that_contradict(refused, model_dir, flags, said):
    assert said in refused(2, "chat", model_dir, "hi", *flags)


@pytest.mark.parametrize(
    "flags",
    [["--max-tokens", "0"], ["--temperature", "-1"], ["--top-p", "1.1"], ["--seed", "-1"], ["--seed", str(2**64)]],
)
def test_values_out_of_range(call, model_dir, flags):
    done = call("chat", model_dir, "hi", *flags)
    assert (done.code, done.stdout) == (2, "")
    assert flags[0] in done.stderr


@pytest.mark.usefixtures("never_loads")
@pytest.mark.parametrize("stdin", ["", " \n\t\n"])
def test_empty_input(refused, model_dir, stdin):
    assert "The message is empty." in refused(1, "chat", model_dir, stdin=stdin)
    assert "The message is empty." in refused(1, "chat", model_dir, "")


@pytest.mark.usefixtures("never_loads")
def test_input_that_is_not_utf8(refused, model_dir):
    assert "not UTF-8 text (byte 3)" in refused(1, "chat", model_dir, stdin=b"caf\xe9")


@pytest.mark.usefixtures("never_loads")
def test_a_message_where_the_model_belongs(refused):
    said = refused(2, "chat", "what is a cache?")
    assert "'what is a cache?' is not a model." in said
    assert "kitty chat demo 'what is a cache?'" in said


def test_a_folder_with_a_space_is_a_model(call, model_dir, tmp_path):
    folder = tmp_path / "my model"
    folder.symlink_to(model_dir)
    done = call("chat", folder, "--max-tokens", "2", stdin="the")
    assert (done.code, done.stdout.strip() != "") == (0, True)


@pytest.mark.parametrize("name", ["./nothing", "nothing.gguf"])
def test_models_that_are_not_there(refused, name):
    assert f"There is no {name}." in refused(1, "chat", name, "hi")


def test_preferred_model_that_is_not_there(refused, monkeypatch):
    monkeypatch.setenv("KITTY_MODEL", "./nothing")
    assert "KITTY_MODEL: There is no ./nothing." in refused(1, "chat", stdin="hi")


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory, tokenizer):
    """Without a chat template."""
    folder = save_model(tmp_path_factory.mktemp("models") / "plain", tokenizer)
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.usefixtures("never_loads")
def test_no_chat_template(refused, plain_dir):
    said = refused(1, "chat", plain_dir, "hi")
    assert "The model has no chat template." in said
    assert "--raw" in said


def test_raw_continues_the_text(call, plain_dir, model_dir):
    flags = ("the value of the", "--raw", "--max-tokens", "8", "--temperature", "0")
    done = call("chat", plain_dir, *flags)
    assert (done.code, "prompt 4 tok" in done.stderr) == (0, True)
    assert done.stdout == call("chat", model_dir, *flags).stdout


def test_raw_text_without_tokens(refused, plain_dir):
    assert "The message has no tokens." in refused(1, "chat", plain_dir, " ", "--raw")


def test_context_exceeded(refused, short_model_dir):
    said = refused(1, "chat", short_model_dir, LONG)
    assert "tokens, the model's context is 64." in said


def test_an_answer_ends_where_the_context_does(call, short_model_dir):
    done = call("chat", short_model_dir, "the value of the list", "--max-tokens", "500", "--temperature", "0")
    assert (done.code, "| length limit" in done.stderr) == (0, True)
    assert "prompt 8 tok" in done.stderr
    assert "generation 56 tok" in done.stderr


def test_seeds_repeat(call, model_dir):
    def answer(seed):
        return call("chat", model_dir, "the", "--temperature", "1", "--max-tokens", "12", "--seed", seed).stdout

    assert answer(1) == answer(1) != answer(2)


# --- profiles ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile_path(tmp_path_factory, model_dir, words, call):
    path = tmp_path_factory.mktemp("profiles") / "tiny.safetensors"
    flags = ("--num-samples", "1", "--max-seq-length", "512", "--no-held-out")
    assert call("profile", model_dir, "--data", words, *flags, "-o", path).code == 0
    return path


def test_own_profile_without_a_word(call, model_dir, profile_path):
    done = call("chat", model_dir, "the", "--profile", profile_path, "--max-tokens", "2")
    assert (done.code, f"profile: {profile_path}\n" in done.stderr) == (0, True)
    assert "Warning" not in done.stderr


def test_profile_of_other_weights_is_used_with_a_warning(call, tokenizer, tmp_path, profile_path):
    other = save_model(tmp_path / "other", tokenizer, seed=1)
    done = call("chat", other, "the", "--profile", profile_path, "--max-tokens", "2")
    assert done.code == 0
    assert f"Warning: {profile_path} was measured on tiny-llama, whose weights are not these." in done.stderr


@pytest.mark.usefixtures("never_loads")
def test_profile_of_another_geometry_is_refused(refused, tokenizer, tmp_path, profile_path):
    other = save_model(tmp_path / "other", tokenizer, num_key_value_heads=1)
    assert "2 KV heads of 32, the model 1 of 32" in refused(1, "chat", other, "hi", "--profile", profile_path)


def test_profile_that_the_preset_does_not_use(call, model_dir, profile_path):
    done = call("chat", model_dir, "the", "--preset", "kitty", "--profile", profile_path, "--max-tokens", "2")
    assert (done.code, "Warning: The dynamic policy does not use the profile" in done.stderr) == (0, True)


@pytest.mark.usefixtures("never_loads")
def test_profile_that_is_not_there(refused, model_dir, tmp_path):
    assert "There is no profile at" in refused(1, "chat", model_dir, "hi", "--profile", tmp_path / "none")


# --- interrupts --------------------------------------------------------------------------------------------------


def test_interrupt_in_a_pipe(model_dir):
    """SIGINT while the answer streams: what came so far, then 130."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kitty_cli.main", "chat", str(model_dir), "the value", "--max-tokens", "1900"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first
    assert stdout.endswith("\n")
    assert "Traceback" not in stderr
    assert stderr.rstrip().endswith("Interrupted.")


@pytest.mark.parametrize("wrapped", [False, True])
def test_interrupt_while_loading(call, model_dir, monkeypatch, wrapped):
    """transformers turns a Ctrl-C during its imports into an import error."""
    from kitty_runtime.models import loading

    def interrupted(*args, **kwargs):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            if not wrapped:
                raise
            raise ModelLoadError("cannot import") from error

    monkeypatch.setattr(loading, "load_model", interrupted)
    done = call("chat", model_dir, "hi")
    assert (done.code, done.stdout, done.stderr.strip()) == (130, "", "Interrupted.")


# --- conversations -----------------------------------------------------------------------------------------------


@pytest.fixture
def session(chat_model, tokenizer):
    """Greedy, in float64, with the paper's windows: pages are packed from token 160 on."""
    return ChatSession(chat_model, tokenizer, preset("kitty"), sampling=GREEDY)


def ask(session, message):
    pieces = []
    reply = session.reply(message, pieces.append)
    assert "".join(pieces) == reply.text
    return reply


def test_three_turns_keep_the_cache(session, chat_model, tokenizer):
    """Each turn reads only what is new; answers are those of a session that reads everything at once."""
    seen = 0
    for message in (LONG, "what is a name", LONG + "not"):
        reply = ask(session, message)
        fresh = ChatSession(chat_model, tokenizer, preset("kitty"), sampling=GREEDY)
        fresh.messages = session.messages[:-2]
        whole = ask(fresh, message)
        assert whole.text == reply.text
        assert fresh.messages == session.messages
        assert reply.num_prompt_tokens == whole.num_prompt_tokens - seen
        seen = session.num_stored
        assert seen == fresh.num_stored == whole.num_prompt_tokens + whole.num_new_tokens - 1
    assert session.engine.scheduler.pool.num_used == (seen - 32) // 128 > 5
    session.engine.check_integrity()


def test_an_end_token_is_read_with_the_next_turn(session, tokenizer):
    """The answer's end comes from the template; the model's own is not kept twice."""
    first = ask(session, "the value")
    words = tokenizer(first.text)["input_ids"]
    session.sampling = replace(session.sampling, stop_token_ids=(2, words[3]))
    session.clear()
    stopped = ask(session, "the value")
    assert stopped.finish_reason == "stop"
    assert tokenizer(stopped.text)["input_ids"] == words[:3]
    assert session.num_stored == 5 + 3
    second = ask(session, "the name")
    assert second.num_prompt_tokens == len(tokenizer("<end><user>the name<end><assistant>")["input_ids"])


def test_regenerate(session):
    first = ask(session, "the value")
    again = ask(session, session.regenerate())
    assert again.text == first.text
    assert [m["role"] for m in session.messages] == ["user", "assistant"]
    session.clear()
    with pytest.raises(DataError, match="no answer to generate again"):
        session.regenerate()
    session.messages = [{"role": "assistant", "content": "alone"}]
    with pytest.raises(DataError, match="no answer to generate again"):
        session.regenerate()


def test_clear_forgets(session):
    first = ask(session, "the value")
    ask(session, "the name")
    session.clear()
    assert session.num_stored == 0
    assert session.messages == []
    assert ask(session, "the value").text == first.text


def test_system_prompt_stays(chat_model, tokenizer):
    session = ChatSession(chat_model, tokenizer, preset("kitty"), sampling=GREEDY, system_prompt="not a list")
    reply = ask(session, "the value")
    assert reply.num_prompt_tokens == 5 + 5
    session.clear()
    assert session.messages == [{"role": "system", "content": "not a list"}]
    assert ask(session, "the value").text == reply.text


def test_stopping_keeps_the_conversation(session):
    """Ends after the token at hand; the next turn goes on from there."""
    pieces = []
    reply = session.reply("the value", pieces.append, lambda: len(pieces) >= 6)
    assert reply.finish_reason == "aborted"
    assert 0 < reply.num_new_tokens < 12
    assert session.messages[-1] == {"role": "assistant", "content": reply.text}
    cached = session.num_stored
    assert ask(session, "the name").num_prompt_tokens < cached


def test_a_second_interrupt_leaves_a_whole_session(session):
    ask(session, "the value")

    def raising(piece):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.reply("the name", raising)
    assert session.messages[0] == {"role": "user", "content": "the value"}
    assert len(session.messages) == 2
    assert session.num_stored == 0
    reply = ask(session, "the name")
    assert reply.finish_reason == "length"


def test_a_message_that_does_not_fit_leaves_the_conversation(session):
    first = ask(session, "the value")
    with pytest.raises(DataError, match="the model's context is 2048"):
        ask(session, LONG * 8)
    assert len(session.messages) == 2
    assert session.num_stored > 0
    assert ask(session, session.regenerate()).text == first.text


def test_bytes_that_are_no_text(session):
    """What Python makes of a terminal's bytes that are not UTF-8."""
    with pytest.raises(DataError, match="The message is not UTF-8 text"):
        ask(session, b"caf\xe9".decode(errors="surrogateescape"))
    assert session.messages == []


def test_template_that_rewrites_earlier_turns(chat_model, tokenizer):
    """Some drop the thoughts of earlier answers: the conversation is read again, as a new session would."""

    def shortening(self, messages, **options):
        kept = [m if m is messages[-1] else {**m, "content": m["content"].split()[0]} for m in messages]
        return type(tokenizer).apply_chat_template(tokenizer, kept, **options)

    class Shortening:
        chat_template = TEMPLATE

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, *args, **kwargs):
            return tokenizer(*args, **kwargs)

        apply_chat_template = shortening

    session = ChatSession(chat_model, Shortening(), preset("kitty"), sampling=GREEDY)
    ask(session, "the value of a list")
    reply = ask(session, "the name")
    fresh = ChatSession(chat_model, Shortening(), preset("kitty"), sampling=GREEDY)
    fresh.messages = session.messages[:2]
    whole = ask(fresh, "the name")
    assert (reply.text, reply.num_prompt_tokens) == (whole.text, whole.num_prompt_tokens)
    assert reply.num_prompt_tokens == session.num_stored - reply.num_new_tokens + 1


def test_template_that_refuses(chat_model, tokenizer):
    from copy import deepcopy

    strict = deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('System role not supported') }}"
    session = ChatSession(chat_model, strict, preset("kitty"), sampling=GREEDY, system_prompt="be nice")
    with pytest.raises(DataError, match="chat template refuses the conversation: System role not supported"):
        ask(session, "hi")
    assert len(session.messages) == 1


def test_sampling_flags_go_over_the_models_own(chat_model, tokenizer, monkeypatch):
    monkeypatch.setattr(chat_model.generation_config, "temperature", 0.3)
    monkeypatch.setattr(chat_model.generation_config, "top_k", 7)
    monkeypatch.setattr(chat_model.generation_config, "do_sample", True)

    def settings(**given):
        found = ChatSession(chat_model, tokenizer, preset("kitty"), sampling=given).sampling
        return found.temperature, found.top_k, found.top_p

    nothing = {"temperature": None, "top_k": None, "top_p": None}
    assert settings(**nothing) == (0.3, 7, 1.0)
    assert settings(**{**nothing, "top_p": 0.5}) == (0.3, 7, 0.5)
    assert settings(**{**nothing, "temperature": 0.9}) == (0.9, 7, 1.0)
    assert settings(**{**nothing, "temperature": 0})[0] == 0


def test_greedy_models_stay_greedy_until_asked(chat_model, tokenizer):
    def greedy(**given):
        return ChatSession(chat_model, tokenizer, preset("kitty"), sampling=given).sampling.greedy

    assert greedy()
    assert not greedy(top_p=0.5)


# --- the terminal ------------------------------------------------------------------------------------------------


@pytest.fixture
def handle(session, capsys):
    """Handles one message: whether the session goes on, stdout, stderr."""

    def handle(message):
        goes_on = chat_loop.handle(session, message)
        out, err = capsys.readouterr()
        return goes_on, out, err

    return handle


@pytest.mark.parametrize("message", ["/bye", "/exit", "/quit"])
def test_leaving(handle, message):
    assert handle(message) == (False, "", "")


def test_answers_go_to_stdout_and_figures_to_stderr(handle, session):
    goes_on, out, err = handle("the value")
    assert goes_on
    assert out == session.messages[-1]["content"] + "\n"
    assert err.startswith("prompt 5 tok")


def test_help_and_unknown_commands(handle):
    assert "/regen" in handle("/help")[2]
    goes_on, out, err = handle("/dance now")
    assert (goes_on, out) == (True, "")
    assert "There is no command /dance." in err
    assert handle("")[0] is True


def test_clear_system_regen_and_stats(handle, session):
    assert "The cache is empty." in handle("/stats")[2]
    assert "There is no answer to generate again." in handle("/regen")[2]
    answer = handle("the value")[1]
    assert handle("/regen")[1] == answer
    assert len(session.messages) == 2
    used = session.used_bytes()
    stats = handle("/stats")[2]
    assert stats.startswith("16 tokens, 0 of 15 pages in use")
    assert f"{used.total / 1024:.1f} KiB" in stats
    handle("/system be a list")
    assert session.messages == [{"role": "system", "content": "be a list"}]
    handle("/clear")
    assert session.messages == [{"role": "system", "content": "be a list"}]


def test_save_and_load(handle, session, tmp_path):
    file = tmp_path / "my talk.json"
    handle("the value")
    assert f"Saved 2 messages to {file}." in handle(f"/save '{file}'")[2]
    messages, answer = session.messages, handle("the name")[1]
    handle("/clear")
    assert "Loaded 2 messages" in handle(f"/load '{file}'")[2]
    assert session.messages == messages[:2]
    assert handle("the name")[1] == answer
    document = json.loads(file.read_text())
    assert document["schema_version"] == 1
    assert document["messages"] == messages[:2]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"messages": 1}', '{"messages": [{"role": "user"}]}', '{"messages": ["hi"]}', "\xff"]
)
def test_load_refuses_other_files(handle, session, tmp_path, content):
    file = tmp_path / "talk.json"
    file.write_bytes(content.encode("latin-1"))
    answer = handle("the value")
    messages = list(session.messages)
    assert answer[0]
    assert "is not a saved conversation" in handle(f"/load {file}")[2]
    assert session.messages == messages


@pytest.mark.parametrize("command", ["/save", "/load", "/read"])
def test_commands_that_need_a_file(handle, tmp_path, command):
    assert f"{command} takes one file" in handle(command)[2]
    assert f"{command} takes one file" in handle(f"{command} a b")[2]
    goes_on, out, err = handle(f"{command} {tmp_path}/none/none.txt")
    assert (goes_on, out) == (True, "")
    assert err.startswith("Error: ")


def test_read_sends_a_file(handle, session, tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("\ufeffthe value\nof a name")
    assert handle(f"/read {file}")[1].strip()
    assert session.messages[0]["content"] == "the value\nof a name"
    file.write_bytes(b"\xff")
    assert "cannot be read as text" in handle(f"/read {file}")[2]


def test_context_exceeded_does_not_end_the_session(handle):
    goes_on, out, err = handle(LONG * 8)
    assert (goes_on, out) == (True, "")
    assert "the model's context is 2048" in err
    assert handle("the value")[1].strip()


def test_interrupt_stops_the_answer_only(session, capsys, monkeypatch):
    """A real SIGINT after the third piece."""
    written = []

    def text(line, end="\n"):
        written.append(line)
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(chat_loop.output, "text", text)
    before = signal.getsignal(signal.SIGINT)
    assert chat_loop.handle(session, "the value") is True
    assert "Stopped." in capsys.readouterr().err
    assert 3 <= len(written) < 12
    assert signal.getsignal(signal.SIGINT) is before
    assert [m["role"] for m in session.messages] == ["user", "assistant"]


def typed(monkeypatch, *lines):
    """What `input` gives: strings, or exceptions to raise; then Ctrl-D."""
    waiting = list(lines)

    def read(prompt=""):
        line = waiting.pop(0) if waiting else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["  hi  "], "hi"),
        (['"""a', " b", 'c"""'], "a\n b\nc"),
        (['"""', "a", '"""'], "a"),
        (['"""one"""'], "one"),
        (['say """ twice'], 'say """ twice'),
    ],
)
def test_lines_of_a_message(monkeypatch, lines, message):
    typed(monkeypatch, *lines)
    assert chat_loop.read_message() == message


def test_a_whole_talk(session, monkeypatch, capsys, home):
    """Ctrl-C at the prompt is a hint, Ctrl-D leaves, the history is in kitty's folder."""
    typed(monkeypatch, "the value", KeyboardInterrupt(), "/stats", '"""the', 'name"""')
    chat_loop.talk(session)
    out, err = capsys.readouterr()
    assert "Use /bye or Ctrl-D to leave." in err
    assert [m["content"] for m in session.messages[::2]] == ["the value", "the\nname"]
    assert [line for line in out.splitlines() if line] == [m["content"] for m in session.messages[1::2]]
    assert (home / "chat_history").is_file()


def test_a_home_that_cannot_be_written(session, monkeypatch, capsys):
    monkeypatch.setenv("KITTY_HOME", "/dev/null/home")
    typed(monkeypatch, "the value", "/bye")
    chat_loop.talk(session)
    out, err = capsys.readouterr()
    assert out.strip()
    assert "No history: /dev/null/home/chat_history cannot be used" in err
    assert torch.is_inference_mode_enabled() is False


def test_temperature_without_end(refused, model_dir):
    assert "--temperature is inf" in refused(2, "chat", model_dir, "hi", "--temperature", "inf")


def test_preset_16_with_few_bits(refused, model_dir):
    assert "The preset 16 packs nothing" in refused(2, "chat", model_dir, "hi", "--preset", "16", "--bits", "2")


def test_pipe_and_prompt_are_one_message(run, model_dir):
    """More text in the pipe means more prompt tokens read."""
    flags = ["--max-tokens", "1", "--temperature", "0"]
    alone = run("chat", model_dir, "the list", *flags)
    both = run("chat", model_dir, "the list", *flags, stdin="the list the list the list")
    tokens = [int(done.stderr.split("prompt ")[-1].split(" tok")[0]) for done in (alone, both)]
    assert tokens[1] >= tokens[0] + 6
