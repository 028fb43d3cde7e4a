"""The real server of mlx-lm: what it answered before a restart is not computed again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_models
import pytest
import tiny_llama
from mlx_lm.models import cache as caches

from lifeboat_cache.mlx.server import StoredPromptCache

_PROMPT = "The ferry leaves at noon, and whoever is late stays on the island. " * 4

Start = Callable[..., "_Server"]


class _Server:
    """A server of its own process."""

    def __init__(self, model: Path, home: Path, log: Path, arguments: tuple[str, ...]) -> None:
        self._log = log
        port_file = log.with_suffix(".port")
        program = (
            "import socket, sys; from lifeboat_cache.cli.main import main\n"
            "from mlx_lm import server\n"
            "run = server.ThreadingHTTPServer.server_activate\n"
            "def tell(self):\n"
            "    run(self)\n"
            f"    open({str(port_file)!r}, 'w').write(str(self.server_address[1]))\n"
            "server.ThreadingHTTPServer.server_activate = tell\n"
            "sys.exit(main(sys.argv[1:]))\n"
        )
        port_file.unlink(missing_ok=True)
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, "mlx-server", "--model", str(model), "--port", "0",
                 "--log-level", "INFO", *arguments],
                env={**os.environ, "LIFEBOAT_CACHE_HOME": str(home),
                     "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while not (port_file.exists() and port_file.read_text()):
            assert self.process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        self.port = int(port_file.read_text())

    def ask(self, prompt: str, **options: Any) -> tuple[str, int]:
        """The answer, and how many tokens of the prompt were cached."""
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0, **options}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode() + self._log.read_text()[-2000:]) from error
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["text"], int(details.get("cached_tokens", 0))

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it. Its exit code says nothing: MLX's CPU backend aborts where threads end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(60)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama.write(directory)
    return directory


@pytest.fixture
def start(tiny: Path, home: Path, tmp_path: Path) -> Iterator[Start]:
    servers: list[_Server] = []

    def run(*arguments: str) -> _Server:
        servers.append(_Server(tiny, home, tmp_path / "server.log", arguments))
        return servers[-1]

    yield run
    for server in servers:
        server.stop(signal.SIGKILL)


def test_a_restarted_server_uses_what_was_stored(start: Start) -> None:
    server = start()
    text, cached = server.ask(_PROMPT)
    assert cached == 0
    server.stop()
    server = start()
    again, cached = server.ask(_PROMPT)
    assert again == text
    assert cached >= 128
    with ThreadPoolExecutor(4) as pool:  # a batch, each with a prefix of its own length
        prompts = [_PROMPT[: 60 * n] + f"{n}?" for n in (2, 3, 4)] + [_PROMPT]
        answers = list(pool.map(server.ask, prompts))
    assert answers[-1][0] == text
    server.stop()


@pytest.mark.full
def test_a_killed_server_serves_what_it_had_stored(start: Start) -> None:
    server = start("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    text, _ = server.ask(_PROMPT)
    server.ask(_PROMPT + "more")  # by now the first is on storage
    time.sleep(2)
    server.stop(signal.SIGKILL)
    server = start("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    again, cached = server.ask(_PROMPT)
    assert (again == text, cached >= 64) == (True, True)
    server.stop()


def _ended(home: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a server that cannot serve."""
    done = subprocess.run(
        [sys.executable, "-m", "lifeboat_cache.cli.main", "mlx-server", *arguments],
        env={**os.environ, "LIFEBOAT_CACHE_HOME": str(home), "HF_HUB_OFFLINE": "1",
             "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=120, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_server_whose_model_cannot_be_loaded_ends(home: Path, tmp_path: Path) -> None:
    missing = tmp_path / "no such model"
    code, said = _ended(home, "--model", str(missing), "--port", "0")
    assert code == 2, said[-2000:]
    assert f"mlx-lm cannot load {missing} (" in said
    assert said.rstrip().endswith("correct --model, --adapter-path or --draft-model")


def test_a_server_whose_port_is_taken_ends(home: Path, tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said = _ended(home, "--model", str(tiny), "--port", port)
    # Its exit code says nothing where MLX's CPU backend aborts.
    assert code, said[-2000:]
    assert f"port {port} of 127.0.0.1 is taken" in said


class _Provider:
    """What the server's cache asks of a ``ModelProvider``."""

    def __init__(self, model: Any, key: str) -> None:
        self.model: Any = model
        self.draft_model = None
        self.model_key = (key, None, None)
        self.is_distributed = False
        self.cli_args = SimpleNamespace(kv_bits=None, kv_group_size=64, quantized_kv_start=0)


def _computed(model: Any, tokens: list[int]) -> list[Any]:
    cache: list[Any] = caches.make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=cache)
    mx.eval([one.state for one in cache])
    return cache


def test_memory_is_asked_first_and_storage_for_more(home: Path) -> None:
    model, tokens = mlx_models.make("llama"), [n % 251 for n in range(200)]
    provider = _Provider(model, "one")
    served = StoredPromptCache(provider, 10)
    served.insert_cache(provider.model_key, tokens, _computed(model, tokens))
    assert served._stored is not None
    assert served._stored.flush(60)
    served.trim_to(n_sequences=0)
    cache, rest = served.fetch_nearest_cache(provider.model_key, [*tokens, 1, 2])
    assert len(rest) == 202 - 192
    assert cache[0].offset == 192
    served.insert_cache(provider.model_key, [*tokens, 1], _computed(model, [*tokens, 1]))
    cache, rest = served.fetch_nearest_cache(provider.model_key, [*tokens, 1, 2])
    assert rest == [2]
    served._stored.close()


def test_another_model_has_a_store_of_its_own(home: Path) -> None:
    first, second = mlx_models.make("llama"), mlx_models.make("llama", seed=8)
    tokens = [n % 251 for n in range(200)]
    provider = _Provider(first, "one")
    served = StoredPromptCache(provider, 10)
    served.insert_cache(provider.model_key, tokens, _computed(first, tokens))
    assert served._stored is not None
    assert served._stored.flush(60)
    provider.model, provider.model_key = second, ("two", None, None)
    assert served.fetch_nearest_cache(("two", None, None), [*tokens, 1])[0] is None
    # The key of a model that is not loaded any more.
    served.insert_cache(("one", None, None), [1, *tokens], _computed(first, [1, *tokens]))
    provider.model, provider.model_key = first, ("one", None, None)
    served.trim_to(n_sequences=0)
    assert served.fetch_nearest_cache(("one", None, None), [1, *tokens, 1])[0] is None
    assert len(served.fetch_nearest_cache(("one", None, None), [*tokens, 1])[1]) == 9
    assert served._stored is not None
    served._stored.close()
