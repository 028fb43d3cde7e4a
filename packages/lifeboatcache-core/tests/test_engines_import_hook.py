"""A module is watched without being imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lifeboat_cache.engines.import_hook import when_imported

NAMES = ("lifeboat_watched", "lifeboat_watched.inner")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "lifeboat_watched"
    place.mkdir()
    (place / "__init__.py").write_text("")
    (place / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield place
    sys.meta_path[:] = finders
    for name in NAMES:
        sys.modules.pop(name, None)


def test_it_is_told_after_the_module_has_run(package: Path) -> None:
    seen: list[int] = []
    finders = list(sys.meta_path)
    when_imported(NAMES[1], lambda: seen.append(sys.modules[NAMES[1]].value))
    assert NAMES[0] not in sys.modules
    importlib.import_module(NAMES[0])
    assert seen == []
    module = importlib.import_module(NAMES[1])
    assert seen == [1]
    assert sys.meta_path == finders
    assert module.__spec__ is not None
    assert module.__spec__.origin == str(package / "inner.py")


def test_what_has_been_imported_is_told_at_once(package: Path) -> None:
    importlib.import_module(NAMES[1])
    seen: list[int] = []
    when_imported(NAMES[1], lambda: seen.append(1))
    assert seen == [1]


def test_several_can_watch_one_module(package: Path) -> None:
    seen: list[str] = []
    when_imported(NAMES[1], lambda: seen.append("first"))
    when_imported(NAMES[1], lambda: seen.append("second"))
    importlib.import_module(NAMES[1])
    assert sorted(seen) == ["first", "second"]


def test_asking_for_the_specification_imports_nothing(package: Path) -> None:
    seen: list[int] = []
    when_imported(NAMES[0], lambda: seen.append(1))
    assert importlib.util.find_spec(NAMES[0]) is not None
    assert seen == []
    importlib.import_module(NAMES[0])
    assert seen == [1]


def test_a_module_that_fails_is_not_told_and_fails_as_before(package: Path) -> None:
    (package / "inner.py").write_text("raise RuntimeError('broken')\n")
    seen: list[int] = []
    when_imported(NAMES[1], lambda: seen.append(1))
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(NAMES[1])
    (package / "inner.py").write_text("value = 22\n")
    importlib.invalidate_caches()
    importlib.import_module(NAMES[1])
    assert seen == [1]


def test_a_missing_module_stays_missing(package: Path) -> None:
    when_imported("lifeboat_watched.nothing", lambda: pytest.fail("it is not there"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lifeboat_watched.nothing")
