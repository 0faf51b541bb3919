"""scripts/apply_patches.sh on a small package in a temporary folder, and on the repository's own series."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "apply_patches.sh"

ORIGINAL = "def scale(x):\n    return 2 * x\n"
PATCHED = "def scale(x):\n    return 3 * x\n"
TWICE_PATCHED = "def scale(x):\n    return 4 * x\n"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def patch_text(before: str, after: str) -> str:
    removed, added = before.splitlines()[1], after.splitlines()[1]
    return (
        "From 0000000 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] demo: change the factor\n\n---\n"
        "--- a/demo/core.py\n+++ b/demo/core.py\n@@ -1,2 +1,2 @@\n def scale(x):\n"
        f"-{removed}\n+{added}\n"
    )


def series_entry(file: str, before: str, after: str, version: str = "1.0") -> str:
    return (
        f'[[patch]]\nfile = "{file}"\npackage = "demo"\nversions = ["{version}"]\n'
        'reason = "a test"\nupstream = "none"\nremove_when = "never"\n'
        f'[[patch.target]]\npath = "demo/core.py"\nbefore = "{digest(before)}"\nafter = "{digest(after)}"\n'
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of packages with ``demo`` 1.0."""
    folder = tmp_path / "site-packages"
    (folder / "demo").mkdir(parents=True)
    (folder / "demo" / "core.py").write_text(ORIGINAL)
    info = folder / "demo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
    return folder


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """A series of one patch."""
    (tmp_path / "one.patch").write_text(patch_text(ORIGINAL, PATCHED))
    path = tmp_path / "series.toml"
    path.write_text(series_entry("one.patch", ORIGINAL, PATCHED))
    return path


def run(root: Path, series: Path, *options: str) -> tuple[int, str]:
    command = [str(SCRIPT), "--python", sys.executable, "--root", str(root), "--series", str(series), *options]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def core(root: Path) -> str:
    return (root / "demo" / "core.py").read_text()


def test_the_repository_needs_no_patch():
    command = [str(SCRIPT), "--python", sys.executable, "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout.split(":")[0]) == (0, "no patches")


def test_apply_twice_then_revert_twice(root: Path, series: Path):
    assert run(root, series, "--check") == (1, "missing  one.patch\n")
    assert core(root) == ORIGINAL
    assert run(root, series) == (0, "applied  one.patch\n")
    assert core(root) == PATCHED
    assert run(root, series, "--check") == (0, "applied  one.patch\n")
    assert run(root, series) == (0, "already applied  one.patch\n")
    assert core(root) == PATCHED
    assert run(root, series, "--revert") == (0, "reverted  one.patch\n")
    assert core(root) == ORIGINAL
    assert run(root, series, "--revert") == (0, "not applied  one.patch\n")
    assert sorted(p.name for p in (root / "demo").iterdir()) == ["core.py"]


def test_two_patches_of_one_file(root: Path, series: Path):
    (series.parent / "two.patch").write_text(patch_text(PATCHED, TWICE_PATCHED))
    series.write_text(series.read_text() + series_entry("two.patch", PATCHED, TWICE_PATCHED))
    assert run(root, series) == (0, "applied  one.patch\napplied  two.patch\n")
    assert core(root) == TWICE_PATCHED
    assert run(root, series, "--check")[0] == 0
    assert run(root, series, "--revert") == (0, "reverted  two.patch\nreverted  one.patch\n")
    assert core(root) == ORIGINAL


def test_works_inside_another_repository(root: Path, series: Path):
    subprocess.run(["git", "init", "--quiet", str(root.parent)], check=True)
    assert run(root, series)[0] == 0
    assert core(root) == PATCHED


def test_refuses_a_file_in_an_unknown_state(root: Path, series: Path):
    (root / "demo" / "core.py").write_text(ORIGINAL + "# edited\n")
    for options in ((), ("--check",), ("--revert",)):
        code, output = run(root, series, *options)
        assert code == 2
        assert "neither the original nor patched" in output and "reinstall demo" in output
    assert core(root) == ORIGINAL + "# edited\n"


def test_refuses_another_version(root: Path, series: Path):
    series.write_text(series_entry("one.patch", ORIGINAL, PATCHED, version="2.0"))
    code, output = run(root, series)
    assert code == 2
    assert "is for demo 2.0, but" in output and "holds 1.0" in output
    assert core(root) == ORIGINAL


def test_refuses_a_patch_that_makes_something_else(root: Path, series: Path):
    series.write_text(series_entry("one.patch", ORIGINAL, TWICE_PATCHED))
    code, output = run(root, series)
    assert code == 2
    assert f"the series says {digest(TWICE_PATCHED)}" in output
    assert core(root) == ORIGINAL


def test_names_the_missing_key(root: Path, series: Path):
    series.write_text('[[patch]]\nfile = "one.patch"\npackage = "demo"\n')
    code, output = run(root, series)
    assert code == 2
    assert "one.patch lacks reason, remove_when, target, upstream, versions" in output
