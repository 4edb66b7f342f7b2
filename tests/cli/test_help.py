"""Help and version: complete, cheap, and without torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ("info", "profile", "check", "chat", "batch", "bench", "env")


def cpu_seconds(*command: str) -> float:
    """User and system time of a process."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_command(call, flag):
    done = call(flag)
    assert (done.code, done.stderr) == (0, "")
    for command in COMMANDS:
        assert re.search(rf"^\W*{command} ", done.stdout, re.MULTILINE), command


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(call, command, flag):
    done = call(command, flag)
    assert (done.code, done.stderr) == (0, "")
    assert f"{command} [OPTIONS]" in done.stdout
    expected = {
        "info": ["--report", "--memory", "--json", "--preset", "PROFILE"],
        "profile": [
            "--metric",
            "--data",
            "--tokens",
            "--num-samples",
            "--max-seq-length",
            "--seed",
            "--skip-layers",
            "--report",
        ],
        "check": [
            "--methods",
            "--full",
            "--needle",
            "--format",
            "--max-kl",
            "--baseline",
            "--write-baseline",
            "--data",
            "--report",
        ],
        "chat": ["--bits", "--boost", "--preset", "--profile", "-ctk", "-ctv", "--system-prompt", "--seed", "--top-p"],
        "batch": [
            "--input-file",
            "--output-file",
            "--resume",
            "--retry-failed",
            "--overwrite",
            "--model",
            "--kv-bytes",
        ],
        "bench": ["--batch-size", "--input-len", "--num-prompts", "--request-rate", "--memory", "--load-format"],
        "env": ["--json"],
    }[command]
    assert [option for option in expected if option not in done.stdout] == []


def test_no_arguments_shows_help(run):
    assert "Usage" in run().stdout


def test_help_costs_a_fifth_of_torch_at_most():
    """Least of four alternating runs: the cores are shared, and a neighbor slows whoever runs at the moment."""
    help_s, torch_s = [], []
    for _ in range(4):
        help_s.append(cpu_seconds(sys.executable, "-m", "kitty_cli.main", "--help"))
        torch_s.append(cpu_seconds(sys.executable, "-c", "import torch"))
    assert min(help_s) <= min(torch_s) / 5


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['kitty', '--help']\n"
        "from kitty_cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'datasets', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_with_an_unknown_backend_is_one_error(run):
    done = run("--version", KITTY_BACKEND="nonsense")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: KITTY_BACKEND is 'nonsense'.")
    assert "Traceback" not in done.stderr


def test_version_names_dependencies_and_backend(call):
    from importlib.metadata import version

    from kitty_runtime.version import __version__

    done = call("--version")
    assert (done.code, done.stderr) == (0, "")
    first, dependencies, backend = done.stdout.splitlines()
    assert first == f"kitty {__version__}"
    for package in ("torch", "transformers", "typer"):
        assert f"{package} {version(package)}" in dependencies
    assert backend.startswith("backend: torch reference on ")


def test_env_says_the_same_to_people_and_machines(call, home):
    facts = call("env", "--json").json()
    assert facts.pop("schema_version") == 1
    assert facts["home"] == str(home)
    assert call("env").stdout.splitlines() == [f"{name}: {value}" for name, value in facts.items()]


@pytest.mark.parametrize("arguments", [["dance"], ["--dance"], ["info", "--dance"], ["chat", "a", "b", "c"]])
def test_usage_errors_exit_with_2(call, arguments):
    done = call(*arguments)
    assert (done.code, done.stdout) == (2, "")
    assert "Usage:" in done.stderr


def test_click_is_not_imported():
    for path in [*(ROOT / "kitty_cli").rglob("*.py"), *(ROOT / "tests" / "cli").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.partition(".")[0] == "click"], path
