"""A real LMCache server that `lifeboat-cache server` runs, and LMCache's real client."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_server import free_port

pytestmark = pytest.mark.engine

CHUNK, BLOCK, LAYERS, HEADS, DIM = 64, 16, 2, 2, 64
BLOCKS = 32
MODEL = "tests/no-such-model"
TOKENS = tuple(range(4 * CHUNK))


class Server:
    """The process, its port and its output."""

    def __init__(self, log: Path, extra: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.http, self._log = free_port(), log
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "lifeboat_cache.cli.main", "server", "--",
                "--port", str(self.port), "--http-port", str(self.http),
                "--prometheus-port", str(free_port()), "--l1-size-gb", "1",
                "--chunk-size", str(CHUNK), *extra,
            ],
            stdout=log.open("ab"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        end = time.monotonic() + 120
        while not self.ready():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)

    def ready(self) -> bool:
        command = [sys.executable, "-m", "lifeboat_cache.cli.main", "server", "--ready", "--"]
        command += ["--port", str(self.port)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode == 0

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=30)
        with closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode()
            assert response.status == 200, text
            return json.loads(text)

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(60)


@pytest.fixture
def serve(home: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def start(*extra: str) -> Server:
        made.append(Server(tmp_path / f"server-{len(made)}.log", extra))
        return made[-1]

    yield start
    for server in made:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


class Client:
    """A worker of an engine, as LMCache sees it."""

    def __init__(self, server: Server, mode: str, groups: Sequence[Any] = ()) -> None:
        import zmq
        from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
            create_transfer_context,
        )
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self.caches = {
            f"layer.{number}": torch.zeros(2, BLOCKS, HEADS, BLOCK, DIM, dtype=torch.bfloat16)
            for number in range(LAYERS * max(1, len(groups)))
        }
        self._groups = max(1, len(groups))
        url = f"tcp://127.0.0.1:{server.port}"
        self._client = RequestClientFactory.create(url, context=zmq.Context.instance())
        self._context = create_transfer_context(
            self.caches, instance_id=os.getpid(), req_client=self._client, mode=mode
        )
        self._context.register(
            self.caches, MODEL, 1, CHUNK // BLOCK, 60.0, engine_group_infos=groups
        )

    def _key(self, request: str, worker: int | None) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        return IPCCacheServerKey(
            MODEL, 1, worker, TOKENS, 0, len(TOKENS), request_id=request, num_kv_readers=1
        )

    def fill(self) -> None:
        for number, cache in enumerate(self.caches.values()):
            generator = torch.Generator().manual_seed(number)
            cache.copy_(torch.randn(cache.shape, generator=generator).to(cache.dtype))

    def store(self, request: str, blocks: list[int]) -> None:
        event = self._context.create_recorded_event()
        done = self._context.submit_store(
            request,
            self._key(request, 0),
            self.caches,
            [blocks] * self._groups,
            event,
            CHUNK // BLOCK,
        )
        assert done.result(timeout=60)

    def look_up(self, request: str) -> int:
        """Chunks that are there."""
        self._client.lookup(self._key(request, None), 1).result(timeout=60)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = self._client.query_prefetch_status(request).result(timeout=60)
            if found is not None:
                return int(found)
            time.sleep(0.01)
        raise TimeoutError("the lookup has no result")

    def load(self, request: str, blocks: list[int]) -> None:
        event = self._context.create_recorded_event()
        done = self._context.submit_retrieve(
            request,
            self._key(request, 0),
            self.caches,
            [blocks] * self._groups,
            event,
            CHUNK // BLOCK,
        )
        assert done.result(timeout=60)
        self._client.end_session(request).result(timeout=60)

    def close(self) -> None:
        done = self._context.unregister()
        if done is not None:
            done.result(timeout=60)
        self._context.close()
        self._client.close()


@pytest.mark.parametrize(
    "mode",
    ["engine_driven", pytest.param("lmcache_driven", marks=pytest.mark.full)],
)
def test_what_a_client_stored_comes_back_after_a_restart(
    serve: Callable[..., Server], mode: str
) -> None:
    first = serve()
    assert first.get("/healthcheck") == {"status": "healthy"}
    client = Client(first, mode)
    client.fill()
    before = [cache.clone() for cache in client.caches.values()]
    blocks = list(range(16))
    client.store("one", blocks)
    client.close()
    # SIGTERM right after the store: what is queued is written before the end.
    assert first.end(signal.SIGTERM) == 0

    second = serve()
    client = Client(second, mode)
    assert client.look_up("two") == len(TOKENS) // CHUNK
    client.load("two", blocks)
    for was, cache in zip(before, client.caches.values(), strict=True):
        assert torch.equal(was[:, :16], cache[:, :16])
        assert not cache[:, 16:].any()
    client.close()
    listed = second.get("/cache/objects?tier=l2")
    assert len(listed["entries"]) == len(TOKENS) // CHUNK
    status = json.dumps(second.get("/status"))
    assert '"type": "lifeboat"' in status
    assert second.end(signal.SIGINT) == 0


@pytest.mark.full
def test_groups_of_layers_with_a_sliding_window(serve: Callable[..., Server]) -> None:
    from lmcache.v1.multiprocess.group_view import EngineGroupInfo

    window = 2 * CHUNK
    groups = [
        EngineGroupInfo(0, (0, 1), tokens_per_block=BLOCK),
        EngineGroupInfo(1, (2, 3), tokens_per_block=BLOCK, sw_size_tokens=window),
    ]
    first = serve("--separate-object-groups")
    client = Client(first, "lmcache_driven", groups)
    client.fill()
    before = [cache.clone() for cache in client.caches.values()]
    blocks = list(range(16))
    client.store("one", blocks)
    client.close()
    assert first.end() == 0

    second = serve("--separate-object-groups")
    client = Client(second, "lmcache_driven", groups)
    assert client.look_up("two") == len(TOKENS) // CHUNK
    client.load("two", blocks)
    found = list(client.caches.values())
    for was, cache in zip(before[:2], found[:2], strict=True):
        assert torch.equal(was[:, :16], cache[:, :16])
    inside = slice(16 - window // BLOCK, 16)
    for was, cache in zip(before[2:], found[2:], strict=True):
        assert torch.equal(was[:, inside], cache[:, inside])
        assert not cache[:, : inside.start].any()  # outside of the window, and not loaded
    client.close()
    listed = second.get("/cache/objects?tier=l2")
    numbers = [entry["key"]["object_group_id"] for entry in listed["entries"]]
    assert sorted(set(numbers)) == [0, 1]
    assert second.end() == 0


@pytest.mark.full
def test_beside_another_adapter(serve: Callable[..., Server], tmp_path: Path) -> None:
    files = tmp_path / "files"
    server = serve("--l2-adapter", json.dumps({"type": "fs", "base_path": str(files)}))
    client = Client(server, "engine_driven")
    client.fill()
    client.store("one", list(range(16)))
    client.close()
    assert server.end() == 0
    assert len([path for path in files.rglob("*") if path.is_file()]) == len(TOKENS) // CHUNK


@pytest.mark.full
def test_a_second_server_of_the_same_port_is_refused(serve: Callable[..., Server]) -> None:
    server = serve()
    command = [sys.executable, "-m", "lifeboat_cache.cli.main", "server", "--"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, "--port", str(server.port)], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"runs on port" in done.stderr


@pytest.mark.full
def test_lmcaches_own_bench_verifies_what_it_reads(home: Path) -> None:
    from lmcache_rig import PLUGIN

    done = subprocess.run(
        [
            sys.executable, "-m", "lmcache.cli.main", "bench", "l2",
            "--l2-adapter", json.dumps(PLUGIN), "--num-keys", "8", "--in-flight", "4",
            "--data-size-kb", "1024", "--l1-align-bytes", "4096", "--no-skip-verify",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LMCACHE_TRACK_USAGE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "keys data verified OK" in said, said
    assert "MISMATCH" not in said, said


#: What an engine's connector does about the server, without an engine.
USER = """
import sys, time
from lifeboat_cache.config import load_config
from lifeboat_cache.integrations.lmcache_starter import ensure_server
loaded = load_config()
while True:
    ensure_server(loaded, int(sys.argv[1]))
    print("there", flush=True)
    time.sleep(0.5)
"""


@pytest.mark.full
def test_kills_of_users_and_of_the_server_that_they_share(home: Path) -> None:
    from lifeboat_cache.integrations.lmcache_leases import ServerPlaces
    from lifeboat_cache.integrations.lmcache_starter import server_pid

    path = home / "lifeboat.yaml"
    path.write_text(path.read_text() + "engine: {native_cpu_gb: 1}\n")
    port = free_port()
    places = ServerPlaces(home, port)
    users: list[subprocess.Popen[bytes]] = []

    def user() -> subprocess.Popen[bytes]:
        users.append(
            subprocess.Popen(
                [sys.executable, "-c", USER, str(port)],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        )
        return users[-1]

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, places.log.read_text()[-4000:]
            time.sleep(0.2)

    def gone(pid: int) -> bool:
        try:
            return "(zombie)" in Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return True

    try:
        # At the same time: one of them starts a server, and both use it.
        first, second = user(), user()
        for one in (first, second):
            assert one.stdout is not None
            assert one.stdout.readline() == b"there\n"
        pid = server_pid(places)
        assert places.log.read_text().count("Started server process") == 1
        assert os.getpgid(pid) not in (os.getpgid(first.pid), os.getpgid(second.pid))

        first.kill()
        first.wait()
        time.sleep(15)  # more than its grace
        assert server_pid(places) == pid

        os.kill(pid, signal.SIGKILL)
        wait(lambda: server_pid(places) not in (0, pid))  # the second has started another
        pid = server_pid(places)
        second.kill()
        second.wait()
        wait(lambda: gone(pid))

        third = user()
        assert third.stdout is not None
        assert third.stdout.readline() == b"there\n"
        pid = server_pid(places)
        os.kill(pid, signal.SIGKILL)
        third.kill()
        third.wait()
        wait(lambda: gone(pid))
        # The user may have started another one before it was killed: that ends, too.
        wait(lambda: not places.served())
        assert not places.in_use()
        assert not [name for name in os.listdir("/dev/shm") if str(pid) in name]
    finally:
        for one in users:
            one.kill()
            one.wait()
        pid = server_pid(places)
        if pid:
            os.kill(pid, signal.SIGKILL)
