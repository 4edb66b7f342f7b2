"""The boost profile: its file takes no damage for truth, its budgets are the best the average allows."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import tiny_config

from kitty_runtime.config import preset
from kitty_runtime.errors import ConfigError, ProfileError
from kitty_runtime.models.demo import DEMO_NAME
from kitty_runtime.models.geometry import layers_of
from kitty_runtime.profile_store import default_path, find_profile, save_profile, shipped_profiles_dir
from kitty_runtime.profiles import (
    BoostProfile,
    LayerProfile,
    Provenance,
    check_shapes,
    dump_profile,
    layer_boosts,
    load_profile,
)

HEADS, HEAD_DIM = 2, 32
LEVELS = (0.0, 0.125, 0.25, 0.5)
PROVENANCE = Provenance("tiny", "", "c" * 64, "w" * 64, "query", "builtin", "t" * 64, 4096, 1024, 0, "kitty profile")


def profile_of(*curves: tuple[float, ...], levels=LEVELS, head_dim=HEAD_DIM) -> BoostProfile:
    generator = torch.Generator().manual_seed(0)
    layers = {
        index: LayerProfile(
            torch.rand(HEADS, head_dim, generator=generator), torch.rand(HEADS, head_dim, generator=generator), curve
        )
        for index, curve in enumerate(curves)
    }
    return BoostProfile(layers, levels, PROVENANCE)


@pytest.fixture
def profile() -> BoostProfile:
    return profile_of((0.4, 0.2, 0.1, 0.05), (0.1, 0.08, 0.06, 0.04))


@pytest.fixture
def path(tmp_path, profile) -> Path:
    file = tmp_path / "profile.safetensors"
    save_profile(profile, file)
    return file


def rewritten(path: Path, tensors=(), header=()) -> Path:
    """The file with some tensors and header entries replaced; None takes one away."""
    with safe_open(path, "pt") as file:
        old = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = json.loads(file.metadata()["kitty"])
    new = {**old, **dict(tensors)}
    metadata = {**metadata, **dict(header)}
    save_file(
        {name: tensor for name, tensor in new.items() if tensor is not None},
        path,
        {"kitty": json.dumps({key: value for key, value in metadata.items() if value is not None})},
    )
    return path


def check_refused(path: Path, said: str) -> None:
    with pytest.raises(ProfileError, match=said) as caught:
        load_profile(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_round_trip(path, profile):
    found = load_profile(path)
    assert found.provenance == profile.provenance
    assert found.boost_levels == profile.boost_levels
    assert list(found.layers) == [0, 1]
    for index, layer in profile.layers.items():
        assert torch.equal(found.layers[index].query_energy, layer.query_energy)
        assert torch.equal(found.layers[index].channel_scores, layer.channel_scores)
        assert found.layers[index].kl == layer.kl


def test_same_profile_same_bytes(path, profile):
    assert dump_profile(profile) == dump_profile(load_profile(path)) == path.read_bytes()
    other = replace(PROVENANCE, seed=1)
    assert dump_profile(BoostProfile(profile.layers, LEVELS, other)) != path.read_bytes()


def test_file_may_be_replaced_while_its_profile_lives(path, profile):
    found = load_profile(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(found.layers[0].query_energy, profile.layers[0].query_energy)


def test_no_file(tmp_path):
    check_refused(tmp_path / "none.safetensors", "There is no profile at")
    check_refused(tmp_path, "There is no profile at")


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_truncated(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    check_refused(path, "cannot be read as a profile")


def test_random_bytes(path):
    path.write_bytes(b"\xff" * 1000)
    check_refused(path, "cannot be read as a profile")


def test_plain_safetensors(path):
    save_file({"weight": torch.ones(2)}, path)
    check_refused(path, "not a boost profile")
    save_file({"weight": torch.ones(2)}, path, {"format": "pt"})
    check_refused(path, "not a boost profile")


@pytest.mark.parametrize("version", [0, 2, "1", [1]])
def test_other_schema(path, version):
    check_refused(rewritten(path, header={"schema_version": version}), "schema version .*this kitty reads 1")


@pytest.mark.parametrize("tensor", ["query_energy", "channel_scores"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda t: t.index_fill(1, torch.tensor([3]), float("nan")), "layer 1: .* must be finite"),
        (lambda t: t.index_fill(1, torch.tensor([3]), float("inf")), "layer 1: .* must be finite"),
        (lambda t: t.index_fill(1, torch.tensor([3]), -0.5), "layer 1: .* from 0 up"),
        (lambda t: t.half(), "layer 1: .* fp32"),
        (torch.zeros_like, "layer 1: .* all zero"),
        (lambda t: t[:, :31].contiguous(), r"layer 1 has energies .*31"),
        (lambda t: t[:1].contiguous(), r"layer 1 has energies .*\(1, 32\)"),
        (lambda t: t.flatten(), r"layer 1 has energies .*\(64,\)"),
        (lambda t: None, "damaged"),
    ],
)
def test_damaged_tensor(path, tensor, damage, said):
    name = f"layers.1.{tensor}"
    with safe_open(path, "pt") as file:
        value = file.get_tensor(name).clone()
    check_refused(rewritten(path, tensors={name: damage(value)}), said)


@pytest.mark.parametrize("head_dim", [0, 8, 40, 272])
def test_head_size_that_no_page_holds(path, head_dim):
    tensors = {f"layers.0.{name}": torch.ones(HEADS, head_dim) for name in ("query_energy", "channel_scores")}
    check_refused(rewritten(path, tensors=tensors), "layer 0")


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"kl": {"0": [0.1, 0.1, 0.1], "1": [0.1] * 4}}, "layer 0 has KL values .* for 4 boost levels"),
        ({"kl": {"0": [0.1] * 5, "1": [0.1] * 4}}, "layer 0 has KL values"),
        ({"kl": {"0": [0.1, -0.1, 0.1, 0.1]}}, "layer 0 has KL values"),
        ({"kl": {"0": [0.1, float("nan"), 0.1, 0.1]}}, "layer 0 has KL values"),
        ({"kl": {"0": [0.1, float("inf"), 0.1, 0.1]}}, "layer 0 has KL values"),
        ({"kl": {"0": [0.1, "high", 0.1, 0.1]}}, "damaged"),
        ({"kl": {"0": 0.1}}, "damaged"),
        ({"kl": [[0.1] * 4]}, "damaged"),
        ({"kl": {"first": [0.1] * 4}}, "damaged"),
        ({"kl": {"7": [0.1] * 4}}, "damaged"),
        ({"kl": {}}, "measures no layer"),
        ({"kl": None}, "damaged"),
        ({"boost_levels": [0.0, 0.125, 0.25]}, "for 3 boost levels"),
        ({"boost_levels": [0.125, 0.25, 0.5, 1.0]}, "boost levels"),
        ({"boost_levels": [0.0, 0.25, 0.125, 0.5]}, "boost levels"),
        ({"boost_levels": [0.0, 0.25, 0.25, 0.5]}, "boost levels"),
        ({"boost_levels": [0.0, 0.5, 1.0, 2.0]}, "boost levels"),
        ({"boost_levels": [0.0, 0.5, 1.0, float("nan")]}, "boost levels"),
        ({"boost_levels": [0.0, float("nan")], "kl": {"0": [0.1, 0.1]}}, "boost levels"),
        ({"boost_levels": 0.5}, "damaged"),
        ({"provenance": None}, "damaged"),
        ({"provenance": {"model": "tiny"}}, "damaged"),
        ({"provenance": {**vars(PROVENANCE), "mood": "good"}}, "damaged"),
        ({"provenance": {**vars(PROVENANCE), "model": 3}}, "its model is 3"),
        ({"provenance": {**vars(PROVENANCE), "num_tokens": "many"}}, "its num_tokens is 'many'"),
        ({"provenance": {**vars(PROVENANCE), "versions": "new"}}, "its versions is 'new'"),
        ({"schema_version": None}, "damaged"),
    ],
)
def test_damaged_header(path, header, said):
    check_refused(rewritten(path, header=header), said)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null"])
def test_header_that_is_no_object(path, text):
    save_file({"weight": torch.ones(2)}, path, {"kitty": text})
    check_refused(path, "damaged")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 1}, "layer 1, which the model does not page"),
        ({"num_key_value_heads": 1}, "2 KV heads of 32, the model 1 of 32"),
        ({"head_dim": 64}, "2 KV heads of 32, the model 2 of 64"),
    ],
)
def test_profile_of_another_model(profile, change, said):
    with pytest.raises(ProfileError, match=said):
        check_shapes(profile, layers_of(tiny_config(**change)))


def test_layers_that_were_not_measured_are_not_paged(profile):
    layers = layers_of(tiny_config(num_hidden_layers=3))
    first, second, third = layer_boosts(layers, preset("weighted"), profile)
    assert torch.equal(first.query_energy, profile.layers[0].query_energy)
    assert torch.equal(second.query_energy, profile.layers[1].query_energy)
    assert third is None


def test_policies_that_use_no_profile(profile):
    layers = layers_of(tiny_config())
    for name in ("kitty", "kitty-pro", "random", "kivi-2-g128", "kv4", "16"):
        config = preset(name)
        for boost in layer_boosts(layers, config, profile):
            assert boost.num_boosted == config.num_boosted(HEAD_DIM)
            assert boost.query_energy is None


def test_static_takes_the_best_scores(profile):
    config = replace(preset("weighted"), policy="static")
    budgets = profile.budgets(config.boost_ratio)
    for index, boost in enumerate(layer_boosts(layers_of(tiny_config()), config, profile)):
        scores = profile.layers[index].channel_scores
        for head in range(HEADS):
            ranked = sorted(range(HEAD_DIM), key=lambda channel, head=head, s=scores: -s[head, channel])
            assert boost.channels[head].tolist() == sorted(ranked[: budgets[index]])
    with pytest.raises(ConfigError, match="static policy has no channels"):
        layer_boosts(layers_of(tiny_config()), config, None)


# --- budgets -----------------------------------------------------------------------------------------------------


def kl_at(curve: tuple[float, ...], levels: tuple[float, ...], share: float) -> float:
    """The measured curve between its levels, straight in the logarithm; flat beyond the last."""
    import math

    for (low, a), (high, b) in itertools.pairwise(zip(levels, curve, strict=True)):
        if share <= high:
            return math.exp(math.log(a) + (math.log(b) - math.log(a)) * (share - low) / (high - low))
    return curve[-1]


@pytest.mark.parametrize("boost_ratio", [0.0, 0.03, 0.0625, 0.1, 0.125, 0.25, 1 / 3, 0.5, 0.77, 0.999, 1.0])
@pytest.mark.parametrize("head_dim", [16, 32, 80, 128, 256])
def test_budgets_keep_to_the_average(boost_ratio, head_dim):
    curves = [tuple(10.0 ** -(i % 5) * shrink for shrink in (1, 0.5, 0.3, 0.1)) for i in range(7)]
    budgets = profile_of(*curves, head_dim=head_dim).budgets(boost_ratio)
    assert list(budgets) == list(range(7))
    assert all(0 <= n <= head_dim and n % (head_dim // 16) == 0 for n in budgets.values())
    left = boost_ratio * head_dim * 7 - sum(budgets.values())
    assert -1e-6 <= left < head_dim // 16, "no more than asked, and no step unspent"


def test_nothing_and_everything(profile):
    assert profile.budgets(0) == {0: 0, 1: 0}
    assert profile.budgets(1) == {0: HEAD_DIM, 1: HEAD_DIM}


@pytest.mark.parametrize("seed", range(4))
def test_budgets_are_the_best_there_are(seed):
    """Against every split of the budget, for falling convex curves, where greedy has to be right."""
    generator = torch.Generator().manual_seed(seed)
    levels = (0.0, 1.0)
    curves = []
    for _ in range(3):
        start, factor = torch.rand(2, generator=generator).tolist()
        curves.append((start, start * (0.02 + 0.9 * factor)))
    for steps in (1, 5, 11, 30):
        found = profile_of(*curves, levels=levels).budgets(steps / 48)

        def cost(taken: tuple[int, ...]) -> float:
            return sum(kl_at(curve, levels, n / 16) for curve, n in zip(curves, taken, strict=True))

        best = min(cost(taken) for taken in itertools.product(range(17), repeat=3) if sum(taken) <= steps)
        assert cost(tuple(n // 2 for n in found.values())) == pytest.approx(best, rel=1e-9)


def test_the_most_sensitive_layer_gets_most():
    budgets = profile_of((1e-3, 9e-4, 8e-4, 7e-4), (1.0, 0.1, 0.03, 0.01)).budgets(0.125)
    assert budgets == {0: 0, 1: 8}


def test_a_step_that_only_pays_later_is_seen():
    """A curve that is flat first and falls behind: greedy must look past one step."""
    budgets = profile_of((0.5, 0.5, 0.01, 0.01), (0.2, 0.19, 0.18, 0.17)).budgets(0.125)
    assert budgets == {0: 8, 1: 0}


def test_a_curve_that_rises_is_noise():
    budgets = profile_of((0.1, 0.3, 0.1, 0.05), (0.1, 0.1, 0.1, 0.1), (0.0, 0.0, 0.0, 0.0)).budgets(0.25)
    assert sum(budgets.values()) == 24


# --- where profiles are kept -------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KITTY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_found_by_hashes(home, profile):
    path = default_path("tiny")
    assert path.parent == home / "profiles"
    save_profile(profile, path)
    found = find_profile("c" * 64, "w" * 64)
    assert found is not None
    assert found[0] == path
    assert find_profile("c" * 64, None)[0] == path
    assert find_profile("c" * 64, "x" * 64) is None
    assert find_profile("x" * 64, "w" * 64) is None


def test_a_damaged_profile_is_passed_over_and_named(home, profile, caplog):
    save_profile(profile, home / "profiles" / "whole.safetensors")
    (home / "profiles" / "broken.safetensors").write_bytes(b"broken")
    assert find_profile("c" * 64, "w" * 64)[0].name == "whole.safetensors"
    assert "broken.safetensors cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.safetensors"),
        ("owner/model@v1", "owner--model--v1.safetensors"),
        ("../..", "safetensors"),
        ("märchen model", "m--rchen--model.safetensors"),
    ],
)
def test_file_names(home, name, file):
    path = default_path(name)
    assert path.parent == home / "profiles"
    assert path.name.endswith(file)


def test_saving_replaces_whole_files(home, profile, path):
    before = path.read_bytes()
    with pytest.raises(ProfileError, match="cannot be written"):
        save_profile(profile, path / "below-a-file.safetensors")
    other = BoostProfile(profile.layers, LEVELS, replace(PROVENANCE, seed=5))
    save_profile(other, path)
    assert load_profile(path).provenance.seed == 5
    assert path.read_bytes() != before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


# --- what ships --------------------------------------------------------------------------------------------------


def test_readme_names_every_field():
    text = (shipped_profiles_dir() / "README.md").read_text()
    row = re.search(r"^\| `provenance` \| (.*) \|$", text, re.MULTILINE)
    assert row is not None
    assert re.findall(r"`(\w+)`", row.group(1)) == [field.name for field in fields(Provenance)]
    for name in ("query_energy", "channel_scores", "schema_version", "boost_levels", "kl"):
        assert name in text


def test_shipped_profiles_are_what_the_readme_says():
    text = (shipped_profiles_dir() / "README.md").read_text()
    files = sorted(shipped_profiles_dir().glob("*.safetensors"))
    assert files
    for file in files:
        found = load_profile(file)
        row = next(line for line in text.splitlines() if line.startswith(f"| `{file.name}`"))
        assert f"`{found.provenance.command}`" in row
        words = found.provenance.command.split()
        assert words[words.index("--metric") + 1] == found.provenance.metric
        assert words[words.index("--seed") + 1] == str(found.provenance.seed)
        samples, length = (int(words[words.index(flag) + 1]) for flag in ("--num-samples", "--max-seq-length"))
        assert found.provenance.num_tokens == samples * length
        assert dump_profile(found) == file.read_bytes()
        for layer in found.layers.values():
            assert layer.query_energy.shape == (3, 64)


@pytest.mark.parametrize("boost_ratio", [0.25, 0.4])
def test_what_curves_leave_goes_to_sensitive_layers(boost_ratio):
    """Beyond the highest measured level no channel is known to help: not the first layers get the rest."""
    profile = load_profile(shipped_profiles_dir() / f"{DEMO_NAME}.safetensors")
    budgets = profile.budgets(boost_ratio)
    order = sorted(profile.layers, key=lambda index: profile.layers[index].kl[0])
    assert max(budgets[index] for index in order[:5]) <= min(budgets[index] for index in order[-5:])
    assert sum(budgets.values()) <= boost_ratio * 64 * 30
