"""Imports go one way: core <- cache, data <- runtime <- integrations <- agents, rollout, replay <- cli.

The modules directly in psrl/ are the core, itself ordered types, cost <- tree <- grouping <- planning: NumPy and the
standard library only. Packages of one layer do not import each other.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "psrl"

PLANNING = 3
LAYERS = {
    **{path.stem: PLANNING for path in PACKAGE.glob("*.py")},
    "types": 0,
    "errors": 0,
    "threads": 0,
    "config": 0,
    "cost": 0,
    "tiers": 0,
    "tree": 1,
    "grouping": 2,
    "cache": 4,
    "console": 4,
    "data": 4,
    "models": 4,
    "placement": 4,
    "analyze": 5,
    "runtime": 5,
    "plan_view": 6,
    "integrations": 6,
    "agents": 7,
    "rollout": 7,
    "replay": 7,
    "simulate": 7,
    "bench": 8,
    "doctor": 8,
    "offline": 8,
    "tune": 8,
    "cli": 9,
}
PUBLIC_CORE = {"types", "errors", "config", "tree", "grouping", "cost", "planner", "plan_check", "blocks"}
CORE = sorted((PUBLIC_CORE | {path.stem for path in PACKAGE.glob("*.py")}) - {"__init__"})
UPSTREAMS = {"verl", "megatron", "mbridge", "ray", "transformer_engine"}
MAY_IMPORT_UPSTREAMS = {"integrations", "agents", "rollout"}

BLOCKED = ("torch", "tensordict", "transformers", "safetensors", *sorted(UPSTREAMS))
IMPORT_BLOCKED = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError("the core must not import " + name)

sys.meta_path.insert(0, Blocked())
importlib.import_module("psrl.{module}")
assert not set({blocked!r}) & set(sys.modules)
"""


class Import(NamedTuple):
    file: str
    line: int
    importer: str
    """Top part of the importing module: ``tree``, ``runtime``, …"""
    target: str
    """Dotted name of what is imported."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file, at any depth of it, with relative ones resolved."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    package = parts[:-1]
    importer = parts[1]
    file = str(path.relative_to(REPOSITORY))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, importer, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield Import(file, node.lineno, importer, ".".join([*base, alias.name]))


def all_imports() -> list[Import]:
    files = (path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py")
    return [found for path in files for found in imports_of(path)]


def test_every_package_has_a_layer():
    packages = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    assert packages - LAYERS.keys() == set()


def test_core_is_complete():
    assert PUBLIC_CORE - {path.stem for path in PACKAGE.glob("*.py")} == set()


WITHOUT_TORCH = (
    "data", "placement.orchestrator", "placement.fingerprints", "analyze.job", "plan_view.job", "simulate.job",
    "tune.options",
)  # fmt: skip


@pytest.mark.parametrize("module", [*CORE, *WITHOUT_TORCH])
def test_module_imports_without_torch(module: str):
    code = IMPORT_BLOCKED.format(blocked=BLOCKED, module=module)
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_imports_go_one_way():
    wrong = []
    for found in all_imports():
        parts = found.target.split(".")
        if parts[0] != "psrl" or parts[1] not in LAYERS:
            continue
        imported, importer = LAYERS[parts[1]], LAYERS[found.importer]
        same_layer = imported == importer and (imported <= PLANNING or parts[1] == found.importer)
        if not (imported < importer or same_layer):
            wrong.append(str(found))
    assert wrong == []


def test_core_imports_only_numpy_and_the_standard_library():
    allowed = {*sys.stdlib_module_names, "numpy", "psrl"}
    wrong = [str(f) for f in all_imports() if f.importer in CORE and f.target.split(".")[0] not in allowed]
    assert wrong == []


def test_upstreams_are_imported_in_one_place():
    wrong = [
        str(found)
        for found in all_imports()
        if found.target.split(".")[0] in UPSTREAMS and found.importer not in MAY_IMPORT_UPSTREAMS
    ]
    assert wrong == []


def test_relative_imports_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    file = tmp_path / "psrl" / "cache" / "manager.py"
    file.parent.mkdir(parents=True)
    file.write_text("from ..runtime import session\nfrom . import pool\nimport torch.nn\n")
    assert [found.target for found in imports_of(file)] == ["psrl.runtime.session", "psrl.cache.pool", "torch.nn"]
    assert {found.importer for found in imports_of(file)} == {"cache"}
