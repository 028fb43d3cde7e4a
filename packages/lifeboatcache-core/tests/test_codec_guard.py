"""The accuracy guard."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lifeboat_cache import kernels
from lifeboat_cache.codecs import guard as guard_module
from lifeboat_cache.codecs.guard import LIMITS, Guard
from lifeboat_cache.codecs.layout import KVLayout, TensorLayout
from lifeboat_cache.codecs.names import DENSE, FP8, LBQ2, LBQ3, LBQ4, LOSSLESS, RAW
from lifeboat_cache.codecs.recipes import CodedLayout
from lifeboat_cache.errors import FormatError
from lifeboat_cache.kernels import codec_layout as columns

Bytes = npt.NDArray[np.uint8]


def tensor(role: Any, layer: int, at: int) -> TensorLayout:
    return TensorLayout(role, "bfloat16", layer, 1, 16, 2, 8, 512, 32, 16, at)


KV = KVLayout.of(
    2048, [tensor(role, n // 2, n * 512) for n, role in enumerate(("key", "value") * 2)]
)


def coder_of(codec: int) -> int:
    return {
        LOSSLESS: columns.CODER_LOSSLESS,
        DENSE: columns.CODER_DENSE,
        FP8: columns.CODER_FP8,
    }.get(codec, columns.CODER_LBQ)


class Codec:
    """Stands for all codecs: keeps the bytes, and changes what it is told to."""

    def __init__(self) -> None:
        self.add = 0
        self.fault: Exception | None = None
        self.layers: list[set[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def coded(self, layout: KVLayout, codec: int) -> CodedLayout:
        return CodedLayout(layout, codec, tuple((coder_of(codec), 0) for _ in layout.tensors))

    def encode(self, coded: CodedLayout, payload: Bytes) -> Bytes:
        assert self.gate.wait(30)
        self.layers.append({one.layer for one in coded.layout.tensors})
        if self.fault is not None:
            raise self.fault
        return np.concatenate([one.gather(payload).reshape(-1) for one in coded.layout.tensors])

    def decode(self, coded: CodedLayout, stored: Bytes, payload: Bytes) -> None:
        at = 0
        for one in coded.layout.tensors:
            one.scatter(stored[at : at + one.nbytes] + np.uint8(self.add), payload)
            at += one.nbytes


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> Codec:
    codec = Codec()
    monkeypatch.setattr(guard_module, "coded_layout", codec.coded)
    monkeypatch.setattr(guard_module, "encode_block", codec.encode)
    monkeypatch.setattr(guard_module, "decode_block", codec.decode)
    monkeypatch.setattr(kernels, "_ready", True)
    monkeypatch.setattr(guard_module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(guard_module, "_SHARE", 0)
    return codec


@pytest.fixture
def errors() -> list[float]:
    """What comparing gives for keys and for values."""
    return [0.01, 0.005]


Make = Callable[[], Guard]


@pytest.fixture
def guard(codec: Codec, errors: list[float]) -> Iterator[Guard]:
    def compare(one: TensorLayout, keys: TensorLayout, a: Bytes, b: Bytes) -> tuple[float, float]:
        assert keys.role == "key"
        assert keys.layer == one.layer
        assert a.shape == b.shape == (KV.nbytes,)
        # Keys and values apart: what is bad of one is not good enough for the other.
        return errors[0] / 2, errors[1 if one.role == "value" else 0]

    guard = Guard(compare=compare)
    yield guard
    codec.gate.set()
    guard.close()


def payload() -> Bytes:
    return np.random.default_rng(1).integers(0, 256, KV.nbytes, dtype=np.uint8)


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def sample(guard: Guard, codec: int, times: int = 1) -> None:
    """Have blocks compared, one after the other."""
    for _ in range(times):
        until(lambda: guard.wants(codec))
        guard.offer(KV, codec, payload())
    until(lambda: guard.wants(codec) or not guard._active)


def test_errors_are_averaged_and_shown(guard: Guard, errors: list[float], codec: Codec) -> None:
    sample(guard, FP8)
    errors[0] = 0.03
    sample(guard, FP8)
    (fact,) = guard.facts()
    assert fact["codec"] == "fp8"
    assert fact["layout"] == f"{KV.tag:016x}"
    assert fact["samples"] == 2
    assert fact["error"] == pytest.approx(0.01)
    assert fact["attention"] == pytest.approx(0.02)
    assert fact["output"] == pytest.approx(0.005)
    assert fact["ruled_out"] == ""
    assert guard.ruled_out() == {}
    assert all(len(layers) == 1 for layers in codec.layers), "one layer at a time"


@pytest.mark.parametrize("number", [FP8, LBQ4, LBQ3, LBQ2])
@pytest.mark.parametrize(("which", "said"), [(0, "moves"), (1, "changes what attention gives")])
def test_a_codec_above_a_limit_is_ruled_out_once(
    guard: Guard,
    errors: list[float],
    caplog: pytest.LogCaptureFixture,
    number: int,
    which: int,
    said: str,
) -> None:
    errors[:] = LIMITS[number]
    errors[which] *= 1.1
    with caplog.at_level(logging.WARNING, "lifeboat_cache"):
        sample(guard, number, 7)
        assert guard.ruled_out() == {}, "a few samples prove nothing"
        sample(guard, number, 3)
    assert list(guard.ruled_out()) == [(KV.tag, number)]
    assert len(caplog.records) == 1
    assert "is not used any more for blocks of layout" in caplog.text
    assert said in guard.facts()[0]["ruled_out"]


@pytest.mark.parametrize("number", [FP8, LBQ4, LBQ3, LBQ2])
def test_one_below_its_limits_stays(guard: Guard, errors: list[float], number: int) -> None:
    errors[:] = [limit * 0.95 for limit in LIMITS[number]]
    sample(guard, number, 12)
    assert guard.ruled_out() == {}


def test_values_that_have_become_infinite_are_an_error(guard: Guard, errors: list[float]) -> None:
    errors[0] = float("nan")
    sample(guard, LBQ4, 8)
    assert list(guard.ruled_out()) == [(KV.tag, LBQ4)]
    assert np.isfinite(guard.facts()[0]["error"])


@pytest.mark.parametrize("number", [LOSSLESS, DENSE])
def test_an_exact_codec_that_is_not_is_ruled_out_at_once(
    guard: Guard, codec: Codec, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    sample(guard, number, 3)
    assert guard.ruled_out() == {}
    assert guard.facts()[0]["error"] == 0
    codec.add = 1
    with caplog.at_level(logging.ERROR, "lifeboat_cache"):
        sample(guard, number)
    assert guard.ruled_out() == {(KV.tag, number): "it does not give back what was stored"}
    assert "please report this" in caplog.text


def test_a_block_that_cannot_be_restored_rules_its_codec_out(guard: Guard, codec: Codec) -> None:
    codec.fault = FormatError("the bytes are no block")
    sample(guard, LBQ3)
    assert "it does not restore a block" in guard.ruled_out()[KV.tag, LBQ3]


def test_a_fault_of_ours_ends_the_guard_and_nothing_else(
    guard: Guard, codec: Codec, caplog: pytest.LogCaptureFixture
) -> None:
    codec.fault = RuntimeError("broken")
    until(lambda: guard.wants(FP8))
    guard.offer(KV, FP8, payload())
    until(lambda: not guard._active)
    assert "please report this" in caplog.text
    assert not guard.wants(FP8)
    guard.offer(KV, FP8, payload())
    assert guard.facts() == []


def test_raw_needs_no_guard(guard: Guard) -> None:
    assert not guard.wants(RAW)
    assert guard.wants(FP8)


def test_without_kernels_nothing_is_compared(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    assert guard.wants(FP8)
    monkeypatch.setattr(kernels, "_ready", False)
    assert not guard.wants(FP8)


def test_it_takes_one_sample_at_a_time(guard: Guard, codec: Codec) -> None:
    codec.gate.clear()
    guard.offer(KV, FP8, payload())
    assert not guard.wants(FP8)
    guard.offer(KV, FP8, payload())  # as a second thread would that asked at the same time
    codec.gate.set()
    until(lambda: guard.wants(FP8))
    assert guard.facts()[0]["samples"] == 1


def test_it_rests_a_hundred_times_as_long_as_it_works(
    guard: Guard, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "_SHARE", 100)
    times = iter([0.0, 5.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(times))
    before = time.monotonic()
    guard.offer(KV, FP8, payload())
    until(lambda: guard._next > 0)
    assert guard._next - before >= 500
    assert not guard.wants(FP8)


def test_nothing_is_compared_after_the_end(guard: Guard, codec: Codec) -> None:
    sample(guard, FP8)
    guard.close()
    guard.close()
    assert not guard.wants(FP8)
    guard.offer(KV, FP8, payload())
    assert guard.facts()[0]["samples"] == 1
    thread = guard._thread
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()


def test_a_forked_child_compares_nothing(guard: Guard) -> None:
    sample(guard, FP8)
    child = os.fork()
    if child == 0:
        guard.offer(KV, FP8, payload())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
