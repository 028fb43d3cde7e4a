"""Adapters: their content in the keys of their requests' pages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tiny_adapter import write_adapter

from lifeboat_cache.integrations import sglang_lora
from lifeboat_cache.integrations.sglang_lora import Adapters


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    write_adapter(directory)
    return directory


def known(adapters: Adapters, path: Path, lora_id: str = "id", name: str = "a") -> str:
    adapters.look(lora_id, name, str(path), not_after=time.time() + 60)()
    return adapters.extra_key("tenant" + lora_id, lora_id)


def test_the_same_content_has_the_same_key_under_any_name(adapter: Path, tmp_path: Path) -> None:
    key = known(Adapters(), adapter)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in adapter.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert known(Adapters(), copy, lora_id="another", name="b") == key
    assert key.startswith("tenant")
    assert "id" not in key.removeprefix("tenantlifeboat-adapter:")


def test_other_content_at_the_same_path_has_another_key(adapter: Path) -> None:
    key = known(Adapters(), adapter)
    write_adapter(adapter, seed=1)
    assert known(Adapters(), adapter) != key


def test_how_an_engine_applies_adapters_is_in_the_key(adapter: Path) -> None:
    one, other = Adapters(), Adapters()
    other.settings = b"otherwise"
    assert known(one, adapter) != known(other, adapter)


def test_ranks_on_several_hosts_keep_the_id_beside_the_content(adapter: Path) -> None:
    adapters = Adapters()
    adapters.keeps_ids = True
    assert known(adapters, adapter).startswith("tenantidlifeboat-adapter:")


def test_an_unknown_adapter_is_never_stored_and_never_found_again(tmp_path: Path) -> None:
    first, second = Adapters(), Adapters()
    keys = {known(adapters, tmp_path / "nowhere") for adapters in (first, second)}
    assert len(keys) == 2  # of two processes
    assert not any(Adapters.may_store(key) for key in keys)
    assert known(first, tmp_path / "nowhere") in keys  # the same within one
    assert Adapters.may_store("tenant")
    assert Adapters.may_store(None)


def test_an_adapter_that_changes_while_it_is_loaded_is_unknown(adapter: Path) -> None:
    adapters = Adapters()
    confirm = adapters.look("id", "a", str(adapter), not_after=time.time() + 60)
    write_adapter(adapter, seed=1)
    confirm()
    assert not Adapters.may_store(adapters.extra_key("id", "id"))


def test_an_adapter_that_changed_after_the_engine_began_is_unknown(adapter: Path) -> None:
    adapters = Adapters()
    adapters.look("id", "a", str(adapter), not_after=time.time() - 3600)()
    assert not Adapters.may_store(adapters.extra_key("id", "id"))


@pytest.fixture
def hooked(model: Path, monkeypatch: pytest.MonkeyPatch) -> Adapters:
    """SGLang's classes with our hooks, and adapters of their own."""
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    fresh = Adapters()
    monkeypatch.setattr(sglang_lora, "adapters", fresh)
    for owner, name in (
        (LoRAManager, "_load_lora_adapter"),
        (LoRAManager, "load_lora_adapter_from_tensors"),
        (Req, "__init__"),
        (UnifiedRadixCache, "write_backup_storage"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back in the end
    return fresh


def request(lora_id: str | None, extra_key: str | None = None) -> Any:
    from array import array

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req(
        "r1",
        "text",
        array("q", range(10)),
        SamplingParams(max_new_tokens=1),
        lora_id=lora_id,
        extra_key=extra_key,
    )


def test_requests_carry_the_content_of_their_adapter(
    hooked: Adapters, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.lora.lora_registry import LoRARef

    ref = LoRARef(lora_id="0123", lora_name="a", lora_path=str(adapter))
    monkeypatch.setattr(sglang_lora, "_launched", lambda: [ref])
    monkeypatch.setattr(sglang_lora, "process_start_time", lambda: time.time() + 60)
    sglang_lora.install({"enable_lora": True, "nnodes": 1})
    assert sglang_lora.hook_problem() is None
    assert hooked.knows("0123")
    found = request("0123", "tenant")
    assert found.extra_key.startswith("tenantlifeboat-adapter:")
    assert request(None, "tenant").extra_key == "tenant"
    assert request(None).extra_key is None
    # One that nobody has looked at.
    assert not Adapters.may_store(request("4567").extra_key)


def test_adapters_are_looked_at_when_they_are_loaded(
    hooked: Adapters, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.lora_registry import LoRARef

    loaded = []
    monkeypatch.setattr(
        LoRAManager, "_load_lora_adapter", lambda self, lora_ref: loaded.append(lora_ref)
    )
    monkeypatch.setattr(
        LoRAManager,
        "load_lora_adapter_from_tensors",
        lambda self, lora_ref, *args: loaded.append(lora_ref),
    )
    monkeypatch.setattr(sglang_lora, "_launched", list)
    sglang_lora.install({"enable_lora": True})
    manager = object.__new__(LoRAManager)
    ref = LoRARef(lora_name="a", lora_path=str(adapter))
    manager._load_lora_adapter(ref)
    made = LoRARef(lora_name="b", lora_path="b")
    manager.load_lora_adapter_from_tensors(made, {}, {})
    assert loaded == [ref, made]
    assert Adapters.may_store(request(ref.lora_id).extra_key)
    assert not Adapters.may_store(request(made.lora_id).extra_key)


def test_pages_of_unknown_adapters_do_not_reach_storage(
    hooked: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    stored = []
    monkeypatch.setattr(
        UnifiedRadixCache, "write_backup_storage", lambda self, node_id: stored.append(node_id)
    )
    monkeypatch.setattr(sglang_lora, "_launched", list)
    sglang_lora.install({"enable_lora": True})

    keys = {1: None, 2: "tenant", 3: "lifeboat-unknown-adapter:x"}

    class Tree:
        def prefetch_anchor_info(self, node_id: int) -> tuple[str | None, str | None]:
            return keys[node_id], None

    cache = object.__new__(UnifiedRadixCache)
    cache.tree_core = Tree()
    for node_id in (1, 2, 3):
        cache.write_backup_storage(node_id)
    assert stored == [1, 2]


def test_an_engine_without_adapters_is_left_alone(hooked: Adapters) -> None:
    from sglang.srt.managers.schedule_batch import Req

    before = Req.__init__
    sglang_lora.install({"enable_lora": False, "lora_paths": None})
    assert Req.__init__ is before


def test_what_is_hooked_is_there(model: Path) -> None:
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
    from sglang.srt.server_args import ServerArgs

    assert callable(UnifiedTreeCore.prefetch_anchor_info)
    assert set(namespace_of(ServerArgs)) > set(sglang_lora._SETTINGS)
