"""What is on its way to storage when a server ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_rig import Case, Rig

from lifeboat_cache.integrations import sglang_exit
from lifeboat_cache.interface import State

Attach = Callable[..., Rig]


class Tree:
    """What SGLang's radix cache has of it when a scheduler lets go of its memory."""

    linker = host_pool_group = None

    def __init__(self, controller: Any) -> None:
        self.cache_controller = controller


def test_pages_in_the_queue_are_stored_before_the_memory_goes(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    rig = attach(Case(pages=12))
    rig.ready()
    kept = rig.ours._mover.store

    def slowly(*args: Any) -> Any:
        time.sleep(0.2)
        return kept(*args)

    monkeypatch.setattr(rig.ours._mover, "store", slowly)
    hashes = rig.hashes()
    for first in range(0, 12, 2):  # as nodes of a tree come
        indices = rig.kv.alloc(2 * rig.case.tokens)
        rig.controller.write_storage(indices, [], hashes[first : first + 2], None)
    assert rig.backend.batch_exists(hashes) < 12
    UnifiedRadixCache.release_host_resources(Tree(rig.controller))
    assert not rig.controller.backup_thread.is_alive()
    assert rig.ours.state is State.DISABLED
    with attach(rig.case) as later:
        later.ready()
        assert later.backend.batch_exists(hashes) == 12


def test_a_queue_that_does_not_empty_is_not_waited_for(attach: Attach) -> None:
    rig = attach(Case(pages=4))
    held = threading.Event()

    class Stuck:
        def empty(self) -> bool:
            return False

        def put(self, _item: object) -> None:
            pass

    class Controller:
        backup_queue = Stuck()
        backup_thread = threading.Thread(target=held.wait, daemon=True)
        storage_stop_event = threading.Event()

    Controller.backup_thread.start()
    began = time.monotonic()
    sglang_exit._drain(Controller(), 0.3)
    assert 0.2 < time.monotonic() - began < 20
    assert Controller.storage_stop_event.is_set()
    held.set()
    rig.close()


@pytest.mark.parametrize("how", ["plain", "multiprocessing"])
def test_a_process_that_ends_by_itself_finishes_its_backends(tmp_path: Path, how: str) -> None:
    script = tmp_path / "process.py"
    script.write_text(
        f"""
import multiprocessing
from pathlib import Path

from lifeboat_cache.integrations import sglang_exit


class Backend:
    def finish(self, timeout):
        Path({str(tmp_path / "finished")!r}).write_text(str(timeout))


def main():
    global backend
    backend = Backend()
    sglang_exit.at_exit(backend)


if __name__ == "__main__":
    if {how!r} == "plain":
        main()
    else:
        process = multiprocessing.get_context("spawn").Process(target=main)
        process.start()
        process.join()
"""
    )
    subprocess.run(
        [sys.executable, str(script)],
        check=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert (tmp_path / "finished").read_text() == str(sglang_exit.QUEUE_S)


def test_signal_handlers_are_left_alone(attach: Attach) -> None:
    import signal

    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)}
    rig = attach(Case(pages=2))
    assert rig.store() == 2
    assert before == {one: signal.getsignal(one) for one in before}
