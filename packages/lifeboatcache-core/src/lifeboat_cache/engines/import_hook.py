"""Does something once a module has been imported, without importing it.

Engines load plugins in every process, and most of them never need what ours watches:
importing it there would cost each of them up to seconds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["when_imported"]


class _Watch(MetaPathFinder):
    """Finds one module as the others do, and has it tell when it has run."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._asking = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != self._name or self._asking:
            return None
        self._asking = True  # the others only
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        loader = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then()

            loader.__dict__["exec_module"] = exec_module
        return spec


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call ``then`` after a module has been imported; now, if it has been.

    Parameters
    ----------
    name
        Full name of the module.
    then
        Called once, inside the import: it must not raise.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watch(name, then))
