"""Without lm-eval: one error that says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'lm_eval':
            raise ModuleNotFoundError('No module named ' + repr(name), name=name)
sys.meta_path.insert(0, Block())
"""
MESSAGE = "lm-eval is not installed.\npip install 'kitty-kv[eval]'"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "KITTY_DEBUG"},
        check=False,
    )


@pytest.mark.parametrize("arguments", [[], ["run", "--model", "kitty"]])
def test_the_command_says_so(arguments):
    code = f"""
import runpy
sys.argv = ["lm_eval", *{arguments}]
runpy.run_module("kitty_runtime.lm_eval", run_name="__main__")
"""
    done = run(code)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"Error: {MESSAGE}\n"


def test_the_import_says_so():
    code = f"""
try:
    import kitty_runtime.lm_eval.model
except ImportError as error:
    assert str(error) == {MESSAGE!r}, error
    print("refused")
"""
    assert run(code).stdout == "refused\n"
