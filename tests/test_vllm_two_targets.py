"""A real vLLM server on two targets, one of which dies and comes back while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from long_prompt import long_prompt
from published import published_targets
from vllm_launches import CHUNK, Launches, full_chunks, wait_until_stored
from vllm_server import StartServer

pytestmark = [pytest.mark.engine, pytest.mark.full]

#: A target that works again is probed within a minute.
_PATIENCE_S = 120.0


class Mount:
    """A directory that can be unmounted under its users, with nothing writable beneath."""

    def __init__(self, place: Path) -> None:
        self.point = place / "mount"
        self._data, beneath = place / "data", place / "beneath"
        for directory in (self.point, self._data, beneath):
            directory.mkdir(parents=True)
        self._run("mount", "--bind", str(beneath), str(self.point))
        self._run("mount", "-o", "remount,bind,ro", str(self.point))

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    def come(self) -> None:
        self._run("mount", "--bind", str(self._data), str(self.point))

    def go(self) -> None:
        """As when a server is lost: whoever has files open keeps them, all else is gone."""
        self._run("umount", "--lazy", str(self.point))


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    try:
        made = Mount(tmp_path / "fast")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing can be mounted here ({error})")
    made.come()
    yield made
    while os.path.ismount(made.point):
        made.go()


def until(home: Path, condition: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        found = published_targets(home)
        if found and condition(found):
            return
        assert time.monotonic() < deadline, f"it has not happened: {found}"
        time.sleep(0.5)


def test_one_of_two_targets_dies_and_returns(
    start_server: StartServer, home: Path, tmp_path: Path, mount: Mount
) -> None:
    launch = Launches(start_server, home)
    launch.configure(
        "storage:\n"
        "  write_mode: local_first\n"
        "  tiers:\n"
        f"    - {{name: fast, type: filesystem, path: {mount.point}/kv, min_free_gb: 0}}\n"
        f"    - {{name: slow, type: filesystem, path: {tmp_path}/slow, min_free_gb: 0,"
        " rung: shared}\n"
        "  fallback_local: {enabled: false}\n"
    )
    prompts = [long_prompt(17, seed=seed) for seed in range(4)]
    chunks, texts = [], []

    # In float32 a text does not depend on how many tokens are computed together.
    # Stored on the fast target, and copied to the slow one in the background.
    server = launch("--dtype", "float32")
    for prompt in prompts[:2]:
        answer = server.complete(prompt)
        assert answer.cached_tokens == 0
        chunks.append(full_chunks(answer))
        texts.append(answer.text)
    wait_until_stored(server, sum(chunks))
    until(home, lambda found: found["slow"]["copied_blocks"] == sum(chunks))
    assert published_targets(home)["fast"]["writing"]

    # It dies under the running server, which goes on and stores on the other one.
    mount.go()
    until(home, lambda found: found["fast"]["state"] == "disabled" and found["slow"]["writing"])
    assert published_targets(home)["fast"]["reason"]
    answer = server.complete(prompts[2])
    chunks.append(full_chunks(answer))
    texts.append(answer.text)
    wait_until_stored(server, sum(chunks))
    assert published_targets(home)["slow"]["stored_blocks"] >= chunks[2]
    server.stop(signal.SIGKILL)

    # A server that starts without it finds everything on the other one.
    server = launch("--dtype", "float32")
    for prompt, count, text in zip(prompts, chunks, texts, strict=False):
        answer = server.complete(prompt)
        assert answer.cached_tokens >= count * CHUNK
        assert answer.text == text
    assert published_targets(home)["fast"]["state"] == "disabled"
    assert published_targets(home)["fast"]["loaded_blocks"] == 0

    # It returns, is taken back, and takes new blocks again: those that were loaded before, too.
    mount.come()
    until(home, lambda found: found["fast"]["state"] == "ready" and found["fast"]["writing"])
    before = published_targets(home)["fast"]["stored_blocks"]
    answer = server.complete(prompts[3])
    chunks.append(full_chunks(answer))
    until(home, lambda found: found["fast"]["stored_blocks"] >= before + chunks[3])
    assert server.metric("lifeboat_load_blocks_failed_total") == 0
    server.stop(signal.SIGINT)
