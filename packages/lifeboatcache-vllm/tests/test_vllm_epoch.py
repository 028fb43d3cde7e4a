"""Changes of weights in a running engine are noticed, and never in its way."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from lifeboat_cache.integrations import vllm_epoch


class Core:
    """The methods of vLLM's EngineCore that matter here."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self) -> None:
        self.scheduler = object()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if method == "fails":
            raise ValueError("as it should")
        self.calls.append(method)
        return [method]

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(("sleep", level, mode))

    def set_weight_version(self, weight_version: str) -> None:
        self.calls.append(weight_version)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return True


def function(worker: Any) -> None:
    """A function as `collective_rpc` takes it."""


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> type[Core]:
    class Mine(Core):
        pass

    for name in vllm_epoch._REASONS:
        setattr(Mine, name, getattr(Core, name))
    module = ModuleType("vllm.v1.engine.core")
    module.EngineCore = Mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)
    monkeypatch.setattr(vllm_epoch, "_has_changed", False)
    return Mine


@pytest.fixture
def seen(core: type[Core]) -> Iterator[list[str]]:
    found: list[str] = []
    vllm_epoch.on_change(found.append)
    yield found
    vllm_epoch.forget(found.append)


@pytest.fixture
def engine(core: type[Core], seen: list[str]) -> Core:
    engine = core()
    engine.start()
    return engine


def test_calls_that_leave_weights_alone_are_no_change(engine: Core, seen: list[str]) -> None:
    for name in sorted(vllm_epoch.SAFE_CALLS):
        assert engine.collective_rpc(name) == [name]
    engine.sleep()
    engine.sleep(0)
    assert engine.reset_prefix_cache(reset_connector=True)
    assert seen == []
    assert len(engine.calls) == len(vllm_epoch.SAFE_CALLS) + 2


@pytest.mark.parametrize(
    "name",
    [
        "apply_model",
        "finish_weight_update",
        "get_model",
        "load_model",
        "my_extension_method",
        "reload_weights",
        "reset_weights",
        "sleep",
        "start_weight_update",
        "update_config",
        "update_weights",
    ],
)
def test_every_other_name_is_a_change(engine: Core, seen: list[str], name: str) -> None:
    assert engine.collective_rpc(name, kwargs={"x": 1}) == [name]
    assert seen == [f"collective_rpc {name}"]


def test_a_function_is_a_change(engine: Core, seen: list[str]) -> None:
    engine.collective_rpc(method=function)
    (reason,) = seen
    assert reason.endswith(":function")


def test_it_is_said_before_the_call(engine: Core, core: type[Core]) -> None:
    order: list[object] = []

    def listener(reason: str) -> None:
        order.append(list(engine.calls))

    vllm_epoch.on_change(listener)
    try:
        engine.collective_rpc("update_weights")
    finally:
        vllm_epoch.forget(listener)
    assert order == [[]]


def test_deep_sleep_and_a_new_version_are_changes(engine: Core, seen: list[str]) -> None:
    engine.sleep(2)
    engine.sleep(level=2, mode="keep")
    engine.set_weight_version("step 7")
    assert seen == ["sleep level 2", "sleep level 2", "weight version step 7"]
    assert engine.calls == [("sleep", 2, "abort"), ("sleep", 2, "keep"), "step 7"]


def test_arguments_by_name_count_too(engine: Core, seen: list[str]) -> None:
    engine.set_weight_version(weight_version="8")
    engine.collective_rpc(method="update_weights")
    engine.sleep(level=2)
    assert seen == ["weight version 8", "collective_rpc update_weights", "sleep level 2"]


def test_a_call_that_is_not_understood_counts_as_a_change(engine: Core, seen: list[str]) -> None:
    engine.sleep(level="deep")  # type: ignore[arg-type]
    assert seen == ["a call that was not understood"]
    assert engine.calls == [("sleep", "deep", "abort")]


def test_a_cache_reset_after_a_change_counts_again(engine: Core, seen: list[str]) -> None:
    engine.collective_rpc("update_weights")
    engine.reset_prefix_cache(True, True)
    assert len(seen) == 2
    assert "reset" in seen[1]


def test_starting_is_no_change(core: type[Core], seen: list[str]) -> None:
    starting = core()
    starting.collective_rpc("load_model")
    assert seen == []
    starting.start()
    starting.collective_rpc("load_model")
    assert len(seen) == 1


def test_the_wrapped_call_is_never_broken(engine: Core, seen: list[str]) -> None:
    def broken(reason: str) -> None:
        raise RuntimeError("of a listener")

    vllm_epoch.on_change(broken)
    try:
        assert engine.collective_rpc("update_weights") == ["update_weights"]
        engine.sleep("2")  # type: ignore[arg-type]
        engine.sleep("deep")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="as it should"):
            engine.collective_rpc("fails")
        with pytest.raises(TypeError):
            engine.set_weight_version()  # type: ignore[call-arg]
    finally:
        vllm_epoch.forget(broken)
    assert "collective_rpc fails" in seen


def test_signatures_stay_and_installing_twice_counts_once(
    core: type[Core], engine: Core, seen: list[str]
) -> None:
    before = {name: getattr(core, name) for name in vllm_epoch._REASONS}
    vllm_epoch.install()
    assert {name: getattr(core, name) for name in before} == before
    for name in before:
        assert inspect.signature(getattr(core, name)) == inspect.signature(getattr(Core, name))
    engine.collective_rpc("update_weights")
    assert len(seen) == 1


def test_nobody_is_told_after_leaving(engine: Core) -> None:
    found: list[str] = []
    vllm_epoch.on_change(found.append)
    vllm_epoch.forget(found.append)
    vllm_epoch.forget(found.append)
    engine.collective_rpc("update_weights")
    assert found == []


def test_somebody_else_may_say_so(seen: list[str]) -> None:
    vllm_epoch.changed("by hand")
    assert seen == ["by hand"]
