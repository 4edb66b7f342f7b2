"""`kitty check` on a tiny model: what it prints in each form, the gate and its exit codes, and what is refused when."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from kitty_runtime.config import PRESETS
from kitty_runtime.texts import held_out_text, token_sha256, tokenize, windows_of

SMALL = ("--windows", "2", "--seq-len", "600")
METHOD_KEYS = [
    "name",
    "config",
    "packed_fraction",
    "kl_mean",
    "kl_se",
    "kl_median",
    "kl_p90",
    "kl_p95",
    "kl_p99",
    "kl_p999",
    "kl_max",
    "ppl",
    "ppl_ratio",
    "ppl_ratio_se",
    "dp_rms",
    "same_top1",
    "same_top1_se",
    "effective_bits",
    "effective_bits_total",
    "bytes_per_token",
    "kl_by_position",
    "windows",
]


@pytest.fixture(scope="module")
def checked(call, model_dir):
    """One run that several tests read."""
    return call("check", model_dir, "--methods", "kitty,kv4,fp8", *SMALL, "--json")


def test_document(checked, tokenizer):
    assert checked.code == 0
    document = checked.json()
    assert list(document) == [
        "schema_version",
        "model",
        "data",
        "reference",
        "noise_floor",
        "methods",
        "gate",
        "versions",
        "command",
    ]
    assert document["schema_version"] == 1
    assert list(document["model"]) == ["id", "config_sha256"]
    assert document["model"]["id"] == "tiny-llama"
    text = held_out_text()
    windows = windows_of(text, tokenize(text, tokenizer), 2, 600)
    assert document["data"] == {
        "name": text.name,
        "token_sha256": token_sha256(windows),
        "windows": 2,
        "seq_len": 600,
        "score_from": 384,
    }
    assert document["reference"]["dtype"] == "float32"
    assert document["reference"]["bytes_per_token"] == 512
    assert document["gate"] == {"passed": None, "rules": []}
    assert {"kitty", "python", "torch", "transformers"} <= set(document["versions"])


def test_methods_of_the_document(checked):
    document = checked.json()
    kitty, kv4, fp8 = document["methods"]
    assert list(kitty) == list(kv4) == list(document["noise_floor"]) == METHOD_KEYS
    assert list(fp8) == [*METHOD_KEYS, "emulation_only"]
    assert [m["name"] for m in document["methods"]] == ["kitty", "kv4", "fp8"]
    assert fp8["emulation_only"] is True
    assert fp8["config"] == {"rule": "E4M3 with scale 1, as vLLM stores it without calibration"}
    assert kitty["config"]["boost_ratio"] == 0.125
    assert kitty["config"]["profile_sha256"] is None
    assert document["noise_floor"]["name"] == "16"
    assert 0 <= document["noise_floor"]["kl_max"] < 1e-5 < 1e-3 < kv4["kl_mean"] < kitty["kl_mean"]
    assert (kitty["effective_bits"], fp8["effective_bits"], fp8["effective_bits_total"]) == (2.765625, 8.0, 8.0)
    assert 0 < kitty["packed_fraction"] < fp8["packed_fraction"] == 1
    for method in document["methods"]:
        quantiles = [method[f"kl_{q}"] for q in ("median", "p90", "p95", "p99", "p999", "max")]
        assert quantiles == sorted(quantiles)
        assert len(method["windows"]) == 2
        assert sum(method["windows"]) / 2 == pytest.approx(method["kl_mean"])
        assert [(p["start"], p["stop"]) for p in method["kl_by_position"]] == [(384, 512), (512, 600)]
        assert method["ppl_ratio"] == pytest.approx(method["ppl"] / document["reference"]["ppl"])


def test_the_command_repeats_the_figures(checked, call, model_dir):
    kitty, *command = checked.json()["command"].split()
    assert kitty == "kitty"
    assert call(*command, "--format", "json").stdout == checked.stdout


def test_notes_go_to_stderr(checked):
    assert checked.stderr.splitlines() == [
        "tiny-llama: 2 x 600 tokens of builtin:python-manual/b; kitty, kv4, fp8",
        "on cpu, float32; backend: torch reference on CPU",
    ]


def test_tables(call, model_dir):
    done = call("check", model_dir, "--methods", "kitty,weighted:boost_ratio=0.25,fp8,16", *SMALL)
    assert done.code == 0
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny-llama: 2 x 600 tokens of builtin:python-manual/b, scored from token 384")
    rows = [line.split("  ")[0].strip() for line in lines]
    first = rows.index("16 (noise floor)")
    assert rows[first : first + 5] == ["16 (noise floor)", "kitty", "weighted:boost_ratio=0.25", "fp8 *", "16"]
    assert rows.count("kitty") == 2
    assert all(len(line) <= 100 for line in lines[1:])
    for word in ("KL, nats", "top-1, %", "ppl ratio", "B/token", "median", "p99.9", "rms %", "pages"):
        assert word in done.stdout, word
    assert "* emulated for comparison" in done.stdout
    assert "nothing was packed by 16: a perfect score there means nothing" in done.stdout
    assert "gate" not in done.stdout
    assert "profile: none for this model" in done.stderr


def test_tables_fit_80_columns(run, model_dir):
    done = run("check", model_dir, "--methods", "kivi-2-g128-sink,kitty", *SMALL, COLUMNS="80", FORCE_COLOR="")
    rows = [line for line in done.stdout.splitlines() if "kivi-2-g128-sink" in line]
    assert len(rows) == 2
    assert all(len(row.rstrip()) <= 80 for row in rows), rows


def test_markdown(call, model_dir):
    done = call("check", model_dir, "--methods", "kitty,fp8", *SMALL, "--max-kl", "9", "--format", "md")
    assert done.code == 0
    header, rule, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert rule == "|---|" + "---:|" * 14
    assert {line.count("|") - line.count("\\|") for line in (header, *rows)} == {16}
    assert [row.split(" | ")[0] for row in rows] == ["| 16 (noise floor)", "| kitty", "| fp8 \\*"]
    assert done.stdout.splitlines()[-1] == "gate passed"


def test_markup_in_names_is_text(call, tokenizer, tmp_path):
    from tiny_models import tiny_model

    folder = tmp_path / "[red]a|b*[bold]"
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    arguments = ("check", folder, "--methods", "kitty", "--windows", "1", "--seq-len", "400")
    assert call(*arguments).stdout.startswith("[red]a|b*[bold]: 1 x 400")
    assert call(*arguments, "--format", "md").stdout.startswith("\\[red\\]a\\|b\\*\\[bold\\]: 1 x 400")
    assert call(*arguments, "--json").json()["model"]["id"] == "[red]a|b*[bold]"


def test_one_window_has_no_errors(call, model_dir):
    arguments = ("check", model_dir, "--methods", "kitty", "--windows", "1", "--seq-len", "400")
    (kitty,) = call(*arguments, "--json").json()["methods"]
    assert (kitty["kl_se"], kitty["ppl_ratio_se"], kitty["same_top1_se"]) == (None, None, None)
    assert "±" not in call(*arguments).stdout


def test_default_methods(call, model_dir):
    document = call("check", model_dir, "--windows", "1", "--seq-len", "400", "--json").json()
    assert [m["name"] for m in document["methods"]] == ["kivi-2-g128-sink", "kitty", "kitty-pro", "tuned", "kv4"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--preset", "kitty", "--boost", "0.25"], ["kitty-pro"]),
        (["--bits", "2", "--boost", "0.1"], ["tuned:boost_ratio=0.1"]),
        (["--bits", "4", "--methods", "kv4"], ["kv4", "tuned:k_bits=4:v_bits=4:boost_ratio=0.0"]),
        (["-ctk", "4", "-ctv", "2"], ["tuned:k_bits=4:boost_ratio=0.0"]),
        (["--preset", "kv4", "--methods", "kv4,kitty"], ["kv4", "kitty"]),
    ],
)
def test_cache_options_are_a_method(call, model_dir, flags, names):
    document = call("check", model_dir, *flags, "--windows", "1", "--seq-len", "400", "--json").json()
    assert [m["name"] for m in document["methods"]] == names


def test_needle(call, model_dir):
    arguments = ("check", model_dir, "--methods", "kitty,fp8", *SMALL, "--needle")
    document = call(*arguments, "--json").json()
    for found in (document["reference"], document["noise_floor"], *document["methods"]):
        assert found["needle"]["total"] == 4
        assert 0 <= found["needle"]["correct"] <= 4
    assert document["command"].count("--needle") == 1
    text = call(*arguments).stdout
    assert re.search(
        r"^hidden numbers found at 16 bits: \d of 4\n  kitty: \d of 4\n  fp8: \d of 4$", text, re.MULTILINE
    )


@pytest.mark.parametrize("data", ["source", "words"])
def test_other_text(call, model_dir, words, data):
    data = words if data == "words" else data
    done = call(
        "check", model_dir, "--methods", "kitty", "--data", data, "--windows", "1", "--seq-len", "400", "--json"
    )
    assert done.json()["data"]["name"] == ("builtin:python-source" if data == "source" else "words.txt")
    assert f"--data {data}" in done.json()["command"]


# --- profiles ------------------------------------------------------------------------------------------------------


@pytest.fixture
def profiled(call, model_dir, words, home):
    """The model with a profile of its own, measured on `words`."""
    measure = ("--data", words, "--num-samples", "1", "--max-seq-length", "512", "--no-held-out")
    assert call("profile", model_dir, *measure).code == 0
    return home / "profiles" / "tiny-llama.safetensors"


def test_profile_is_found_and_recorded(call, model_dir, profiled):
    done = call("check", model_dir, "--methods", "weighted,kitty", *SMALL, "--json")
    assert f"profile: {profiled}\n" in done.stderr
    weighted, kitty = done.json()["methods"]
    assert re.fullmatch("[0-9a-f]{64}", weighted["config"]["profile_sha256"])
    assert kitty["config"]["profile_sha256"] is None
    given = call("check", model_dir, "--methods", "weighted,kitty", *SMALL, "--json", "--profile", profiled).json()
    assert given["methods"] == done.json()["methods"]
    assert f"--profile {profiled}" in given["command"]
    static = call("check", model_dir, "--methods", "weighted:policy=static", *SMALL, "--json")
    assert static.code == 0, static.stderr


def test_profile_measured_on_the_same_text_is_named(call, model_dir, profiled, words):
    done = call("check", model_dir, "--methods", "weighted", "--data", words, *SMALL)
    assert "The profile was measured on words.txt too" in done.stderr


def test_profile_that_no_method_uses(call, model_dir, profiled):
    done = call("check", model_dir, "--methods", "kitty", *SMALL, "--profile", profiled)
    assert (done.code, "No method uses the profile" in done.stderr) == (0, True)


# --- the gate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["table", "md", "json"])
def test_limits(call, model_dir, form):
    arguments = ("check", model_dir, "--methods", "kitty", *SMALL, "--format", form)
    done = call(
        *arguments, "--max-kl", "9", "--min-same-top1", "0", "--max-ppl-ratio", "9", "--max-bytes-per-token", "999"
    )
    assert done.code == 0
    if form == "json":
        assert done.json()["gate"]["passed"] is True
        assert [rule["rule"] for rule in done.json()["gate"]["rules"]] == [
            "max_kl",
            "min_same_top1",
            "max_ppl_ratio",
            "max_bytes_per_token",
        ]
    else:
        assert done.stdout.splitlines()[-1] == "gate passed"
    done = call(*arguments, "--max-kl", "0.001")
    assert done.code == 3
    assert done.stderr.splitlines()[-1] == "The gate failed."
    if form == "json":
        (rule,) = done.json()["gate"]["rules"]
        assert (rule["rule"], rule["method"], rule["limit"], rule["passed"]) == ("max_kl", "kitty", 0.001, False)
    else:
        assert re.search(r"^gate FAILED\n+ +kitty: kl 0\.\d+ (\\>|>) 0\.001$", done.stdout, re.MULTILINE)


def test_the_cheapest_that_holds_is_named(call, model_dir):
    arguments = ("check", model_dir, "--methods", "kv4,kitty,fp8", *SMALL, "--max-kl")
    document = call(*arguments, "9", "--json").json()
    assert document["gate"]["cheapest"] == "kitty"
    assert {rule["method"] for rule in document["gate"]["rules"]} == {"kv4", "kitty"}
    done = call(*arguments, "0.02")
    assert (done.code, "cheapest method that holds all limits: kv4" in done.stdout) == (0, True)
    assert call(*arguments, "0.0001").code == 3


def test_a_failed_gate_says_so_to_whoever_leaves_early(model_dir):
    """With a reader like `head`, which closes the pipe: the exit code is the gate's."""
    arguments = ["check", str(model_dir), "--methods", "kitty", "--windows", "1", "--seq-len", "400", "--json"]
    for limit, code in (("0.0001", 3), ("9", 0)):
        process = subprocess.Popen(
            [sys.executable, "-m", "kitty_cli.main", *arguments, "--max-kl", limit],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        process.stdout.close()
        stderr = process.stderr.read().decode()
        process.stderr.close()
        assert process.wait() == code, stderr
        assert "Traceback" not in stderr
        assert "Exception ignored" not in stderr


@pytest.fixture(scope="module")
def baseline_text(call, model_dir, tmp_path_factory):
    """What `--write-baseline` writes."""
    path = tmp_path_factory.mktemp("baselines") / "new" / "baseline.json"
    done = call("check", model_dir, "--methods", "kitty,fp8", *SMALL, "--write-baseline", path)
    assert (done.code, done.stderr.splitlines()[-1]) == (0, f"wrote {path}")
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    return path.read_text()


@pytest.fixture
def baseline(baseline_text, tmp_path):
    path = tmp_path / "baseline.json"
    path.write_text(baseline_text)
    return path


@pytest.fixture
def again(call, model_dir, baseline):
    """The run of `baseline`, held against it; further arguments win."""

    def again(*arguments):
        return call("check", model_dir, "--methods", "kitty,fp8", *SMALL, "--baseline", baseline, *arguments)

    return again


def test_a_baseline_is_the_report(checked, baseline):
    document = json.loads(baseline.read_text())
    assert list(document) == list(checked.json())
    assert [m["name"] for m in document["methods"]] == ["kitty", "fp8"]


def test_unchanged_passes(again):
    done = again("--json")
    assert done.code == 0
    (rule,) = done.json()["gate"]["rules"]
    assert (rule["rule"], rule["method"], rule["value"], rule["passed"]) == ("baseline", "kitty", 0.0, True)


def test_worse_fails_and_writes_nothing(again, baseline, monkeypatch):
    """A setting that the code loses on the way: half of the boosted channels."""
    from kitty_runtime.config import CacheConfig

    before = baseline.read_bytes()
    monkeypatch.setattr(CacheConfig, "num_boosted", lambda self, head_dim: 0)
    done = again("--write-baseline", baseline)
    assert done.code == 3
    assert re.search(r"^  kitty: KL is 0\.\d+ above the baseline's, \S+ is allowed$", done.stdout, re.MULTILINE)
    assert baseline.read_bytes() == before


def test_tolerance(again, baseline):
    """Every window a hundredth above the baseline: surely worse, but by little."""
    document = json.loads(baseline.read_text())
    document["methods"][0]["windows"] = [kl / 1.01 for kl in document["methods"][0]["windows"]]
    baseline.write_text(json.dumps(document))
    assert again().code == 3
    assert again("--tolerance", "0.02").code == 0


def test_one_window_says_what_it_compares(call, model_dir, tmp_path):
    path = tmp_path / "baseline.json"
    arguments = ("check", model_dir, "--methods", "kitty", "--windows", "1", "--seq-len", "400")
    assert call(*arguments, "--write-baseline", path).code == 0
    done = call(*arguments, "--baseline", path)
    assert (done.code, "one window has no standard error" in done.stderr) == (0, True)


def test_another_profile_is_said_not_refused(call, model_dir, tmp_path, words, home):
    path, arguments = tmp_path / "b.json", ("check", model_dir, "--methods", "weighted", *SMALL, "--tolerance", "1")
    assert call(*arguments[:-2], "--write-baseline", path).code == 0
    measure = ("--data", words, "--num-samples", "1", "--max-seq-length", "512", "--no-held-out")
    assert call("profile", model_dir, *measure).code == 0
    done = call(*arguments, "--baseline", path)
    assert done.code == 0, done.stdout
    assert "another boost profile than in the baseline: weighted" in done.stderr


@pytest.fixture
def never_loads(monkeypatch):
    """Fails the test if weights are loaded."""
    from kitty_runtime.models import loading

    monkeypatch.setattr(loading, "load_model", lambda *args, **kwargs: pytest.fail("weights were loaded"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seed", "1"], "another text"),
        (["--data", "source"], "another text"),
        (["--windows", "3"], "another length: 2 x 600 tokens scored from 384 then, 3 x 600"),
        (["--seq-len", "601"], "another length"),
        (["--methods", "kitty,kv4"], "Methods not in the baseline: kv4"),
        (["--methods", "kv4"], "in the baseline but not in this run: kitty"),
        (["--methods", "kitty-pro"], "not in this run: kitty"),
    ],
)
def test_another_run_is_refused_before_weights_load(refused, model_dir, baseline, never_loads, flags, said):
    assert said in refused(2, "check", model_dir, "--methods", "kitty", *SMALL, "--baseline", baseline, *flags)


def test_another_model_is_refused(refused, tokenizer, tmp_path, baseline):
    from tiny_models import tiny_model

    arguments = ("--methods", "kitty", *SMALL, "--baseline", baseline)
    for name, changes, said in (
        ("larger", {"intermediate_size": 64, "num_attention_heads": 8}, "another model"),
        ("other", {"seed": 1}, "another weights"),
    ):
        tiny_model(vocab_size=len(tokenizer), **changes).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        assert said in refused(2, "check", tmp_path / name, *arguments)


def test_another_dtype_is_refused(refused, model_dir, baseline):
    said = refused(2, "check", model_dir, "--methods", "kitty", *SMALL, "--baseline", baseline, "--dtype", "bfloat16")
    assert "another dtype: float32 then, bfloat16 now" in said


def test_another_setting_of_a_preset_is_refused(refused, model_dir, baseline, monkeypatch):
    from dataclasses import replace

    monkeypatch.setitem(PRESETS, "kitty", replace(PRESETS["kitty"], sink_len=64))
    said = refused(2, "check", model_dir, "--methods", "kitty", *SMALL, "--baseline", baseline)
    assert "kitty has another sink_len: 32 in the baseline, 64 now" in said


@pytest.mark.usefixtures("never_loads")
@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--methods", "best"], 2, "There is no method 'best'"),
        (["--methods", ""], 2, "There is no method ''"),
        (["--methods", "kitty", "--boost", "1.01"], 2, "boost_ratio is 1.01"),
        (["--full", "--windows", "2"], 2, "--full is 6 x 4096 tokens"),
        (["--seq-len", "385"], 2, "Windows of 385 tokens are too short"),
        (["--seq-len", "4096"], 2, "--seq-len is 4096, tiny-llama reads 2048 tokens"),
        (["--windows", "10000"], 2, "10000 x 2048 are needed"),
        (["--methods", "16", "--max-kl", "1"], 2, "16 packs nothing at this length"),
        (["--methods", "16,kitty", "--write-baseline", "b.json"], 2, "16 packs nothing at this length"),
        (["--methods", "weighted:k_recent_len=4096:v_recent_len=4096", "--max-kl", "1"], 2, "packs nothing"),
        (["--methods", "fp8", "--max-kl", "1"], 2, "Only methods that kitty can run are gated"),
        (["--methods", "weighted:policy=static"], 2, "static policy has no channels without a profile"),
        (["--max-kl", "nan"], 2, "max_kl is nan"),
        (["--max-kl", "-1"], 2, "max_kl is -1"),
        (["--min-same-top1", "85"], 2, "min_same_top1 is 85"),
        (["--tolerance", "0.1"], 2, "--tolerance is for comparing"),
        (["--baseline", "none.json"], 2, "The baseline none.json cannot be read"),
        (["--baseline", "/dev/null"], 2, "The baseline /dev/null is not JSON"),
        (["--write-baseline", "/dev/null/below"], 2, "/dev/null/below cannot be written"),
        (["--write-baseline", "/tmp"], 2, "/tmp is a folder"),
        (["--profile", "none.safetensors"], 1, "There is no profile at none.safetensors"),
        (["--data", "./none"], 1, "There is no file ./none"),
    ],
)
def test_refused_before_weights_load(refused, model_dir, flags, code, said):
    assert said in refused(code, "check", model_dir, *flags)


@pytest.mark.usefixtures("never_loads")
def test_a_text_of_100_tokens_is_refused(refused, model_dir, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("value " * 100)
    said = refused(2, "check", model_dir, "--data", file)
    assert "short.txt has 100 tokens, 4 x 2048 are needed" in said
    assert "hardly anything is packed before token 384" in said
    file.write_text("value " * 1000)
    assert "--windows 1 --seq-len 1000" in refused(2, "check", model_dir, "--data", file)


@pytest.mark.usefixtures("never_loads")
def test_model_with_too_short_a_context(refused, short_model_dir):
    assert "Windows of 64 tokens are too short" in refused(2, "check", short_model_dir)


@pytest.mark.usefixtures("never_loads")
def test_heads_that_a_peer_cannot_group(refused, tokenizer, tmp_path):
    from tiny_models import tiny_model

    tiny_model(vocab_size=len(tokenizer), head_dim=80).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    said = refused(1, "check", tmp_path, "--methods", "kitty,q4_0", *SMALL)
    assert "q4_0 groups 32 channels, heads of layer 0 have 80" in said


@pytest.mark.parametrize(
    "flags", [["--format", "html"], ["--windows", "0"], ["--seed", "-1"], ["--tolerance", "2"], ["--max-kl", "low"]]
)
def test_usage_errors(call, model_dir, flags):
    done = call("check", model_dir, *flags)
    assert (done.code, done.stdout) == (2, "")
    assert flags[0] in done.stderr


def test_context_is_cut_with_a_warning(call, tokenizer, tmp_path):
    from tiny_models import tiny_model

    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=500).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    done = call("check", tmp_path, "--methods", "kitty", "--windows", "1", "--json")
    assert (done.code, done.json()["data"]["seq_len"]) == (0, 500)
    assert "reads 500 tokens; windows are cut to 500" in done.stderr
