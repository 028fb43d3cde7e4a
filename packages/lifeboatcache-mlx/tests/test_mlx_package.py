"""The command, the doctor, the self-test, and what goes wrong around a prompt cache."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_models
import pytest
from mlx_lm.models import cache as caches
from suites import compiled_kernels

from lifeboat_cache.cli.parser import build_parser
from lifeboat_cache.doctor import DoctorContext
from lifeboat_cache.mlx import PersistentPromptCache, command, doctor, selftest


class _Tokenizer:
    """Bytes are tokens."""

    bos_token = None
    eos_token_ids = frozenset({999})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def test_arguments_of_the_server_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def main(arguments: list[str], config: Any) -> int:
        seen.append(arguments)
        return 0

    monkeypatch.setattr("lifeboat_cache.mlx.server.main", main)
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    args = parser.parse_args(["mlx-server", "--model", "m", "--port", "1", "--help", "x"])
    assert args.func(args) == 0
    assert seen == [["--model", "m", "--port", "1", "--help", "x"]]
    assert "mlx-server" in build_parser().format_help()


def test_the_doctor_looks_at_versions() -> None:
    assert doctor.check_engine("0.32.2").status == "ok"
    assert doctor.check_engine("0.99.0").status == "warn"
    assert doctor.check_engine(None).status == "skip"
    assert doctor.check_mlx(None).status == "fail"
    found = list(doctor.checks(None))  # type: ignore[arg-type]
    assert [check.status for check in found] == ["ok", "ok"]
    assert DoctorContext is not None


def test_the_self_test_passes(home: Path) -> None:
    report = selftest.run(argparse.Namespace(config=None, keep=False))
    assert [
        (step.name, step.status, step.summary) for step in report.steps if step.status != "ok"
    ] == []
    assert report.exit_code == 0
    assert not list(home.parent.glob("**/.lifeboat-selftest-*"))


def test_the_self_test_sees_wrong_bytes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lifeboat_cache.mlx import selftest_model

    real = selftest_model.bytes_of_cache
    calls = []

    def wrong(cache: Any, tokens: int) -> Any:
        found = real(cache, tokens).copy()
        calls.append(1)
        if len(calls) == 2:
            found[5] ^= 1
        return found

    monkeypatch.setattr(selftest_model, "bytes_of_cache", wrong)
    report = selftest.run(argparse.Namespace(config=None, keep=False))
    assert report.exit_code == 1
    assert [step.status for step in report.steps][:3] == ["ok", "failed", "skipped"]


def test_generation_goes_on_without_storage(home: Path) -> None:
    (home / "lifeboat.yaml").write_text("storage: {tires: []}\n")
    model = mlx_models.make("llama")
    cache = PersistentPromptCache(model, _Tokenizer())
    assert "tires" in cache.reason
    fresh, held = cache.fetch([1, 2, 3])
    assert (held, len(fresh)) == (0, 2)
    cache.store([1, 2, 3], fresh)
    assert cache.flush()
    cache.close()


def test_a_tokenizer_is_asked_for(home: Path) -> None:
    with (
        PersistentPromptCache(mlx_models.make("llama")) as cache,
        pytest.raises(ValueError, match="no tokenizer"),
    ):
        cache.generate("text")


def test_damaged_storage_is_computed_again(home: Path) -> None:
    model, tokens = mlx_models.make("llama"), [n % 251 for n in range(200)]
    computed = caches.make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=computed)
    with PersistentPromptCache(model) as first:
        first.store(tokens, computed)
        assert first.flush(60)
    (segment,) = (home / "kv").rglob("*.segment")
    data = bytearray(segment.read_bytes())
    block = mlx_models.state_bytes(computed, 64)[1][2][:64]
    at = bytes(data).find(block, 0)
    assert at > 0
    second = bytes(data).find(mlx_models.state_bytes(computed, 128)[1][2][64 * 64 : 64 * 64 + 64])
    data[second if second > 0 else at] ^= 1
    segment.write_bytes(data)
    with PersistentPromptCache(model) as later:
        _, held = later.fetch([*tokens, 1])
        assert held in (0, 64)
        assert later.fetch([*tokens, 1])[1] in (0, 64)
        later.store(tokens, computed)
        assert later.flush(60)
        assert later.fetch([*tokens, 1])[1] == 192


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; import lifeboat_cache.mlx, lifeboat_cache.mlx.server; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_and_the_doctor_do_without_mlx() -> None:
    code = (
        "import sys; import lifeboat_cache.mlx.command, lifeboat_cache.mlx.doctor, "
        "lifeboat_cache.mlx.selftest; sys.exit(any(n.split('.')[0] in ('mlx', 'mlx_lm') "
        "for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kernels_are_loaded_while_a_script_loads_its_model(pytestconfig: pytest.Config) -> None:
    code = (
        "import threading\n"
        "from lifeboat_cache.mlx import PersistentPromptCache\n"
        "from lifeboat_cache import kernels\n"
        "for thread in threading.enumerate():\n"
        "    if thread is not threading.main_thread():\n"
        "        thread.join()\n"
        "print(kernels.ready())\n"
    )
    home = compiled_kernels(pytestconfig)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LIFEBOAT_CACHE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"
    assert not done.stderr
