"""Methods as people write them: presets, peers, presets with settings; and back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kitty_cli.method_specs import SETTINGS, method_name, parse_method, parse_methods
from kitty_runtime.config import PRESETS, CacheConfig, preset
from kitty_runtime.errors import ConfigError
from kitty_runtime.peers import PEERS


def test_names():
    found = parse_methods(",".join([*PRESETS, *PEERS]))
    assert found == {**PRESETS, **PEERS}
    assert list(found) == [*PRESETS, *PEERS]
    assert list(parse_methods(" kitty , kv4 ")) == ["kitty", "kv4"]


def test_settings():
    spec = "weighted:boost_ratio=0.25:k_recent_len=128:v_recent_len=128:clip_search=true:policy=dynamic"
    expected = replace(
        preset("weighted"), boost_ratio=0.25, k_recent_len=128, v_recent_len=128, clip_search=True, policy="dynamic"
    )
    assert parse_method(spec) == expected


@pytest.mark.parametrize("name", [*PRESETS, *PEERS])
def test_a_name_is_read_back(name):
    assert method_name(parse_method(name)) == name


@pytest.mark.parametrize(
    "config",
    [
        CacheConfig(boost_ratio=0.1),
        CacheConfig(k_bits=4, v_bits=4, boost_ratio=0.0),
        CacheConfig(clip_search=True, seed=3),
        CacheConfig(policy="static", boost_ratio=0.5, sink_len=0),
        replace(preset("kitty"), boost_ratio=0.2),
    ],
)
def test_settings_are_read_back(config):
    for base in ("weighted", "kitty"):
        assert parse_method(method_name(config, base)) == config


def test_equal_settings_have_one_name():
    assert list(parse_methods("weighted:boost_ratio=0.250")) == ["weighted:boost_ratio=0.25"]
    assert list(parse_methods("kitty:boost_ratio=0.25")) == ["kitty-pro"]
    assert list(parse_methods("weighted:seed=0")) == ["weighted"]
    assert list(parse_methods("kv4:k_bits=2")) == ["kv4:k_bits=2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "There is no method ''"),
        ("kitty,,kv4", "There is no method ''"),
        ("kity", "There is no method 'kity'"),
        ("kitty,kitty", "names kitty twice"),
        ("kitty-pro,kitty:boost_ratio=0.25", "names kitty-pro twice"),
        ("kitty:boost=0.2", "'boost=0.2' in 'kitty:boost=0.2' is no setting"),
        ("kitty:prefill=full", "is no setting"),
        ("kitty:seed", "'seed' in 'kitty:seed' is no setting"),
        ("kitty:", "'' in 'kitty:' is no setting"),
        ("kitty:seed=1:seed=2", "sets seed twice"),
        ("kitty:seed=one", "not a whole number"),
        ("kitty:sink_len=1.5", "not a whole number"),
        ("kitty:boost_ratio=some", "not a number"),
        ("kitty:clip_search=1", "not true or false"),
        ("kitty:boost_ratio=nan", "boost_ratio is nan"),
        ("kitty:policy=best", "policy is 'best'"),
        ("kitty:k_bits=3", "k_bits is 3"),
        ("fp8:seed=1", "takes no settings"),
    ],
)
def test_what_is_refused(text, said):
    with pytest.raises(ConfigError) as error:
        parse_methods(text)
    assert said in error.value.message
    assert error.value.hint


def test_every_setting_has_a_type():
    assert set(SETTINGS.values()) <= {int, float, bool, str}
    assert "prefill" not in SETTINGS
