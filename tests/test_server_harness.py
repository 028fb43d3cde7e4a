"""The harness itself, with small stand-ins for vLLM."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from vllm_server import ServerError, VllmServer, shm_regions

_HEAD = """\
import http.server, json, os, signal, subprocess, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
"""
_ANSWER = """\
STATUS = 200
METRICS = 'a_total{x="1"} 2.0\\na_total{x="2"} 3.0\\nab_total 9\\n'
EVENTS = [
    json.dumps({"choices": [{"text": "Hel"}]}),
    json.dumps({"choices": [{"text": "lo"}]}),
    json.dumps({"choices": [], "usage": {"prompt_tokens": 7,
                                         "prompt_tokens_details": {"cached_tokens": 4}}}),
    "[DONE]",
]
"""
_TAIL = """
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self):
        text = "" if self.path == "/health" else METRICS
        self.send_response(200); self.end_headers(); self.wfile.write(text.encode())
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(STATUS); self.end_headers()
        for event in EVENTS:
            self.wfile.write(f"data: {event}\\n\\n".encode())
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def _server(tmp_path: Path, body: str = _ANSWER, *, start_timeout_s: float = 60) -> VllmServer:
    """A server whose interpreter is a program of ours that ignores ``-m vllm...``."""
    program = tmp_path / "stand-in"
    program.write_text(f"#!{sys.executable}\n{_HEAD}{body}{_TAIL}")
    program.chmod(0o700)
    return VllmServer(
        tmp_path, log=tmp_path / "log", python=program, start_timeout_s=start_timeout_s
    )


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_completion_and_metrics(tmp_path: Path) -> None:
    with _server(tmp_path) as server:
        answer = server.complete("hi")
        assert (answer.text, answer.prompt_tokens, answer.cached_tokens) == ("Hello", 7, 4)
        assert 0 < answer.first_token_s <= answer.total_s
        assert server.metric("a_total") == 5
        assert server.metric("a_total", x="2") == 3
        assert server.metric("absent_total") == 0


def test_server_that_ends_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"exit code 3(?s:.*)no such luck"):
        _server(tmp_path, "print('no such luck'); sys.exit(3)").start()


def test_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    server = _server(tmp_path, "time.sleep(600)", start_timeout_s=1)
    with pytest.raises(ServerError, match="not healthy after 1 s"):
        server.start()


def test_error_of_the_server_is_an_error(tmp_path: Path) -> None:
    body = _ANSWER.replace("STATUS = 200", "STATUS = 500")
    with _server(tmp_path, body) as server, pytest.raises(ServerError, match="answered 500"):
        server.complete("hi")


def test_broken_stream_is_an_error(tmp_path: Path) -> None:
    body = _ANSWER.replace('"usage"', '"other"')
    with _server(tmp_path, body) as server, pytest.raises(ServerError, match="without its usage"):
        server.complete("hi")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_stop(tmp_path: Path, how: signal.Signals) -> None:
    body = (
        "child = subprocess.Popen(['sh', '-c', 'trap \"\" TERM INT; sleep 600'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n{_ANSWER}"
    )
    server = _server(tmp_path, body)
    server.straggler_grace_s = 0.5
    server.start()
    pids = [server.pid, int((tmp_path / "child").read_text())]
    assert all(map(_alive, pids))
    server.stop(how)
    assert not any(map(_alive, pids))


def test_kill_leaves_no_shared_memory_of_python(tmp_path: Path) -> None:
    body = (
        "from multiprocessing import shared_memory\n"
        "block = shared_memory.SharedMemory(create=True, size=4096)\n"
        f"open({str(tmp_path / 'name')!r}, 'w').write(block.name)\n{_ANSWER}"
    )
    server = _server(tmp_path, body)
    server.start()
    block = Path("/dev/shm") / (tmp_path / "name").read_text()
    assert block.exists()
    server.stop(signal.SIGKILL)
    assert not block.exists()


def test_leaked_region_is_reported_and_removed(tmp_path: Path) -> None:
    name = f"/dev/shm/vllm_offload_harness-test-{os.getpid()}.mmap"
    with _server(tmp_path, f"open({name!r}, 'w').close()\n" + _ANSWER) as server:
        assert server.stop(signal.SIGKILL) == {Path(name)}
    assert Path(name) not in shm_regions()


def test_region_in_use_is_left_alone(tmp_path: Path) -> None:
    import mmap

    name = Path(f"/dev/shm/vllm_offload_harness-test-{os.getpid()}.mmap")
    with _server(tmp_path) as server:
        try:
            name.write_bytes(bytes(mmap.PAGESIZE))
            with name.open("r+b") as file, mmap.mmap(file.fileno(), 0):
                assert server.stop(signal.SIGKILL) == set()
                assert name.exists()
        finally:
            name.unlink()


def test_settings_of_the_caller_are_not_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIFEBOAT_CACHE", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    body = f"open({str(tmp_path / 'env')!r}, 'w').write(' '.join(os.environ))\n" + _ANSWER
    with _server(tmp_path, body):
        names = (tmp_path / "env").read_text().split()
    assert "LIFEBOAT_CACHE" not in names
    assert "VLLM_PLUGINS" not in names
    assert "HF_HUB_OFFLINE" in names


def test_stop_of_a_deaf_server_kills_it_and_says_so(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _ANSWER
    server = _server(tmp_path, body)
    server.start()
    pid = server.pid
    begin = time.monotonic()
    with pytest.raises(ServerError, match="ignored SIGTERM for 1 s"):
        server.stop(signal.SIGTERM, timeout_s=1)
    assert time.monotonic() - begin < 60
    assert not _alive(pid)
