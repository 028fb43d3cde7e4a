"""Run a real vLLM server for a test or a demonstration, and stop it in any way.

Standard library only: ``tools/dev.py`` uses it with the interpreter of the
engine's environment, tests use it from inside that environment.
"""

import contextlib
import ctypes
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Completion", "ServerError", "StartServer", "VllmServer", "free_port", "shm_regions"]

_SHM = Path("/dev/shm")
_SERVED_NAME = "model"
_PR_SET_CHILD_SUBREAPER = 36

# Settings of the caller's shell that would change what is being measured.
_FOREIGN_SETTINGS = ("LIFEBOAT_", "VLLM_", "PYTHONPATH", "PYTHONHASHSEED")


class ServerError(RuntimeError):
    """The server did not start, did not answer, or did not stop."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """What one streamed completion returned.

    Attributes
    ----------
    text
        The generated text.
    first_token_s
        Seconds from sending the request to the first generated token.
    total_s
        Seconds from sending the request to the end of the stream.
    prompt_tokens
        Tokens in the prompt.
    cached_tokens
        Prompt tokens that were not computed: found in the server's own memory
        or restored by a connector.
    top_logprobs
        For each generated token the most probable ones and their logarithms, if the request
        asked for ``logprobs``.
    """

    text: str
    first_token_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    top_logprobs: tuple[dict[str, float], ...] = ()


def shm_regions() -> set[Path]:
    """Return the offload regions that exist in shared memory now."""
    return set(_SHM.glob("vllm_offload_*"))


def _sessions() -> Iterator[tuple[int, int, str]]:
    """Yield process id, session id and state of every process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The command name is in parentheses and may hold anything.
            fields = stat.read_text().rpartition(")")[2].split()
            yield int(stat.parent.name), int(fields[3]), fields[0]


def _mapped_regions() -> set[Path]:
    """Return the offload regions that a living process maps."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text().splitlines():
                name = line.partition("/dev/shm/vllm_offload_")[2]
                if name:
                    mapped.add(_SHM / ("vllm_offload_" + name.removesuffix(" (deleted)")))
    return mapped


def _adopt_orphans() -> None:
    """Let children of a killed server become ours, so that they can be reaped."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class VllmServer:
    """One ``vllm.entrypoints.openai.api_server`` process and its children.

    Use as a context manager: entering starts the server and waits until it is
    healthy, leaving kills whatever is left of it.

    Parameters
    ----------
    model
        Directory of the model.
    log
        File that receives the server's output (appended).
    python
        Interpreter of the environment that holds vLLM.
    args
        Further command-line arguments.
    env
        Further environment variables. Variables of the caller that begin with
        ``VLLM_`` or ``LIFEBOAT_`` are not inherited.
    start_timeout_s
        Seconds until a server that is not healthy counts as failed.

    Raises
    ------
    ServerError
        From every method, with the end of the server's log.
    """

    #: Seconds that children may take to end after the server did.
    straggler_grace_s = 10.0

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        python: str | Path = sys.executable,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        self.log = log
        self.leaked: set[Path] = set()
        self._start_timeout_s = start_timeout_s
        self._port = free_port()
        self._command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", _SERVED_NAME,
            "--host", "127.0.0.1", "--port", str(self._port),
            "--dtype", "bfloat16", "--max-model-len", "8192", "--enforce-eager",
            "--enable-prompt-tokens-details",
            *args,
        ]  # fmt: skip
        self._env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_FOREIGN_SETTINGS)
        }
        self._env |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Left to itself, vLLM keeps one core free for the rest of the server, but two with a
            # connector, and none where two are all there are: servers with and without a cache
            # would compute on different numbers of cores.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **(env or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._shm_before: set[Path] = set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self.stop(signal.SIGKILL)

    @property
    def pid(self) -> int:
        """Process id of the API server."""
        if self._process is None:
            raise self._failure("the server is not running")
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it is healthy."""
        _adopt_orphans()
        self._shm_before = shm_regions()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise self._failure(f"the server ended with exit code {code} while starting")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._get("/health", timeout_s=5)[0] == 200:
                    return
            time.sleep(0.2)
        raise self._failure(f"the server was not healthy after {self._start_timeout_s:.0f} s")

    def _get(self, path: str, *, timeout_s: float) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def complete(
        self,
        prompt: str,
        *,
        max_tokens: int = 48,
        timeout_s: float = 300.0,
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> Completion:
        """Stream a greedy completion and measure the time to its first token.

        Parameters
        ----------
        prompt
            Text, sent as it is (no chat template).
        max_tokens
            Tokens to generate at most.
        timeout_s
            Seconds that the server may stay silent.
        headers
            Further headers of the request.
        **body
            Further fields of the request, such as ``cache_salt``.
        """
        request = {
            "model": _SERVED_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        texts: list[str] = []
        tops: list[dict[str, float]] = []
        usage: dict[str, Any] = {}
        first: float | None = None
        with contextlib.closing(connection):
            begin = time.perf_counter()
            try:
                connection.request(
                    "POST",
                    "/v1/completions",
                    json.dumps(request),
                    {"Content-Type": "application/json", **(headers or {})},
                )
                response = connection.getresponse()
                if response.status != 200:
                    answer = response.read().decode(errors="replace")
                    raise self._failure(f"the server answered {response.status}: {answer}")
                for event in _events(response):
                    if "error" in event:
                        raise self._failure(f"the server reported an error: {event['error']}")
                    if event.get("choices"):
                        first = first or time.perf_counter()
                        texts.append(event["choices"][0]["text"])
                        tops += (event["choices"][0].get("logprobs") or {}).get("top_logprobs", [])
                    usage = event.get("usage") or usage
            except (OSError, http.client.HTTPException) as error:
                raise self._failure(f"the completion failed: {error!r}") from error
            end = time.perf_counter()
        if first is None or not usage:
            raise self._failure("the stream ended without a token or without its usage")
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            text="".join(texts),
            first_token_s=first - begin,
            total_s=end - begin,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
            top_logprobs=tuple(tops),
        )

    def metric(self, name: str, **labels: str) -> float:
        """Sum the samples of a metric that carry the given labels.

        A metric that the server does not (yet) show counts as 0.
        """
        status, text = self._get("/metrics", timeout_s=60)
        if status != 200:
            raise self._failure(f"/metrics answered {status}")
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        total = 0.0
        for line in text.splitlines():
            sample, _, value = line.rpartition(" ")
            base, _, shown = sample.partition("{")
            if base == name and all(label in shown for label in wanted):
                total += float(value)
        return total

    def stop(self, how: signal.Signals = signal.SIGINT, *, timeout_s: float = 60.0) -> set[Path]:
        """End the server and everything it started.

        SIGINT and SIGTERM go to the API server alone, as from a terminal or a
        service manager; SIGKILL goes to every process of the server at once.
        What is still there afterwards is killed.

        Returns
        -------
        set of Path
            Shared-memory regions that the server left behind; they are removed.
        """
        if self._process is None:
            return set()
        process, self._process = self._process, None
        late = False
        if how == signal.SIGKILL:
            self._kill_session(process.pid)
        elif process.poll() is None:
            process.send_signal(how)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        self._wait_for_session(process.pid, 0 if late else self.straggler_grace_s)
        process.wait(timeout_s)
        mapped = _mapped_regions()
        self.leaked = {
            region for region in shm_regions() - self._shm_before if region not in mapped
        }
        for region in self.leaked:
            region.unlink(missing_ok=True)
        if late:
            raise self._failure(f"the server ignored {how.name} for {timeout_s:.0f} s")
        return self.leaked

    def _wait_for_session(self, session: int, grace_s: float) -> None:
        """Wait for the server's processes to end; kill them when they do not."""
        deadline = time.monotonic() + grace_s
        while self._members(session):
            late_s = time.monotonic() - deadline
            if late_s > 0:
                self._kill_session(session, spare_trackers=late_s < 5)
            time.sleep(0.02)

    @staticmethod
    def _members(session: int) -> list[int]:
        """Return the living processes of a session, reaping the dead ones that are ours."""
        alive = []
        for pid, of_session, state in list(_sessions()):
            if of_session != session:
                continue
            if state not in "ZX":
                alive.append(pid)
            elif pid != session:  # the leader belongs to subprocess
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return alive

    @classmethod
    def _kill_session(cls, session: int, *, spare_trackers: bool = True) -> None:
        """Kill a session's processes.

        Python's resource trackers end by themselves once nobody is left, and
        remove the shared memory and semaphores of the killed ones; they are
        only killed when told to.
        """
        for pid in cls._members(session):
            with contextlib.suppress(OSError):
                if (
                    spare_trackers
                    and b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
                ):
                    continue
                os.kill(pid, signal.SIGKILL)

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the server's log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"(no log: {error})"

    def _failure(self, what: str) -> ServerError:
        return ServerError(f"{what}\n--- end of {self.log} ---\n{self.log_tail()}")


#: Type of the fixture that starts servers: takes what :class:`VllmServer` takes by keyword.
StartServer = Callable[..., VllmServer]


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events until it is done."""
    for raw in response:
        line = raw.decode().strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)
