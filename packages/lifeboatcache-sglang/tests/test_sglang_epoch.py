"""Weights that change in a running server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_rig import Case, Restored, Rig

from lifeboat_cache.integrations import sglang_epoch

Attach = Callable[..., Rig]

NOTHING = Restored(0, 0, same=True, state=False)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sglang_epoch, "_has_changed", False)
    yield
    sglang_epoch._listeners.clear()


def everything(case: Case) -> Restored:
    return Restored(case.pages, case.pages, same=True, state=case.mamba)


def test_nothing_is_served_across_a_change_of_weights(
    attach: Attach, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(pages=12)
    with attach(case) as rig:
        assert rig.store() == 12
        old = rig.ours.store
        sglang_epoch.changed("update_weights_from_disk")
        assert rig.ours.store is not old
        assert rig.restore() == NOTHING
        # What is computed from then on is served again, in this process.
        assert rig.store() == 12
        assert rig.restore() == everything(case)
        sglang_epoch.changed("update_weights_from_disk")
        assert rig.restore() == NOTHING
    # The checkpoint's own KV is what another process finds; the rest is gone.
    monkeypatch.setattr(sglang_epoch, "_has_changed", False)
    with attach(case) as later:
        assert later.restore() == everything(case)
    documents = list((home / "kv").rglob("namespace.json"))
    assert not any('"epoch"' in path.read_text() for path in documents)


def test_what_is_attached_after_a_change_serves_nothing_of_before(
    attach: Attach, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang detaches and attaches backends in a running server."""
    case = Case(pages=12)
    with attach(case) as rig:
        assert rig.store() == 12
    sglang_epoch.changed("update_weights_from_tensor")  # nobody is attached
    for _ in range(2):
        with attach(case) as later:
            assert later.restore() == NOTHING
            assert later.store() == 12
            assert later.restore() == everything(case)
            sglang_epoch.changed("update_weights_from_tensor")
            assert later.restore() == NOTHING
    said = [one for one in caplog.messages if "weights may have changed" in one]
    assert len(said) == 2, "once each time that one is attached"
    monkeypatch.setattr(sglang_epoch, "_has_changed", False)
    with attach(case) as another_process:
        assert another_process.restore() == everything(case)
    documents = list((home / "kv").rglob("namespace.json"))
    assert not any('"epoch"' in path.read_text() for path in documents)


def test_weights_are_watched_from_the_start_of_a_process() -> None:
    """A server that runs without us may have one attached later."""
    code = (
        "import importlib, sys\n"
        "from lifeboat_cache.integrations import sglang_epoch, sglang_plugin\n"
        "sglang_plugin.register()\n"
        "assert not {module for module, _ in sglang_epoch.WATCHED} & set(sys.modules)\n"
        "for module, path in sglang_epoch.WATCHED:\n"
        "    found = importlib.import_module(module)\n"
        "    for part in path.split('.'):\n"
        "        found = getattr(found, part)\n"
        "    assert hasattr(found, '_lifeboat_epoch'), path\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "LIFEBOAT_CACHE"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_change_that_follows_another_opens_no_further_store(attach: Attach) -> None:
    rig = attach(Case(pages=2))
    sglang_epoch.changed("update_weights_from_tensor")
    store = rig.ours.store
    for _ in range(5):
        sglang_epoch.changed("update_weights_from_tensor")
    assert rig.ours.store is store


def test_pages_loaded_while_weights_changed_are_not_served(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = attach(Case(pages=6))
    assert rig.store() == 6
    load = rig.ours._mover.load

    def meanwhile(*args: Any) -> Any:
        found = load(*args)
        sglang_epoch.changed("update_weights_from_ipc")
        return found

    monkeypatch.setattr(rig.ours._mover, "load", meanwhile)
    hashes, indices = rig.hashes(), rig.kv.alloc(6 * 64)
    assert rig.ours.batch_get_v1(hashes, indices) == [False] * 6


def test_pages_on_their_way_during_a_change_are_not_served_after_it(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backup thread may have its store in hand when the change ends."""
    rig = attach(Case(pages=6))
    rig.ready()
    hashes, indices = rig.hashes(), rig.kv.alloc(6 * 64)
    sglang_epoch.changed("update_weights_from_disk")  # it begins
    during = rig.ours.store
    starts = rig.ours._pools["kv"].pages.starts

    def meanwhile(*args: Any) -> Any:
        sglang_epoch.changed("update_weights_from_disk")  # and ends
        return starts(*args)

    class Pages:
        def __getattr__(self, name: str) -> Any:
            return meanwhile if name == "starts" else getattr(kept, name)

    kept = rig.ours._pools["kv"].pages
    monkeypatch.setattr(rig.ours._pools["kv"], "pages", Pages())
    rig.ours.batch_set_v1(hashes, indices)
    monkeypatch.undo()
    assert rig.ours.store is not during
    assert rig.ours.batch_exists(hashes) == 0


def test_every_way_to_change_weights_is_noticed(model: Path) -> None:
    import importlib

    sglang_epoch.install()
    for module, path in sglang_epoch.WATCHED:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        assert hasattr(found, "_lifeboat_epoch"), path


def test_a_change_is_told_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Updater:
        def update_weights_from_disk(self, request: str) -> str:
            told.append("updating")
            return f"done {request}"

        def update_weights_from_ipc(self, request: str) -> str:
            raise RuntimeError(request)

    for name in ("update_weights_from_disk", "update_weights_from_ipc"):
        original = getattr(Updater, name)
        setattr(Updater, name, sglang_epoch._watched(original, sglang_epoch._always(name)))
    monkeypatch.setattr(sglang_epoch, "_listeners", [told.append])
    assert Updater().update_weights_from_disk("x") == "done x"
    assert told == ["update_weights_from_disk", "updating", "update_weights_from_disk"]
    with pytest.raises(RuntimeError, match="y"):
        Updater().update_weights_from_ipc("y")
    assert told[3:] == ["update_weights_from_ipc"] * 2


def test_a_flush_counts_only_after_a_change(attach: Attach) -> None:
    case = Case(pages=6)
    rig = attach(case)
    assert rig.store() == 6
    store = rig.ours.store
    rig.controller.reset()
    assert rig.ours.store is store
    assert rig.restore() == everything(case)
    sglang_epoch.changed("update_weights_from_disk")
    assert rig.store() == 6  # of what the old weights computed, still in SGLang's tree
    rig.controller.reset()
    assert rig.restore() == NOTHING


def test_released_memory_counts_unless_it_is_saved(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.runtime_context import get_context

    class Request:
        def __init__(self, tags: list[str] | None) -> None:
            self.tags = tags

    assert sglang_epoch._released(Request(["kv_cache"])) is None
    assert sglang_epoch._released(Request(["weights"])) == "release_memory_occupation"
    assert sglang_epoch._released(Request(None)) == "release_memory_occupation"
    monkeypatch.setattr(type(get_context()), "config_leaf", lambda self, name: True)
    assert sglang_epoch._released(Request(None)) is None
