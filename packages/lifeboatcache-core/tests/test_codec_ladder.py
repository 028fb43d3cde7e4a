"""Which codec a block is stored with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from lifeboat_cache.codecs.ladder import AUTO_CODECS, Choice, Ladder, kind_of, rung_of
from lifeboat_cache.codecs.layout import DType, KVLayout, Role, TensorLayout
from lifeboat_cache.codecs.names import (
    CODEC_NAMES,
    DENSE,
    FP8,
    LBQ2,
    LBQ3,
    LBQ4,
    LOSSLESS,
    RAW,
    codec_name,
    codec_number,
    is_exact,
    more_precise,
)
from lifeboat_cache.codecs.rates import DEFAULT_READ, CodecRate, Rates, decoding_cores
from lifeboat_cache.config.schema import Compression

GB = 1e9


def layout(*parts: tuple[Role, DType], tokens: int = 256) -> KVLayout:
    """Tensors of 2 heads with 8 elements each, one after the other."""
    item = {"bfloat16": 2, "float16": 2, "float32": 4}
    tensors, at = [], 0
    for number, (role, dtype) in enumerate(parts):
        width = 8 * item.get(dtype, 1)
        tensors.append(
            TensorLayout(
                role, dtype, number, 1, tokens, 2, 8, tokens * 2 * width, 2 * width, width, at
            )
        )
        at += tokens * 2 * width
    return KVLayout.of(at, tensors)


KV = layout(("key", "bfloat16"), ("value", "bfloat16"))
KV8 = layout(("key", "float8_e4m3fn"), ("value", "float8_e4m3fn"))
STATE = layout(("state", "float32"))
UNKNOWN = KVLayout.opaque(4096)


def settings(local: str = "fp8", lossless_8bit: str = "remote") -> Compression:
    return Compression.model_validate({"ladder": {"local": local}, "lossless_8bit": lossless_8bit})


def rates(read: float, cores: int = 1, **decode: tuple[float, float]) -> Rates:
    """Rates of bfloat16 in GB/s: by codec what a core decodes, and the ratio."""
    known: Mapping[str, tuple[float, float]] = {
        "raw": (20, 1.0),
        "lossless": (3, 1.45),
        "dense": (1, 1.52),
        "fp8": (5, 1.97),
        "lbq4": (2, 3.6),
        "lbq3": (1.5, 4.6),
        "lbq2": (1.5, 6.0),
    }
    return Rates(
        {
            ("bfloat16", codec_number(name)): CodecRate(speed * GB, ratio)  # type: ignore[arg-type]
            for name, (speed, ratio) in {**known, **decode}.items()
        },
        read * GB,
        True,
        cores,
    )


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_named_codec_is_taken(name: str) -> None:
    choice = Ladder(settings(name)).choose(KV)
    assert codec_name(choice.codec) == name
    assert choice.reason == f"compression.ladder.local is {name}"


@pytest.mark.parametrize("name", [*CODEC_NAMES, "auto"])
@pytest.mark.parametrize("read", [0.1, 2, 20])
def test_what_is_not_kv_is_always_exact(name: str, read: float) -> None:
    for mode in ("ladder", "exact"):
        ladder = Ladder(settings(name), mode=mode, rates=rates(read))
        assert ladder.choose(UNKNOWN).codec == RAW
        assert is_exact(ladder.choose(STATE).codec)
        assert is_exact(ladder.choose(KV8).codec)
        if mode == "exact":
            assert is_exact(ladder.choose(KV).codec)


@pytest.mark.parametrize(("setting", "codec"), [("on", LOSSLESS), ("remote", RAW), ("off", RAW)])
def test_eight_bits_go_by_their_own_key(setting: str, codec: int) -> None:
    choice = Ladder(settings("lbq2", setting)).choose(KV8)
    assert choice.codec == codec
    assert f"compression.lossless_8bit is {setting}" in choice.reason


def test_kinds() -> None:
    assert kind_of(KV) == "kv"
    assert kind_of(KV8) == "kv8"
    assert kind_of(layout(("latent", "float32"))) == "kv"
    assert kind_of(layout(("key", "bfloat16"), ("value", "float8_e5m2"))) == "kv"
    assert kind_of(layout(("state", "bfloat16"), ("key", "float16"))) == "kv"
    assert kind_of(STATE) == "state"
    assert kind_of(UNKNOWN) == "unknown"
    assert kind_of(layout(("key", "bytes"))) == "unknown"
    assert kind_of(KVLayout.opaque(0)) == "unknown"


def test_the_rung_of_a_target() -> None:
    assert rung_of("filesystem") == "local"


@pytest.mark.parametrize(
    ("read", "cores", "ratio", "codec"),
    [
        (0.3, 1, 1.52, LOSSLESS),  # a slow disk, but 5 % are not worth it
        (0.3, 1, 1.7, DENSE),
        (1.0, 1, 1.7, LOSSLESS),
        (2.0, 1, 1.52, LOSSLESS),
        (3.5, 1, 1.52, RAW),  # one core is slower than the disk
        (3.1, 1, 1.52, LOSSLESS),  # hardly: then it is the smaller one
        (3.5, 4, 1.52, LOSSLESS),
        (2.0, 8, 1.7, DENSE),
    ],
)
def test_exact_is_what_restores_fastest(read: float, cores: int, ratio: float, codec: int) -> None:
    known = rates(read, cores, dense=(1.0, ratio))
    choice = Ladder(settings(), mode="exact", rates=known).choose(KV)
    assert choice.codec == codec
    assert f"{codec_name(codec)} restores" in choice.reason
    assert f"the target reads {read:.3g} GB/s" in choice.reason


@pytest.mark.parametrize(
    ("read", "cores", "codec"), [(0.2, 1, LBQ4), (2.0, 1, FP8), (30.0, 1, RAW), (2.0, 16, LBQ4)]
)
def test_auto_is_what_restores_fastest_and_says_why(read: float, cores: int, codec: int) -> None:
    choice = Ladder(settings("auto"), rates=rates(read, cores)).choose(KV)
    assert choice.codec == codec, choice.reason
    assert choice.reason.startswith("compression.ladder.local is auto: ")


def test_what_comes_from_the_page_cache_is_kept_raw() -> None:
    slow = rates(0.2)
    ladder = Ladder(settings(), mode="exact", rates=slow)
    assert ladder.choose(KV).codec == LOSSLESS
    choice = replace(ladder, rates=replace(slow, cached=True)).choose(KV)
    assert choice.codec == RAW
    assert "from the page cache" in choice.reason


def test_auto_says_the_numbers() -> None:
    choice = Ladder(settings("auto"), rates=rates(2.0)).choose(KV)
    assert choice.reason == (
        "compression.ladder.local is auto: fp8 restores 3.94 GB of KV per second (the target reads "
        "2 GB/s, x 1.97; 1 core decode 5 GB/s), lossless 2.9 GB, raw 2 GB, lbq4 2 GB, dense 1 GB"
    )


def test_auto_never_takes_what_must_be_asked_for() -> None:
    fast = rates(0.05, 64, lbq3=(100, 4.6), lbq2=(100, 9.0))
    assert Ladder(settings("auto"), rates=fast).choose(KV).codec == LBQ4
    assert LBQ3 not in AUTO_CODECS


def test_what_is_as_fast_gives_way_to_what_is_more_precise() -> None:
    # Memory is the limit of all of them.
    same = rates(
        50.0,
        raw=(2.0, 1.0),
        lossless=(2.0, 1.4),
        fp8=(2.0, 2.0),
        dense=(1.96, 1.5),
        lbq4=(2.05, 3.6),
    )
    choice = Ladder(settings("auto"), rates=same)
    codec = choice.choose(KV).codec
    assert codec == LOSSLESS


def test_until_something_is_measured() -> None:
    assert not Rates().measured
    exact = Ladder(settings(), mode="exact").choose(KV)
    assert exact.codec == RAW
    assert "has not been measured yet" in exact.reason
    auto = Ladder(settings("auto")).choose(KV)
    assert auto.codec == FP8
    assert "nothing has been measured yet" in auto.reason
    # The codecs are measured before the target.
    half = Rates(rates(1.0).codecs, cores=1)
    choice = Ladder(settings("auto"), rates=half).choose(KV)
    assert f"the target reads {DEFAULT_READ / GB:.3g} GB/s assumed" in choice.reason


@pytest.mark.parametrize("name", [*CODEC_NAMES, "auto"])
def test_without_kernels_nothing_is_compressed(name: str) -> None:
    ladder = Ladder(settings(name, "on"), rates=rates(0.1), compiled=False)
    for one in (KV, KV8, STATE, UNKNOWN):
        assert ladder.choose(one).codec == RAW


def test_the_guard_takes_a_step_up_the_ladder() -> None:
    def ruled_out(*codecs: int, **more: Any) -> Choice:
        reasons = {(KV.tag, codec): f"{codec_name(codec)} is bad" for codec in codecs}
        return Ladder(settings("lbq2"), ruled_out=reasons, **more).choose(KV)

    assert ruled_out(LBQ2).codec == LBQ3
    choice = ruled_out(LBQ2, LBQ3, LBQ4)
    assert choice.codec == FP8
    assert choice.reason == (
        "compression.ladder.local is lbq2, but lbq2 is bad: lbq3 instead, but lbq3 is bad: lbq4 "
        "instead, but lbq4 is bad: fp8 instead"
    )
    assert ruled_out(LBQ2, LBQ3, LBQ4, FP8).codec == LOSSLESS
    assert ruled_out(LBQ2, LBQ3, LBQ4, FP8, LOSSLESS).codec == RAW
    # Another layout is another matter.
    reasons = {(KV.tag, LBQ2): "bad"}
    other = layout(("key", "bfloat16"))
    assert Ladder(settings("lbq2"), ruled_out=reasons).choose(other).codec == LBQ2


def test_the_guard_is_heard_in_every_choice() -> None:
    reasons = {(KV.tag, codec): "bad" for codec in (LOSSLESS, DENSE, LBQ4)}
    exact = Ladder(settings(), mode="exact", rates=rates(0.3), ruled_out=reasons)
    assert exact.choose(KV).codec == RAW
    auto = Ladder(settings("auto"), rates=rates(0.3), ruled_out=reasons)
    assert auto.choose(KV).codec == FP8
    eight = {(KV8.tag, LOSSLESS): "bad"}
    assert Ladder(settings("fp8", "on"), ruled_out=eight).choose(KV8).codec == RAW


def test_steps() -> None:
    steps = [LBQ2]
    while steps[-1] != RAW:
        steps.append(more_precise(steps[-1]))
    assert steps == [LBQ2, LBQ3, LBQ4, FP8, LOSSLESS, RAW]
    assert more_precise(DENSE) == RAW
    assert codec_name(77) == "codec 77"
    assert [codec_number(name) for name in CODEC_NAMES] == list(range(len(CODEC_NAMES)))


def test_one_core_stays_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert decoding_cores(8) == 8
    assert decoding_cores(64) == 15
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert decoding_cores(8) == 1
