"""A request's adapter is known by content, or the request is left alone."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from lifeboat_cache.identity import AdapterIdentity, adapter_identity
from lifeboat_cache.integrations import vllm_lora
from lifeboat_cache.integrations.vllm_lora import AdapterRef, AdapterWatch, EngineAdapters

T = TypeVar("T")


SERVING = SimpleNamespace(lora_dtype="bfloat16")


class Context:
    """vLLM's ReqContext, as far as it matters."""

    def __init__(self) -> None:
        self._state: dict[type, Any] = {}

    def set_state(self, value: Any) -> None:
        self._state[type(value)] = value

    def get_state(self, kind: type[T]) -> T | None:
        return self._state.get(kind)


def lora(path: Path | str, name: str = "a", **more: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=str(path), lora_int_id=1, **more)


_writes = itertools.count(1)


def write_adapter(directory: Path, fill: int = 1, rank: int = 4) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    header = b'{"w":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}'
    (directory / "adapter_model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + np.full(64, fill, np.uint8).tobytes()
    )
    # Two writes within a tick of the kernel's clock would have the same times.
    when = next(_writes)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        os.utime(directory / name, (when, when))
    return directory


def until(question: Callable[[], T]) -> T:
    """Wait for a true answer; the test's own time limit is the only other end."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        answer = question()
        if answer:
            return answer
        time.sleep(0.002)
    raise AssertionError("it never happened")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> AdapterWatch:
    made = AdapterWatch(wait_s=60.0)
    monkeypatch.setattr(vllm_lora, "_watch", made)
    monkeypatch.setattr(vllm_lora, "_hook_problem", None)
    return made


def attached(watch: AdapterWatch, request: Any) -> Context:
    context = Context()
    watch.attach(context, request)
    return context


def settled(
    watch: AdapterWatch, request: Any, engine: EngineAdapters | None = None
) -> bytes | None:
    """The key space of a new request once it is no longer pending."""
    context = attached(watch, request)
    adapters = engine or EngineAdapters(SERVING)
    until(lambda: not adapters.pending(context))
    return adapters.key_space(context)


def test_a_request_without_an_adapter_has_the_empty_space(watch: AdapterWatch) -> None:
    context = attached(watch, None)
    assert EngineAdapters(SERVING).key_space(context) == b""
    assert vllm_lora.lora_of(context) is None
    assert not EngineAdapters(SERVING).pending(context)


def test_a_context_that_nobody_marked_is_unknown(watch: AdapterWatch) -> None:
    assert EngineAdapters(SERVING).key_space(Context()) is None
    assert not EngineAdapters(SERVING).pending(Context())


def test_an_adapter_is_known_by_content(watch: AdapterWatch, tmp_path: Path) -> None:
    one = settled(watch, lora(write_adapter(tmp_path / "a")))
    same = settled(watch, lora(write_adapter(tmp_path / "b"), name="b"))
    other = settled(watch, lora(write_adapter(tmp_path / "c", fill=2), name="c"))
    assert one is not None
    assert len(one) == 32
    assert one == same
    assert other not in (one, None, b"")


def test_it_is_pending_until_it_is_known(
    watch: AdapterWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = threading.Event()

    def identify(path: Path, **options: Any) -> AdapterIdentity:
        assert allowed.wait(60)
        return adapter_identity(path, **options)

    monkeypatch.setattr(watch, "_identify", identify)
    context = attached(watch, lora(write_adapter(tmp_path)))
    assert EngineAdapters(SERVING).key_space(context) is None
    assert EngineAdapters(SERVING).pending(context)
    allowed.set()
    assert until(lambda: EngineAdapters(SERVING).key_space(context))
    assert not EngineAdapters(SERVING).pending(context)


def test_pending_ends_even_if_the_files_never_answer(tmp_path: Path) -> None:
    stuck = threading.Event()

    def identify(path: Path, **options: Any) -> AdapterIdentity:
        stuck.wait()
        raise OSError

    watch = AdapterWatch(wait_s=0.0, identify=identify)
    context = attached(watch, lora(write_adapter(tmp_path)))
    assert not watch.pending(context)
    assert watch.key_space(context) is None
    stuck.set()


def test_every_request_looks_at_the_files_again(watch: AdapterWatch, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path)
    known = settled(watch, lora(directory))
    first = attached(watch, lora(directory))
    until(lambda: not watch.pending(first))
    assert EngineAdapters(SERVING).key_space(first) == known
    write_adapter(directory, fill=9)
    assert settled(watch, lora(directory)) is None, "the engine may hold either"
    write_adapter(directory)
    assert settled(watch, lora(directory)) is None, "and its own caches too, from then on"


def test_what_was_known_before_a_request_came_does_not_answer_it(
    watch: AdapterWatch, tmp_path: Path
) -> None:
    directory = write_adapter(tmp_path)
    known = settled(watch, lora(directory))
    allowed, began = threading.Event(), threading.Event()

    def hold(answer: bool) -> None:
        began.set()
        assert allowed.wait(60)

    EngineAdapters(SERVING).confirm(attached(watch, lora(directory)), hold)
    assert began.wait(60)
    context = attached(watch, lora(directory))
    assert EngineAdapters(SERVING).key_space(context) is None
    assert EngineAdapters(SERVING).pending(context)
    allowed.set()
    assert until(lambda: EngineAdapters(SERVING).key_space(context)) == known


def test_a_changed_configuration_is_a_change(watch: AdapterWatch, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path)
    assert settled(watch, lora(directory))
    write_adapter(directory, rank=8)
    assert settled(watch, lora(directory)) is None


def test_files_newer_than_the_loading_are_not_what_was_loaded(
    watch: AdapterWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert settled(watch, lora(write_adapter(tmp_path))) is None


@pytest.mark.parametrize("first", [True, False])
def test_an_adapter_reloaded_in_place_is_unknown_for_good(
    watch: AdapterWatch, tmp_path: Path, first: bool
) -> None:
    directory = write_adapter(tmp_path)
    if not first:
        assert settled(watch, lora(directory))
    assert settled(watch, lora(directory, load_inplace=True)) is None
    assert settled(watch, lora(directory)) is None


def test_an_adapter_read_in_two_ways_is_unknown(watch: AdapterWatch, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path)
    assert settled(watch, lora(directory, is_3d_lora_weight=False))
    assert settled(watch, lora(directory, is_3d_lora_weight=True)) is None


def test_what_cannot_be_read_is_unknown(watch: AdapterWatch, tmp_path: Path) -> None:
    assert settled(watch, lora(tmp_path / "missing")) is None
    (tmp_path / "bad").mkdir()
    assert settled(watch, lora(tmp_path / "bad", name="b")) is None
    assert settled(watch, lora("s3://bucket/adapter", name="c")) is None


def test_engines_of_one_process_that_apply_adapters_otherwise_do_not_share(
    watch: AdapterWatch, tmp_path: Path
) -> None:
    # Both exist at the same time: what one has must not depend on who came last.
    directory = write_adapter(tmp_path)
    engines = [
        EngineAdapters(SimpleNamespace(lora_dtype=dtype, max_loras=4))
        for dtype in ("float16", "bfloat16")
    ]
    first, second = (settled(watch, lora(directory), engine) for engine in engines)
    assert None not in (first, second)
    assert first != second
    assert settled(watch, lora(directory), engines[0]) == first
    same = EngineAdapters(SimpleNamespace(lora_dtype="float16", max_loras=4))
    assert settled(watch, lora(directory), same) == first


def test_expert_weights_that_are_read_otherwise_are_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two processes, each of which reads the same files in its own way.
    directory = write_adapter(tmp_path)
    found = []
    monkeypatch.setattr(vllm_lora, "_hook_problem", None)
    for stacked in (False, True):
        watch = AdapterWatch(wait_s=60.0)
        monkeypatch.setattr(vllm_lora, "_watch", watch)
        found.append(settled(watch, lora(directory, is_3d_lora_weight=stacked)))
    assert None not in found
    assert found[0] != found[1]


def confirmed(context: Context) -> bool:
    answers: list[bool] = []
    EngineAdapters(SERVING).confirm(context, answers.append)
    until(lambda: answers)
    (answer,) = answers
    return answer


def test_confirmation_tells_whether_the_files_are_still_the_same(
    watch: AdapterWatch, tmp_path: Path
) -> None:
    directory = write_adapter(tmp_path)
    assert settled(watch, lora(directory))
    context = attached(watch, lora(directory))
    assert confirmed(context)
    write_adapter(directory, fill=3)
    assert not confirmed(context)
    assert not confirmed(context)


def test_confirmation_is_immediate_without_an_adapter(watch: AdapterWatch) -> None:
    answers: list[bool] = []
    EngineAdapters(SERVING).confirm(attached(watch, None), answers.append)
    EngineAdapters(SERVING).confirm(Context(), answers.append)
    assert answers == [True, False]


def test_confirmations_that_wait_too_long_are_answered_no(tmp_path: Path) -> None:
    stuck, began = threading.Event(), threading.Event()

    def identify(path: Path, **options: Any) -> AdapterIdentity:
        began.set()
        stuck.wait()
        raise OSError

    watch = AdapterWatch(wait_s=0.0, identify=identify)
    context = attached(watch, lora(write_adapter(tmp_path)))
    assert began.wait(60)
    answers: list[bool] = []
    watch.confirm(context, answers.append)
    assert answers == []
    time.sleep(0.001)
    watch.expire()
    assert answers == [False]
    stuck.set()


def test_a_failing_confirmation_does_not_end_the_thread(
    watch: AdapterWatch, tmp_path: Path
) -> None:
    directory = write_adapter(tmp_path)
    assert settled(watch, lora(directory))

    def broken(answer: bool) -> None:
        raise RuntimeError("of the caller")

    EngineAdapters(SERVING).confirm(attached(watch, lora(directory)), broken)
    assert confirmed(attached(watch, lora(directory)))


# The hooks ----------------------------------------------------------------------


def test_a_thread_that_cannot_start_is_tried_again(
    watch: AdapterWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = lora(write_adapter(tmp_path / "a"))

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            attached(watch, adapter)
    assert settled(watch, adapter) is not None


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for the two modules that are hooked."""

    class EngineCore:
        def add_lora(self, lora_request: Any) -> str:
            return f"loaded {lora_request.lora_name}"

    def create_req_context(req: Any) -> Context:
        return Context()

    offloading = ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.offloading")
    scheduler = ModuleType(f"{offloading.__name__}.scheduler")
    core = ModuleType("vllm.v1.engine.core")
    scheduler._create_req_context = create_req_context  # type: ignore[attr-defined]
    offloading.scheduler = scheduler  # type: ignore[attr-defined]
    core.EngineCore = EngineCore  # type: ignore[attr-defined]
    for module in (offloading, scheduler, core):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(vllm_lora, "_hook_problem", "they are not watched in this process")
    monkeypatch.setattr(vllm_lora, "_watch", AdapterWatch(wait_s=60.0))
    return SimpleNamespace(scheduler=scheduler, EngineCore=EngineCore)


def test_the_hooks_mark_every_request(vllm: SimpleNamespace, tmp_path: Path) -> None:
    assert EngineAdapters(SERVING).problem is not None
    vllm_lora.install()
    vllm_lora.install()
    assert EngineAdapters(SERVING).problem is None
    plain = vllm.scheduler._create_req_context(SimpleNamespace(lora_request=None))
    assert EngineAdapters(SERVING).key_space(plain) == b""
    request = SimpleNamespace(lora_request=lora(write_adapter(tmp_path)))
    context = vllm.scheduler._create_req_context(request)
    assert vllm_lora.lora_of(context) == str(tmp_path)
    assert until(lambda: EngineAdapters(SERVING).key_space(context))


def test_an_adapter_counts_from_when_it_is_loaded(vllm: SimpleNamespace, tmp_path: Path) -> None:
    vllm_lora.install()
    directory = write_adapter(tmp_path)
    request = lora(directory)
    assert vllm.EngineCore().add_lora(request) == "loaded a"
    adapter = vllm_lora.watch()._adapters["a", str(directory)]
    until(lambda: adapter.digest)
    write_adapter(directory, fill=7)
    context = vllm.scheduler._create_req_context(SimpleNamespace(lora_request=request))
    until(lambda: not EngineAdapters(SERVING).pending(context))
    assert EngineAdapters(SERVING).key_space(context) is None, (
        "the engine holds what was there before"
    )


def test_a_request_that_cannot_be_understood_is_served_and_unknown(vllm: SimpleNamespace) -> None:
    vllm_lora.install()
    context = vllm.scheduler._create_req_context(SimpleNamespace())
    assert EngineAdapters(SERVING).key_space(context) is None
    assert vllm.EngineCore().add_lora(SimpleNamespace(lora_name="x")) == "loaded x"


def test_another_vllm_leaves_the_hooks_out(vllm: SimpleNamespace) -> None:
    del vllm.scheduler._create_req_context
    vllm_lora.install()
    assert vllm_lora.hook_problem() is not None
    serving = EngineAdapters(SERVING)
    assert serving.problem is not None
    assert "without LifeboatCache" in serving.problem
    assert serving.key_space(Context()) is None
    assert not serving.pending(Context())
    answers: list[bool] = []
    serving.confirm(Context(), answers.append)
    assert answers == [False]
    assert EngineAdapters(None).key_space(Context()) == b""


def test_an_engine_without_adapters_needs_no_marks(vllm: SimpleNamespace) -> None:
    vllm_lora.install()
    plain, serving = EngineAdapters(None), EngineAdapters(SERVING)
    assert plain.key_space(Context()) == b""
    answers: list[bool] = []
    plain.confirm(Context(), answers.append)
    assert answers == [True]
    assert serving.key_space(Context()) is None, "another engine of the process serves some"


def test_settings_without_a_spelling_keep_only_their_engine_out(vllm: SimpleNamespace) -> None:
    vllm_lora.install()
    odd = EngineAdapters(SimpleNamespace(target_modules=object()))
    assert odd.problem is not None
    assert odd.key_space(Context()) is None
    assert EngineAdapters(SERVING).problem is None


def test_references_hold_what_decides_the_content() -> None:
    assert AdapterRef.of(lora("/x", load_inplace=True, is_3d_lora_weight=True)) == AdapterRef(
        "a", "/x", three_dimensional=True, reloads=True
    )
