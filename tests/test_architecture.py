"""Who may import whom, held by reading the source and by fresh processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNTIME = ROOT / "kitty_runtime"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(RUNTIME.rglob("*.py"))
    if "_profiles" not in path.parts
}
MAX_LINES = 420


def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports(tree: ast.Module, type_checking: bool = True) -> set[str]:
    """Modules that a file imports, wherever in it; `type_checking` False leaves out what only type checkers see."""
    found: set[str] = set()
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if not type_checking and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # "from package import module" imports the module too
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def rooms(*names: str) -> tuple[str, ...]:
    return tuple(f"kitty_runtime.{name}" for name in names)


BASE = ("config", "errors", "version", "home")
# What each room may import of kitty_runtime, besides itself.
ALLOWED = {
    "config": ("errors",),
    "errors": (),
    "home": ("errors",),
    "quant": BASE,
    "ops": ("quant", *BASE),
    "profiles": ("quant", "models.geometry", *BASE),
    "cache": ("ops", "quant", "profiles", "models.attention", "models.geometry", *BASE),
    "models": ("ops", *BASE),
    "engine": ("cache", "ops", "quant", "profiles", "memory", "models", *BASE),
    "batch": ("engine", "models", "profiles", *BASE),
}
FORBIDDEN_TO_ALL = ("typer", "rich", "click", "kitty_cli")


@pytest.mark.parametrize("room", ALLOWED)
def test_direction_of_imports(room):
    (prefix,) = rooms(room)
    checked = 0
    for name, tree in trees().items():
        if inside(name, (prefix,)):
            checked += 1
            own = {
                module for module in imports(tree) if inside(module, ("kitty_runtime",)) and module != "kitty_runtime"
            }
            wrong = {module for module in own if not inside(module, (prefix, *rooms(*ALLOWED[room])))}
            assert not wrong, f"{name} imports {sorted(wrong)}"
    assert checked


def test_bookkeeping_knows_no_torch():
    scheduling = ("engine.request", "engine.sequence", "engine.scheduler")
    for name in ("kitty_runtime", *rooms("cache.page_pool", "config", "errors", "files", "gate", *scheduling)):
        path = "kitty_runtime.__init__" if name == "kitty_runtime" else name
        wrong = {x for x in imports(trees()[path], type_checking=False) if inside(x, ("torch", "triton", "numpy"))}
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_quant_and_ops_know_no_transformers():
    for name, tree in trees().items():
        if inside(name, rooms("quant", "ops")):
            assert not {x for x in imports(tree) if inside(x, ("transformers", "numpy"))}, name


def test_implementations_do_not_import_one_another():
    checked = 0
    for name, tree in trees().items():
        last = name.rpartition(".")[2]
        if inside(name, rooms("ops")) and last in ("reference", "triton"):
            checked += 1
            other = {"reference": "triton", "triton": "reference"}[last]
            wrong = {x for x in imports(tree) if inside(x, ("kitty_runtime",)) and f".{other}" in f"{x}."}
            assert not wrong, f"{name} imports {sorted(wrong)}"
    assert checked >= 3


def test_the_runtime_knows_no_command_line():
    for name, tree in trees().items():
        wrong = {module for module in imports(tree) if inside(module, FORBIDDEN_TO_ALL)}
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_the_runtime_never_prints():
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "pprint", "sys.stdout.write", "sys.stderr.write", "breakpoint"), name


def test_every_module_says_what_it_is():
    for name, tree in trees().items():
        if tree.body:  # an empty __init__.py says nothing
            assert ast.get_docstring(tree), name


@pytest.mark.parametrize("folder", ["kitty_runtime", "kitty_cli"])
def test_no_file_is_long(folder):
    lengths = {str(path): len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert lengths
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def run(code: str) -> str:
    """Output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_is_cheap():
    heavy = "('torch', 'triton', 'transformers', 'numpy', 'rich', 'typer')"
    code = (
        f"import sys; from kitty_runtime import PRESETS; print(len(PRESETS), [m for m in {heavy} if m in sys.modules])"
    )
    assert run(code) == "9 []"


BLOCK_TRITON = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'triton':
            raise ModuleNotFoundError('No module named ' + repr(name), name=name)
sys.meta_path.insert(0, Block())
"""


def test_works_without_triton():
    code = """
from kitty_runtime import KittyCache, preset
import kitty_runtime.emulation
import torch
from tiny_models import logits_in_chunks, random_ids, tiny_model
model = tiny_model()
cache = KittyCache(model.config, preset("kitty"))
logits = logits_in_chunks(model, random_ids(170), cache, [165, 1, 4])
assert bool(logits.isfinite().all()) and cache.paged.pool.num_used == 1
assert not [m for m in sys.modules if m.partition('.')[0] == 'triton']
print("ran")
"""
    assert run(BLOCK_TRITON + "sys.path.insert(0, 'tests')" + code) == "ran"
