"""The gate on the demo model against the baseline in the repository, as our own continuous integration runs it: an
unchanged tree passes, regressions that the code plants behind unchanged settings do not.

The text is the LICENSE file: the manual pages, the usual text, differ between versions of Python. Windows of 1024
tokens scatter by some percent between CPUs, which round differently; hence the tolerance. To write the baseline anew:

    kitty check demo --data LICENSE --methods weighted --windows 2 --seq-len 1024 \\
      --profile profiles/SmolLM2-135M-Instruct.safetensors --write-baseline tests/data/check-demo.json
"""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

from kitty_runtime.home import kitty_home
from kitty_runtime.profile_store import shipped_profiles_dir
from kitty_runtime.profiles import BoostProfile

pytestmark = pytest.mark.slow

BASELINE = ROOT / "tests" / "data" / "check-demo.json"
SENSITIVE_LAYER = 18


@pytest.fixture(autouse=True)
def home():
    """kitty's folder stays what it is: the demo model is converted there once."""
    return kitty_home()


@pytest.fixture
def gate(call):
    """`kitty check` of the default preset with the profile that ships."""
    profile = shipped_profiles_dir() / "SmolLM2-135M-Instruct.safetensors"
    measured = ("check", "demo", "--data", ROOT / "LICENSE", "--methods", "weighted", "--profile", profile)
    length = ("--windows", "2", "--seq-len", "1024")
    return lambda: call(*measured, *length, "--baseline", BASELINE, "--tolerance", "0.1")


def test_an_unchanged_tree_passes(gate):
    done = gate()
    assert done.code == 0, done.stdout
    assert "another boost profile" not in done.stderr
    assert "gate passed" in done.stdout


def without_the_sensitive_layer(budgets):
    return lambda self, boost_ratio: {**budgets(self, boost_ratio), SENSITIVE_LAYER: 0}


def a_quarter_less(budgets):
    return lambda self, boost_ratio: budgets(self, 0.75 * boost_ratio)


@pytest.mark.parametrize("planted", [without_the_sensitive_layer, a_quarter_less])
def test_a_planted_regression_fails(gate, planted, monkeypatch):
    monkeypatch.setattr(BoostProfile, "budgets", planted(BoostProfile.budgets))
    done = gate()
    assert done.code == 3, done.stdout
    assert re.search(r"weighted: KL is \S+ above the baseline's", done.stdout)
