"""Run something right after a module is imported, whoever imports it.

veRL's registries want classes, and the modules that hold the registries import every engine there is. A process that
needs no engine should not import one to register another: so psrl's classes are registered when veRL imports the
registry, and not before.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_waiting: dict[str, list[Callable[[], None]]] = {}


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call ``call`` once ``name`` is imported: now, if it is. What the call raises, the import raises."""
    if name in sys.modules and not getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False):
        call()
        return
    _waiting.setdefault(name, []).append(call)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the modules that something waits for, by the other finders, and wraps their loaders."""

    def __init__(self) -> None:
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        for call in _waiting.pop(module.__name__, []):
            call()
