"""The codecs of a store while it runs."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from lifeboat_cache import kernels
from lifeboat_cache.codecs import policy as policy_module
from lifeboat_cache.codecs.counts import CodecCounts
from lifeboat_cache.codecs.guard import Standing
from lifeboat_cache.codecs.layout import KVLayout, TensorLayout
from lifeboat_cache.codecs.names import DENSE, FP8, LBQ3, LBQ4, LOSSLESS, RAW
from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.codecs.rates import CodecRate
from lifeboat_cache.codecs.speed import write_target_rate
from lifeboat_cache.config import load_config
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.targets.filesystem import FilesystemTarget

KV = KVLayout.of(4096, [TensorLayout("key", "bfloat16", 0, 1, 16, 2, 64, 4096, 256, 128, 0)])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    return home


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_ready", True)


def write(home: Path, text: str) -> None:
    (home / "new").write_text(text)
    os.replace(home / "new", home / "lifeboat.yaml")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs that were measured: a core decodes fp8 faster than the target reads."""
    rates = {
        ("bfloat16", RAW): CodecRate(20e9, 1.0),
        ("bfloat16", LOSSLESS): CodecRate(3e9, 1.45),
        ("bfloat16", DENSE): CodecRate(1e9, 1.5),
        ("bfloat16", FP8): CodecRate(5e9, 2.0),
        ("bfloat16", LBQ4): CodecRate(2e9, 3.5),
    }
    monkeypatch.setattr(policy_module, "read_codec_rates", lambda home: rates)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})


def test_a_change_of_the_file_counts_for_the_next_job(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(home, "compression: {ladder: {local: fp8}}\n")
    policy = CodecPolicy(LiveConfig(load_config()))
    assert policy.choose(KV).codec == FP8
    write(home, "compression: {ladder: {local: lbq3}}\n")
    assert policy.choose(KV).codec == FP8, "nobody has looked yet"
    with caplog.at_level(logging.INFO, "lifeboat_cache"):
        policy.look()
        policy.look()
    choice = policy.choose(KV)
    assert choice.codec == LBQ3
    said = [r.getMessage() for r in caplog.records if "from now on" in r.getMessage()]
    assert len(said) == 1
    assert "become lbq3 from now on, not fp8: compression.ladder.local is lbq3" in said[0]
    write(home, "compression: {ladder: {local: lbq33}}\n")
    policy.look()
    assert policy.choose(KV).codec == LBQ3
    assert "there is no codec 'lbq33'" in policy.config_facts()["problem"]


def test_native_mode_is_exact_until_it_is_told_to_take_the_ladder(home: Path) -> None:
    write(home, "compression: {ladder: {local: lbq4}}\n")
    live = LiveConfig(load_config())
    native, other = CodecPolicy(live, native=True), CodecPolicy(live)
    assert native.choose(KV).codec == RAW
    assert other.choose(KV).codec == LBQ4
    write(home, "compression: {ladder: {local: lbq4}}\nengine: {native_codec: ladder}\n")
    native.look()
    # Not while it runs: what is served would have to change too.
    assert native.choose(KV).codec == RAW
    assert native.exact
    assert live.restart == ("engine.native_codec",)
    again = CodecPolicy(LiveConfig(load_config()), native=True)
    assert again.choose(KV).codec == LBQ4
    assert not again.exact
    assert not other.exact
    assert native.facts()["mode"] == "exact"
    assert again.facts()["mode"] == "ladder"


def test_what_was_measured_decides(home: Path, tmp_path: Path, measured: None) -> None:
    target = FilesystemTarget(tmp_path / "kv")
    policy = CodecPolicy(load_config().config, native=True, home=home)
    assert policy.choose(KV).codec == RAW
    policy.opened(target)
    policy.look()
    choice = policy.choose(KV)
    assert choice.codec == LOSSLESS
    assert "the target reads 2 GB/s assumed" in choice.reason
    write_target_rate(home, target.location, 10e9)
    policy.look()
    choice = policy.choose(KV)
    assert choice.codec == RAW
    assert "the target reads 10 GB/s, x" in choice.reason
    write_target_rate(home, str(tmp_path / "elsewhere"), 1e6)
    policy.look()
    assert policy.choose(KV) == choice


def test_a_verdict_of_the_guard_counts_from_the_next_look_on(home: Path) -> None:
    write(home, "compression: {ladder: {local: lbq4}}\n")
    policy = CodecPolicy(load_config().config)
    assert policy.choose(KV).codec == LBQ4
    policy.guard._standings[KV.tag, LBQ4] = Standing()
    policy.guard._rule_out((KV.tag, LBQ4), "its error is 0.5")
    policy.look()
    assert policy.choose(KV).codec == FP8
    facts = policy.facts()
    (choice,) = facts["choices"]
    assert choice["codec"] == "fp8"
    assert choice["reason"].endswith("lbq4, but its error is 0.5: fp8 instead")
    (guard,) = facts["guard"]
    assert (guard["codec"], guard["ruled_out"]) == ("lbq4", "its error is 0.5")


def test_one_with_a_fixed_codec_watches_nothing(home: Path) -> None:
    policy = CodecPolicy.fixed("fp8")
    write(home, "compression: {ladder: {local: lbq3}}\n")
    policy.look()
    assert policy.choose(KV).codec == FP8
    assert policy.config_facts() == {}
    assert not policy.guard.wants(FP8)
    assert CodecPolicy.fixed("raw").choose(KV).codec == RAW
    policy.close()


def test_many_threads_ask_while_it_changes(home: Path) -> None:
    write(home, "compression: {ladder: {local: fp8}}\n")
    policy = CodecPolicy(LiveConfig(load_config()))
    stop, seen = threading.Event(), set()

    def ask() -> None:
        while not stop.is_set():
            choice = policy.choose(KV)
            # Never the codec of one configuration with the reason of another.
            seen.add((choice.codec, choice.reason))

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    for name in ("lbq3", "fp8", "lbq4", "fp8"):
        write(home, f"compression: {{ladder: {{local: {name}}}}}\n")
        policy.look()
        policy.choose(KV)
    stop.set()
    for asker in askers:
        asker.join()
    codecs = {"fp8": FP8, "lbq3": LBQ3, "lbq4": LBQ4}
    assert seen <= {(codec, f"compression.ladder.local is {n}") for n, codec in codecs.items()}
    assert policy.choose(KV).codec == FP8


def test_until_there_are_kernels_blocks_are_stored_as_they_are(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_ready", False)
    write(home, "compression: {ladder: {local: lbq4}}\n")
    policy = CodecPolicy(LiveConfig(load_config()))
    choice = policy.choose(KV)
    assert (choice.codec, choice.reason) == (RAW, "there are no compiled kernels (yet)")
    policy.look()
    assert policy.choose(KV) == choice
    assert CodecPolicy.fixed("lbq4").choose(KV).codec == LBQ4
    monkeypatch.setattr(kernels, "_ready", True)
    assert policy.choose(KV).codec == LBQ4, "at once"
    assert policy.facts()["choices"][0]["codec"] == "lbq4"


def test_counts_by_codec() -> None:
    counts = CodecCounts()
    counts.stored(FP8, 2, 200, 110)
    counts.stored(RAW, 1, 200, 200)
    counts.stored(FP8, 1, 100, 50)
    counts.loaded(LOSSLESS, 1, 100, 50)
    counts.loaded(RAW, 0, 0, 0)
    assert counts.values() == {
        "encoded_blocks:raw": 1,
        "encoded_raw_bytes:raw": 200,
        "encoded_bytes:raw": 200,
        "decoded_blocks:lossless": 1,
        "decoded_raw_bytes:lossless": 100,
        "decoded_bytes:lossless": 50,
        "encoded_blocks:fp8": 3,
        "encoded_raw_bytes:fp8": 300,
        "encoded_bytes:fp8": 160,
    }
    assert next(iter(counts.values())).endswith(":raw")
