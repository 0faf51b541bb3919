"""Calls right after an import."""

import importlib
import sys

import pytest

from psrl.integrations.verl.after_import import after_import


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose submodule imports another before it defines what it is for."""
    folder = tmp_path / "waited_for"
    folder.mkdir()
    (folder / "__init__.py").write_text("from waited_for import registry\n")
    (folder / "registry.py").write_text("found = []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "waited_for"]:
        del sys.modules[name]


def test_the_call_comes_after_the_module_and_once(package):
    calls = []
    after_import("waited_for.registry", lambda: calls.append(sys.modules["waited_for.registry"].found))
    after_import("waited_for", lambda: calls.append("package"))
    assert calls == []
    module = importlib.import_module("waited_for")
    assert calls == [[], "package"]
    importlib.reload(module)
    assert calls == [[], "package"]


def test_a_module_that_is_there_needs_no_waiting(package):
    importlib.import_module("waited_for")
    calls = []
    after_import("waited_for", lambda: calls.append(1))
    assert calls == [1]


def test_what_the_call_raises_the_import_raises(package):
    def refuse():
        raise ValueError("not here")

    after_import("waited_for.registry", refuse)
    with pytest.raises(ValueError, match="not here"):
        importlib.import_module("waited_for")
