"""What the profile measures, against plain computations; and the outlier that it has to find."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import random_ids, tiny_config, tiny_model
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kitty_runtime import layer_kl
from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.errors import ConfigError, DataError, NumericsError
from kitty_runtime.layer_kl import LAYER_KL_CONFIG, measure_layer_kl
from kitty_runtime.models.geometry import layers_of
from kitty_runtime.models.loading import cache_kwarg
from kitty_runtime.ops.operands import SoftmaxSpec
from kitty_runtime.profiles import Provenance
from kitty_runtime.quant.boost import LayerBoost
from kitty_runtime.sensitivity import attention_change, measurable_layers, measure_profile, measure_statistics

SINK, PAGE = 32, 128
HEADS, GROUP, DIM = 2, 2, 32
WINDOWS = [random_ids(300, seed=1), random_ids(420, seed=2)]
PROVENANCE = Provenance("tiny", "", "c", "w", "query", "random ids", "t", 720, 500, 0, "kitty profile")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@torch.no_grad()
def captured(model, ids):
    """Per layer, queries ``[4, n, 32]`` and keys ``[2, n, 32]`` after RoPE, in float64, from the projections."""
    seen = {}
    hooks = []
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj"):
            module = getattr(layer.self_attn, name)
            hooks.append(
                module.register_forward_hook(lambda m, args, out, key=(index, name): seen.update({key: out[0]}))
            )
    model(input_ids=ids[None])
    for hook in hooks:
        hook.remove()
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(len(ids))[None])
    found = []
    for index in range(len(model.model.layers)):
        q, k = (seen[index, name].view(len(ids), -1, DIM).transpose(0, 1)[None] for name in ("q_proj", "k_proj"))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        found.append((q[0].double(), k[0].double()))
    return found


def pages_of(keys):
    """Whole pages behind the sink, each ``[128, 32]``, of one KV head."""
    return [keys[s : s + PAGE] for s in range(SINK, len(keys) - PAGE + 1, PAGE)]


def rounded(channel, levels):
    """A page's channel, rounded to `levels` steps; the scale and the zero point are fp16."""
    zero = channel.min().half().double()
    scale = ((channel.max() - channel.min()) / levels).half().double()
    return ((channel - zero) / scale).round().clamp(0, levels) * scale + zero


def test_energy_and_scores(model):
    statistics = measure_statistics(model, WINDOWS, "query")
    assert list(statistics) == [0, 1]
    seen = [captured(model, window) for window in WINDOWS]
    for index, found in statistics.items():
        for head in range(HEADS):
            rows = torch.cat([q[head * GROUP + g] for q, _ in (s[index] for s in seen) for g in range(GROUP)])
            energy = rows.square().mean(0).sqrt()
            pages = [page for _, k in (s[index] for s in seen) for page in pages_of(k[head])]
            assert len(pages) == found.num_pages == 2 + 3
            width = torch.stack([page.max(0).values - page.min(0).values for page in pages]).mean(0)
            magnitude = torch.stack([page.abs().mean(0) for page in pages]).mean(0)
            torch.testing.assert_close(found.query_energy[head].double(), energy, rtol=1e-4, atol=0)
            torch.testing.assert_close(found.scores("query")[head].double(), energy * width, rtol=1e-4, atol=0)
            torch.testing.assert_close(found.scores("magnitude")[head].double(), magnitude, rtol=1e-4, atol=0)


def test_key_errors(model):
    """Mean |k|, and the rms of what plain rounding adds, each from the projections."""
    seen = [captured(model, window) for window in WINDOWS]
    for index, found in measure_statistics(model, WINDOWS).items():
        errors = found.key_errors
        for head in range(HEADS):
            pages = [page for _, k in (s[index] for s in seen) for page in pages_of(k[head])]
            magnitude = torch.stack([page.abs().mean(0) for page in pages]).mean(0)
            torch.testing.assert_close(errors.magnitude[head].double(), magnitude, rtol=1e-4, atol=0)
            for levels, rms in ((3, errors.two_bits), (15, errors.four_bits)):
                off = [torch.stack([rounded(c, levels) - c for c in page.T]) for page in pages]
                expected = torch.stack([x.square().mean(1) for x in off]).mean(0).sqrt()
                torch.testing.assert_close(rms[head].double(), expected, rtol=5e-3, atol=0)
        assert bool((errors.four_bits < errors.two_bits / 3).all())


def test_order_of_windows_does_not_matter(model):
    forward, backward = (measure_statistics(model, windows) for windows in (WINDOWS, WINDOWS[::-1]))
    for index in forward:
        torch.testing.assert_close(forward[index].query_energy, backward[index].query_energy, rtol=1e-6, atol=0)


def test_attention_change_is_the_double_loop():
    """Every channel alone, every sampled query alone, with a plain softmax."""
    generator = torch.Generator().manual_seed(0)
    heads, group, length, dim = 1, 3, 70, 6
    span = slice(4, 68)
    groups = torch.randn(heads, group, length, dim, generator=generator)
    keys = torch.randn(heads, length, dim, generator=generator)
    error = 0.3 * torch.randn(heads, span.stop - span.start, dim, generator=generator)
    softmax = SoftmaxSpec(scale=0.4)
    found = attention_change(groups, keys, error, span, softmax)
    rows = [int(x) for x in torch.linspace(36, length - 1, 64).tolist()]
    for channel in range(dim):
        changed = keys.double().clone()
        changed[0, span, channel] += error[0, :, channel].double()
        total = 0.0
        for row in rows:
            for g in range(group):
                query = groups[0, g, row].double()
                before, after = (
                    [math.exp(0.4 * float(query @ k[0, p])) for p in range(row + 1)] for k in (keys.double(), changed)
                )
                total += sum((a / sum(after) - b / sum(before)) ** 2 for a, b in zip(after, before, strict=True))
        assert float(found[0, channel]) == pytest.approx(total / (len(rows) * group * length), rel=1e-4)


def test_attention_metric_on_a_model(model):
    """Layer 0 of a real run: keys at 2 bits channel by channel, full softmax over what each query sees."""
    window = WINDOWS[0]
    scores = measure_statistics(model, [window], "attention")[0].scores("attention")
    queries, keys = captured(model, window)[0]
    rows = torch.linspace(SINK + PAGE, len(window) - 1, 64).long()
    hidden = torch.arange(len(window)) > rows[:, None]

    def probabilities(head, these):
        q = queries[head * GROUP : (head + 1) * GROUP, rows]
        return (q @ these.T / math.sqrt(DIM)).masked_fill(hidden, -math.inf).softmax(-1)

    for head in range(HEADS):
        exact = probabilities(head, keys[head])
        for channel in range(0, DIM, 5):
            changed = keys[head].clone()
            for page in pages_of(changed):
                page[:, channel] = rounded(page[:, channel], 3)
            expected = (probabilities(head, changed) - exact).square().mean()
            assert float(scores[head, channel]) == pytest.approx(float(expected), rel=2e-3)


def test_only_the_attention_metric_costs_time(model):
    assert not bool(measure_statistics(model, WINDOWS, "query")[0].attention_change.any())


@torch.no_grad()
def naive_kl(model, window, boosts):
    """Mean KL from position 384 on, every layer computed."""
    positions = torch.arange(384, len(window))
    cache = KittyCache(model.config, LAYER_KL_CONFIG, boosts=boosts)
    reference = model(input_ids=window[None]).logits[0, positions].double().log_softmax(-1)
    quantized = model(input_ids=window[None], **{cache_kwarg(model): cache}).logits[0, positions].double()
    return float((reference.exp() * (reference - quantized.log_softmax(-1))).sum(-1).mean())


SLIDING_LAST = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}


@pytest.mark.parametrize(("family", "changes"), [("llama", {"num_hidden_layers": 3}), ("gemma2", SLIDING_LAST)])
def test_layer_kl_is_that_of_whole_runs(family, changes, monkeypatch):
    """A run that starts at its layer gives what a run of all layers gives."""
    monkeypatch.setattr(layer_kl, "NEGLIGIBLE", 0.0)
    model = tiny_model(family, dtype=torch.float64, **changes)
    window = random_ids(500, seed=5)
    energies = {i: s.query_energy for i, s in measure_statistics(model, [window]).items()}
    assert list(energies) == [0, 1, 2]
    levels = (0.0, 0.25)
    curves = measure_layer_kl(model, [window], energies, levels)
    for index, curve in curves.items():
        for level, kl in zip(levels, curve, strict=True):
            boosts = [None] * len(model.model.layers)
            boosts[index] = LayerBoost("weighted", int(level * DIM), energies[index])
            assert kl == pytest.approx(naive_kl(model, window, boosts), rel=1e-3, abs=1e-9)
        assert curve[0] > curve[1] > 0
    after = model(input_ids=window[None]).logits
    assert torch.equal(after, model(input_ids=window[None]).logits), "the layers compute again"
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_measuring_twice_gives_the_same(model):
    profiles = [measure_profile(model, WINDOWS, [random_ids(500, seed=3)], PROVENANCE) for _ in range(2)]
    for index, layer in profiles[0].layers.items():
        assert torch.equal(layer.query_energy, profiles[1].layers[index].query_energy)
        assert layer.kl == profiles[1].layers[index].kl
        assert len(layer.kl) == len(profiles[0].boost_levels)


def test_layer_kl_is_the_mean_over_windows(model):
    windows = [random_ids(450, seed=5), random_ids(500, seed=6)]
    energies = {1: measure_statistics(model, windows)[1].query_energy}
    both = measure_layer_kl(model, windows, energies, (0.0, 0.25))[1]
    each = [measure_layer_kl(model, [window], energies, (0.0, 0.25))[1] for window in windows]
    assert both == pytest.approx([sum(kls) / 2 for kls in zip(*each, strict=True)], rel=1e-6)


@pytest.mark.parametrize(("share", "measured"), [(0.0, 6), (1e9, 2)])
def test_a_negligible_layer_is_measured_no_further(model, share, measured, monkeypatch):
    """Its last value stands for the levels that are left out, and they cost no run."""
    monkeypatch.setattr(layer_kl, "NEGLIGIBLE", share)
    runs = []
    log_probs = layer_kl._log_probs
    monkeypatch.setattr(layer_kl, "_log_probs", lambda *args: runs.append(1) or log_probs(*args))
    energies = {i: s.query_energy for i, s in measure_statistics(model, WINDOWS).items()}
    curves = measure_layer_kl(model, [random_ids(500)], energies, (0.0, 0.25, 0.5))
    assert len(runs) == 1 + measured
    assert all((len(set(curve)) == 1) == (share > 1) for curve in curves.values())


def test_progress_is_told_to_the_end(model):
    told = []
    measure_profile(model, WINDOWS, [random_ids(500)], PROVENANCE, progress=lambda *step: told.append(step))
    for what, total in (("queries and keys", 2), ("layer KL", 10)):
        assert [step for step in told if step[0] == what] == [(what, done, total) for done in range(total + 1)]


def test_skipped_layers_are_not_measured(model):
    profile = measure_profile(model, WINDOWS, [random_ids(500)], PROVENANCE, skip_layers=[0])
    assert list(profile.layers) == [1]
    full = measure_profile(model, WINDOWS, [random_ids(500)], PROVENANCE)
    assert torch.equal(full.layers[1].query_energy, profile.layers[1].query_energy)
    assert full.layers[1].kl[0] == profile.layers[1].kl[0]


def test_layers_to_skip_that_do_not_exist():
    layers = layers_of(tiny_config())
    assert measurable_layers(layers, []) == [0, 1]
    for unknown in (2, -1):
        with pytest.raises(ConfigError, match=f"no layer {unknown} to skip"):
            measurable_layers(layers, [0, unknown])
    with pytest.raises(ConfigError, match="Every layer is skipped"):
        measurable_layers(layers, [0, 1])


def test_sliding_layers_are_not_measured():
    assert measurable_layers(layers_of(tiny_config("gemma2")), []) == [1]
    assert list(measure_statistics(tiny_model("gemma2"), WINDOWS)) == [1]


@pytest.mark.parametrize("projection", ["q_proj", "k_proj"])
@pytest.mark.parametrize(("value", "said"), [(0.0, "are all zero"), (math.nan, "NaN"), (math.inf, "NaN or infinite")])
def test_layers_without_sense_are_refused_by_name(projection, value, said):
    model = tiny_model(num_hidden_layers=3)
    torch.nn.init.constant_(getattr(model.model.layers[1].self_attn, projection).weight, value)
    what = {"q_proj": "queries", "k_proj": "keys"}[projection]
    with pytest.raises(NumericsError, match=f"Layer 1: {what} .*{said}") as caught:
        measure_statistics(model, WINDOWS)
    assert "--skip-layers" in caught.value.hint


def test_a_layer_that_is_never_called_is_refused_by_name():
    model = tiny_model()
    model.model.layers = model.model.layers[:1]
    with pytest.raises(NumericsError, match="Layer 1 was never observed"):
        measure_statistics(model, WINDOWS)


def test_windows_that_hold_no_page(model):
    with pytest.raises(DataError, match="shorter than a page: 160 tokens"):
        measure_statistics(model, [*WINDOWS, random_ids(159)])
    assert measure_statistics(model, [random_ids(160)])[0].num_pages == 1
    with pytest.raises(DataError, match="384 tokens, scoring starts at 384"):
        measure_layer_kl(model, [random_ids(384)], {0: torch.ones(HEADS, DIM)})
    with pytest.raises(ConfigError, match="metric is 'mood'"):
        measure_statistics(model, WINDOWS, "mood")


# --- the outlier -------------------------------------------------------------------------------------------------


CHANNEL, PARTNER = 1, 1 + DIM // 2
"""The second fastest rotation; RoPE turns the channel into its partner and back."""


@pytest.fixture(scope="module")
def outlier_model():
    """A bias of 600 on one high-frequency key channel of layer 1, head 1, as Qwen2.5-7B really has. Queries read it
    weakly, as they must in a model that works: at full strength the softmax would see nothing else."""
    model = tiny_model("qwen2", num_hidden_layers=2)
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.k_proj.bias[DIM + CHANNEL] = 600
        for query_head in (2, 3):
            for channel in (CHANNEL, PARTNER):
                attention.q_proj.weight[query_head * DIM + channel] *= 0.05
    return model


@pytest.fixture(scope="module")
def outlier_profile(outlier_model):
    return measure_profile(outlier_model, WINDOWS, [random_ids(500, seed=7)], PROVENANCE)


@pytest.mark.parametrize("metric", ["query", "magnitude", "attention"])
def test_outlier_and_its_partner_rank_first(outlier_model, metric):
    scores = measure_statistics(outlier_model, WINDOWS, metric)[1].scores(metric)
    assert set(scores[1].topk(2).indices.tolist()) == {CHANNEL, PARTNER}
    assert float(scores[1].topk(3).values[1] / scores[1].topk(3).values[2]) > 2


def test_outlier_is_in_the_profile(outlier_profile):
    scores = outlier_profile.layers[1].channel_scores
    assert set(scores[1].topk(2).indices.tolist()) == {CHANNEL, PARTNER}
    kl = outlier_profile.layers[1].kl
    assert kl[1] < 0.35 * kl[0]


def test_boosting_the_outlier_cuts_the_error(outlier_model, outlier_profile):
    """Two channels boosted in each head: the profile's choice against none, and against two others."""
    window = random_ids(600, seed=9)
    energies = outlier_profile.layers[1].query_energy
    plain, boosted = measure_layer_kl(outlier_model, [window], {1: energies}, (0.0, 2 / DIM))[1]
    assert boosted < 0.35 * plain
    others = torch.tensor([[5, 9], [5, 9]])
    wrong = naive_kl(outlier_model, window, [None, LayerBoost("static", 2, channels=others)])
    right = naive_kl(
        outlier_model, window, [None, LayerBoost("static", 2, channels=torch.tensor([[5, 9], [CHANNEL, PARTNER]]))]
    )
    assert right < 0.5 * wrong
