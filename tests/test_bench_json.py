"""Every benchmark prints the same JSON lines; here with tiny sizes, or without engines."""

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny_llama
from agents import agent_home
from bench_rows import conforms
from vllm_server import Completion

ROOT = Path(__file__).parents[1]
BENCHES = sorted(path.stem for path in (ROOT / "bench").glob("*.py"))

Rows = list[dict[str, Any]]


def bench(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark as a module, which does not wait to see how busy the machine is."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "machine_use", lambda _: 0.0, raising=False)
    return module


def rows(
    module: ModuleType, name: str, capsys: pytest.CaptureFixture[str], *options: str | Path
) -> Rows:
    capsys.readouterr()
    module.main(["--json", *map(str, options)])
    # vLLM in this process may have said something, too.
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = [json.loads(line) for line in lines]
    assert found
    for row in found:
        conforms(row)
        assert row["bench"] == name
    assert len({(row["case"], row["metric"], row["limit_name"]) for row in found}) >= len(found) / 2
    return found


def test_all_benchmarks_are_here() -> None:
    others = (
        "test_bench_tier.py",
        "test_lmcache_bench.py",
        "test_mlx_bench.py",
        "test_sglang_bench.py",
    )
    text = "".join(Path(__file__).with_name(name).read_text() for name in others)
    text += Path(__file__).read_text()
    for name in BENCHES:
        assert f'"{name}"' in text, f"nothing looks at the lines of bench/{name}.py"


def test_dashboard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("jinja2")
    options = ("--engines", "2", "--targets", "2", "--blocks", "2048", "--rounds", "7")
    found = rows(bench("dashboard", monkeypatch), "dashboard", capsys, *options)
    assert {row["metric"] for row in found} >= {"/", "/contents", "/configure", "/metrics"}


def test_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    module = bench("stall", monkeypatch)
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(tmp_path / "home"))
    root = tmp_path / "root"
    options = ("--sizes", "64KiB", "--mib", "1", "--rounds", "7", "--root", root, "--no-compile")
    found = rows(module, "stall", capsys, *options)
    assert {row["metric"] for row in found} >= {
        "lost per piece, p99", "lost per piece, p99.9", "lost per GB moved",
    }  # fmt: skip
    for row in found:
        assert row["peer_name"] == "vLLM's fs tier"
        assert row["limit_name"] == "the same bytes moved by another process"
    assert not list(root.iterdir())


def test_mover_stall(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kernel_home: Path,
) -> None:
    module = bench("mover_stall", monkeypatch)
    with agent_home(tmp_path, monkeypatch, kernel_home):
        options = (
            "--seconds", "0.7", "--rounds", "7", "--blocks", "512", "--no-compile",
            "--root", tmp_path / "root",
        )  # fmt: skip
        found = rows(module, "mover_stall", capsys, *options)
    assert {row["case"] for row in found} == {"the target is slow", "the target hangs"}


@pytest.mark.full
def test_s3(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kernel_home: Path,
) -> None:
    module = bench("s3", monkeypatch)
    with agent_home(tmp_path, monkeypatch, kernel_home):
        options = ("--rounds", "7", "--mib", "16", "--root", tmp_path / "root", "--no-compile")
        found = rows(module, "s3", capsys, *options)
    puts = next(row for row in found if row["metric"] == "PUTs to store")
    assert puts["ratio_peer"] < 1 / 20
    evicted = next(row for row in found if row["metric"] == "delete requests")
    assert evicted["ours"] == 2


def test_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    module = bench("vllm_submit", monkeypatch)
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(tmp_path / "home"))
    options = ("--chunks", "8", "--rounds", "7", "--root", tmp_path / "root", "--no-compile")
    rows(module, "vllm_submit", capsys, *options)


def test_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama.write(tmp_path)
    module = bench("bench_identity", monkeypatch)
    found = rows(module, "bench_identity", capsys, tmp_path, "--rounds", "7")
    assert [row["metric"] for row in found] == [
        "cold", "warm", "cold beside a busy thread", "the busy thread keeps",
    ]  # fmt: skip
    assert found[0]["limit_name"] == "reading as many bytes"


def test_index_recovery(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = bench("index_recovery", monkeypatch)
    options = ("--plain", "--blocks", "5000", "--rounds", "7")
    found = {row["metric"]: row for row in rows(module, "index_recovery", capsys, *options)}
    assert found["recovery"]["limit_name"] == "reading the journals"
    assert found["memory of a block"]["limit"] == 200
    assert all(row["peer_name"] == "dict" for row in found.values() if row["peer"])


def test_index(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = bench("index_recovery", monkeypatch)
    options = ("--blocks", "100", "--rounds", "7", "--plain")
    found = rows(module, "index_recovery", capsys, *options)
    assert {"recovery", "memory of a block"} <= {row["metric"] for row in found}


def test_ladder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = bench("ladder", monkeypatch)
    root = tmp_path / "root"
    options = ("--blocks", "4", "--size", "4096", "--rounds", "7", "--root", root, "--no-compile")
    found = rows(module, "ladder", capsys, *options)
    assert {row["case"].split(",")[0] for row in found} == {"one target", "two targets"}
    assert {row["limit_name"] for row in found} == {"the target alone"}
    assert not root.exists()


def test_codecs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = bench("codecs", monkeypatch)
    options = ("--no-compile", "--mib", "1", "--layers", "1", "--dim", "64", "--rounds", "7")
    found = rows(module, "codecs", capsys, *options)
    assert {row["metric"] for row in found} == {"decode", "encode", "stored, per value"}
    assert {"raw", "fp8"} <= {row["case"].split(",")[0] for row in found}
    assert {row["limit_name"] for row in found} == {"memcpy", "raw"}


def test_vllm_codecs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    module = bench("vllm_codecs", monkeypatch)
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(tmp_path / "home"))
    options = ("--no-compile", "--mib", "4", "--rounds", "7", "--root", tmp_path / "root")
    found = rows(module, "vllm_codecs", capsys, *options, "--codecs", "raw", "fp8")
    assert {row["metric"] for row in found} == {"store, KV", "cold load, KV", "stored, per chunk"}
    assert {row["case"].split(",")[0] for row in found} == {"raw", "fp8"}
    assert {row["limit_name"] for row in found} == {"the disk", "memcpy", None}


def test_exact_kv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = bench("exact_kv", monkeypatch)
    tensors = [module.torch.randn(300, 2, 32) for _ in range(2)]
    monkeypatch.setattr(module, "kv_of", lambda *_: [("prose", tensors)])
    monkeypatch.setattr(module, "ready_kernels", lambda *_, **__: None)
    found = rows(module, "exact_kv", capsys)
    assert {row["case"].split(",")[0] for row in found} == {"lossless", "dense"}
    assert all(row["ours"] < row["limit"] for row in found if "bfloat16" in row["case"])


def test_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(tmp_path / "home"))
    module = bench("accuracy", monkeypatch)
    monkeypatch.setattr(module, "ready_kernels", lambda *_, **__: None)
    model = tiny_llama.write(tmp_path / "model")
    options = ("--model", model, "--prefix", "512", "--scored", "16", "--threads", "1")
    found = rows(module, "accuracy", capsys, *options, "--texts", "prose", "--only", "fp8")
    of = {(row["case"], row["metric"]): row["ours"] for row in found}
    assert of["as it is, prose", "KL"] == 0
    assert of["as it is, prose", "top-1 agreement"] == 1
    assert 0 < of["fp8, prose", "KL"] < 0.1
    raw = of["as it is, prose", "stored per token"]
    assert of["fp8, prose", "stored per token"] < 0.6 * raw


@pytest.mark.parametrize(
    "which",
    [
        # Each case starts a process a round.
        pytest.param(slice(None, None, 3), id="punch and rewrite"),
        pytest.param(slice(None), id="all", marks=pytest.mark.full),
    ],
)
def test_janitor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    which: slice,
) -> None:
    module = bench("janitor", monkeypatch)
    cases = module.CASES[which]
    monkeypatch.setattr(module, "CASES", cases)
    options = ("--size", str(32 << 20), "--blocks", "100", "--rounds", "7", "--root", tmp_path)
    found = rows(module, "janitor", capsys, *options)
    assert sum(row["metric"] in ("given back", "copied") for row in found) == len(cases)
    assert {row["limit_name"] for row in found} == {None, "writing them", "no janitor"}
    assert not list(tmp_path.iterdir())


class PretendedServer:
    """Answers as a server whose store outlives it, or as one without."""

    def __init__(self, stored: set[str] | None) -> None:
        self.known = set() if stored is None else stored

    def complete(self, prompt: str, max_tokens: int) -> Completion:
        cached = 2048 if prompt in self.known else 0
        self.known.add(prompt)
        return Completion("text", 0.1 if cached else 0.5, 1.0, 2100, cached)

    def stop(self, _signal: int) -> None:
        """As a server that is killed: nothing is written."""


class PretendedServers:
    """Stands for ``several_servers.Servers``."""

    started: list[tuple[str, ...]]
    directory = Path("nowhere")

    def __init__(self, *_: object, **__: object) -> None:
        self.stores: dict[str, set[str]] = {}
        type(self).started = []

    @contextmanager
    def running(self, names: Sequence[str]) -> Iterator[dict[str, PretendedServer]]:
        self.started.append(tuple(names))
        yield {
            who: PretendedServer(None if who == "no cache" else self.stores.setdefault(who, set()))
            for who in names
        }

    def stored(self, _who: str) -> Path:
        return self.directory


def without_engines(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Servers", PretendedServers)
    monkeypatch.setattr(module, "wait_until_idle", lambda _: None)
    if hasattr(module, "cpu_seconds"):
        clock = iter(range(1_000_000))
        monkeypatch.setattr(module, "cpu_seconds", lambda _: float(next(clock)))


def test_overhead_starts_the_servers_in_both_orders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = bench("vllm_overhead", monkeypatch)
    without_engines(module, monkeypatch)
    found = rows(module, "vllm_overhead", capsys, "--rounds", "8", "--days", "2")
    first, second = PretendedServers.started
    assert first == second[::-1]
    assert {row["limit_name"] for row in found} == {"no cache"}
    assert [row["ratio_limit"] for row in found] == [1.0] * 5


def test_restore_starts_the_servers_in_both_orders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = bench("vllm_restore", monkeypatch)
    without_engines(module, monkeypatch)
    found = rows(module, "vllm_restore", capsys, "--rounds", "8", "--days", "2")
    *_, first, second = PretendedServers.started
    assert first == second[::-1]
    assert [row["peer_name"] for row in found] == ["vLLM's fs tier", "computed again"]
    assert [row["ratio_peer"] for row in found] == [1.0, 0.2]


def test_the_dashboard_is_open_and_closed_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = bench("vllm_dashboard", monkeypatch)
    without_engines(module, monkeypatch)
    waited: list[float] = []
    looked: list[str] = []

    class PretendedPages:
        def __init__(self, port: int) -> None:
            assert port

        def get(self, _path: str) -> dict[str, int]:
            return {"engines": 1}

        def text(self, path: str) -> str:
            looked.append(path)
            return ""

    monkeypatch.setattr(module, "Pages", PretendedPages)
    monkeypatch.setattr(module, "_REFRESH_S", 0.001)
    monkeypatch.setattr(module.time, "sleep", waited.append)
    monkeypatch.setattr(module, "seconds", lambda *_: 2.0 + len(looked) * 0)
    found = rows(module, "vllm_dashboard", capsys, "--rounds", "7", "--days", "2")
    assert [row["limit_name"] for row in found] == ["page closed"]
    assert [row["ratio_limit"] for row in found] == [1.0]
    assert len(looked) >= 8
    # Until the dashboard looks no more for a reader, but for the first: nobody has looked yet.
    assert sum(wait > module._INTEREST_S - 1 for wait in waited) == 7
