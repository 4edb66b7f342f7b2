"""`--report FILE.html` of `kitty profile`, `kitty check` and `kitty info`: what is written, said and refused."""

from __future__ import annotations

from html import escape

import pytest
from report_case import Nesting, check_texts_keep_apart, marks, pictures, titles
from report_case import words as words_of

PROFILE = ("--num-samples", "1", "--max-seq-length", "512", "--no-held-out")
CHECK = ("--methods", "kitty,kitty-pro,fp8", "--windows", "2", "--seq-len", "600")


@pytest.fixture(scope="module")
def profiled(call, model_dir, words, tmp_path_factory):
    """A profile, its report, and what the command said."""
    folder = tmp_path_factory.mktemp("report")
    paths = folder / "tiny.safetensors", folder / "new" / "a & b.html"
    return *paths, call("profile", model_dir, "--data", words, *PROFILE, "-o", paths[0], "--report", paths[1], "--json")


def read(path):
    """The report, verified to be one well-formed page whose pictures can be read."""
    text = path.read_text(encoding="utf-8")
    Nesting(text)
    for picture in pictures(text):
        check_texts_keep_apart(picture)
    return text


def test_profile_report(profiled):
    _, report, done = profiled
    assert done.code == 0
    assert done.stderr.splitlines()[-1] == f"report: {report}"
    assert done.json()["num_layers"] == 2
    text = read(report)
    assert len(pictures(text)) == 4
    assert "RoPE wavelength, tokens" in words_of(pictures(text)[0])
    assert "The worst head: layer " in text
    assert not report.with_name(report.name + ".partial").exists()


def test_the_report_says_what_json_says(profiled):
    _, report, done = profiled
    _, curves, budgets, _ = pictures(read(report))
    layers = done.json()["layers"]
    assert titles(marks(budgets, "boost")) == [f"layer {x['layer']}: {x['num_boosted']}" for x in layers]
    by_kl = sorted(layers, key=lambda x: -x["kl"][0])
    assert titles(marks(curves, "strong")) == [f"layer {x['layer']} (KL {x['kl'][0]:.3g})" for x in by_kl]


def test_report_of_a_profile_that_is_there(call, profiled, tmp_path):
    """The same charts at another boost, but for what only the run that measured it knew."""
    profile, report, _ = profiled
    later = tmp_path / "later.htm"
    done = call("info", profile, "--boost", "0.25", "--report", later)
    assert done.code == 0
    assert done.stderr.strip() == f"report: {later}"
    before, after = read(report), read(later)
    assert len(pictures(after)) == 3
    assert "RoPE" not in after
    assert "worst head" not in after
    assert [c.attrib for c in pictures(after)[1].iter("polyline")] == [
        c.attrib for c in pictures(before)[1].iter("polyline")
    ]
    assert "25 %" in words_of(pictures(after)[2])


def test_check_report(call, model_dir, tmp_path):
    report = tmp_path / "check.html"
    done = call("check", model_dir, *CHECK, "--report", report, "--json", "--max-kl", "1e-9")
    assert done.code == 3
    assert f"report: {report}" in done.stderr.splitlines()
    text = read(report)
    document = done.json()
    (picture,) = pictures(text)
    points = [e for e in picture.iter("circle") if titles([e]) != [""]]
    assert titles(points) == [
        f"{m['name']}: KL {m['kl_mean']:.4g}, {m['bytes_per_token']:,.0f} bytes per token" for m in document["methods"]
    ]
    for said in (document["command"], document["data"]["token_sha256"], document["model"]["config_sha256"]):
        assert escape(said) in text
    assert "gate FAILED" in text


def test_a_report_leaves_stdout_as_it_is(call, model_dir, tmp_path):
    plain = call("check", model_dir, *CHECK)
    with_report = call("check", model_dir, *CHECK, "--report", tmp_path / "check.html")
    assert with_report.stdout == plain.stdout
    assert with_report.stderr == plain.stderr + f"report: {tmp_path / 'check.html'}\n"


def test_names_of_files_are_escaped(call, model_dir, words, tmp_path):
    evil = tmp_path / "<script>alert(1)<" / "b>.txt"
    evil.parent.mkdir()
    evil.write_text(words.read_text())
    report = tmp_path / "check.html"
    assert call("check", model_dir, *CHECK, "--data", evil, "--report", report).code == 0
    text = read(report)
    assert "<script" not in text
    assert "&lt;script&gt;" in text


@pytest.fixture
def never_starts(monkeypatch):
    """Fails the test if so much as a model is looked for."""
    from kitty_runtime.models import loading

    monkeypatch.setattr(loading, "resolve_model", lambda *args, **kwargs: pytest.fail("the work began"))


@pytest.mark.usefixtures("never_starts")
@pytest.mark.parametrize("command", ["profile", "check"])
@pytest.mark.parametrize(
    ("name", "said"),
    [("report.json", "is an HTML file"), ("folder.html", "is a folder"), ("file.txt/report.html", "cannot be written")],
)
def test_bad_paths_are_refused_before_the_work(refused, model_dir, tmp_path, command, name, said):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file.txt").write_text("kept")
    stderr = refused(2, command, model_dir, "--report", tmp_path / name)
    assert said in stderr
    assert "--report FILE.html" in stderr
    assert (tmp_path / "file.txt").read_text() == "kept"


def test_bad_path_for_a_profile_that_is_there(refused, profiled, tmp_path):
    assert "is an HTML file" in refused(2, "info", profiled[0], "--report", tmp_path / "x.pdf")


def test_a_model_alone_has_no_report(refused, model_dir, tmp_path):
    assert "shows a profile" in refused(2, "info", model_dir, "--report", tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()
