"""The passive hook that hands an engine's configuration to the tier."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_llama
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm_configs import hand_over

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.integrations import vllm_handover, vllm_namespace
from lifeboat_cache.integrations.vllm_handover import blocks_per_chunk


def spec(block_size: int, kind: str = "FullAttentionSpec") -> Any:
    return type(kind, (), {"block_size": block_size})()


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([spec(16)], 16),
        ([spec(128)], 2),
        ([spec(256)], 1),
        ([spec(400)], 1),
        ([spec(48)], 5),
        ([spec(16), spec(64, "SlidingWindowSpec")], 4),
        ([spec(16), spec(16, "MambaSpec")], 1),
        ([], 1),
    ],
)
def test_chunks_have_about_as_many_tokens_as_asked_for(specs: list[Any], expected: int) -> None:
    assert blocks_per_chunk(256, specs) == expected


@pytest.mark.parametrize(
    ("sizes", "interval", "expected"),
    [
        ([16], 0, 16),
        ([16], 4096, 16),
        ([16], 1008, 9),
        ([16], 16 * 67, 1),
        ([16, 64], 320, 1),
        ([16, 64], 512, 4),
    ],
)
def test_chunks_divide_the_retention_interval(
    sizes: list[int], interval: int, expected: int
) -> None:
    # vLLM refuses to start otherwise.
    assert blocks_per_chunk(256, [spec(size) for size in sizes], interval) == expected


def test_the_worker_and_the_engine_core_agree_on_recurrent_layers() -> None:
    layers = {"a": spec(16, "MambaSpec"), "b": spec(16, "MambaSpec")}
    of_worker = type("UniformTypeKVCacheSpecs", (), {"block_size": 16, "kv_cache_specs": layers})
    assert blocks_per_chunk(256, [of_worker()]) == blocks_per_chunk(256, [layers["a"]]) == 1


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches vLLM's own factory through the hook."""
    seen: list[Any] = []

    def create_connector(cls: Any, config: Any, role: Any, kv_cache_config: Any = None) -> str:
        seen.append((config, role, kv_cache_config))
        return "connector"

    monkeypatch.setattr(KVConnectorFactory, "create_connector", classmethod(create_connector))
    vllm_handover.install()
    vllm_handover.install()
    return seen


def engine(engine_id: str, **extra: Any) -> Any:
    extra = {"secondary_tiers": [], **extra}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id=engine_id, kv_connector_extra_config=extra),
        lora_config=None,
    )


@pytest.mark.parametrize("by_keyword", [True, False])
def test_the_configuration_reaches_the_tier_and_the_factory(
    created: list[Any], by_keyword: bool
) -> None:
    config = engine(f"handover-{by_keyword}")
    cache = SimpleNamespace(kv_cache_groups=[])
    if by_keyword:
        made = KVConnectorFactory.create_connector(config=config, role="r", kv_cache_config=cache)
    else:
        made = KVConnectorFactory.create_connector(config, "r", cache)
    assert made == "connector"
    assert created == [(config, "r", cache)]
    handed = vllm_handover.engine_config(f"handover-{by_keyword}")
    assert handed is not None
    assert handed.vllm_config is config
    assert handed.kv_cache_config is cache


def test_the_chunk_size_becomes_blocks(created: list[Any]) -> None:
    config = engine("chunks", lifeboat_chunk_tokens=256)
    extra = {"secondary_tiers": [], "blocks_per_chunk": 16}
    groups = [SimpleNamespace(kv_cache_spec=spec(16))]
    KVConnectorFactory.create_connector(config, "r", SimpleNamespace(kv_cache_groups=groups))
    assert config.kv_transfer_config.kv_connector_extra_config == extra
    # The worker of the same process finds it done.
    KVConnectorFactory.create_connector(config, "r", SimpleNamespace(kv_cache_groups=groups))
    assert config.kv_transfer_config.kv_connector_extra_config == extra


@pytest.mark.parametrize(
    ("most", "interval", "expected"), [(None, 0, 16), (20, 0, 16), (11, 0, 11), (11, 4096, 8)]
)
def test_chunks_have_at_most_so_many_blocks(most: int | None, interval: int, expected: int) -> None:
    assert blocks_per_chunk(256, [spec(16)], interval, most) == expected


def chosen(tmp_path: Path, **extra: Any) -> dict[str, Any]:
    """What a launch with vLLM's real configuration ends with."""
    tiny_llama.write(tmp_path)
    handed = hand_over(
        tmp_path, extra={"lifeboat_chunk_tokens": 1024, "secondary_tiers": [], **extra}
    )
    KVConnectorFactory.create_connector(handed.vllm_config, "r", handed.kv_cache_config)
    found: dict[str, Any] = handed.vllm_config.kv_transfer_config.kv_connector_extra_config
    offloading = build_offloading_config(handed.vllm_config, handed.kv_cache_config)
    assert OffloadingSpecFactory.create_spec(offloading).num_chunks > 0
    return found


def test_the_memory_at_a_start_does_not_change_the_chunk(
    created: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Its size is part of the identity: what was stored before would not be found again.
    plenty = chosen(tmp_path, cpu_bytes_to_use=1 << 30)
    assert plenty["blocks_per_chunk"] > 4  # of 1,024 tokens
    assert plenty["cpu_bytes_to_use"] == 1 << 30
    logger = logging.getLogger("lifeboat_cache")
    logger.addHandler(caplog.handler)
    try:
        little = chosen(tmp_path, cpu_bytes_to_use=1 << 15)  # vLLM cannot map a region of none
    finally:
        logger.removeHandler(caplog.handler)
    assert little["blocks_per_chunk"] == plenty["blocks_per_chunk"]
    assert little["cpu_bytes_to_use"] > 1 << 15
    assert "holds only 2 chunks" in caplog.text


def test_a_chunk_is_not_larger_than_its_bound(
    created: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = chosen(tmp_path, cpu_bytes_to_use=1 << 15)
    size = two["cpu_bytes_to_use"] // (2 * two["blocks_per_chunk"])
    monkeypatch.setattr(vllm_handover, "MOST_CHUNK_BYTES", 3 * size + 1)
    assert chosen(tmp_path, cpu_bytes_to_use=1 << 30)["blocks_per_chunk"] == 3
    monkeypatch.setattr(vllm_handover, "MOST_CHUNK_BYTES", 1)
    assert chosen(tmp_path, cpu_bytes_to_use=1 << 30)["blocks_per_chunk"] == 1


def test_a_tier_inside_another_connector_is_known(created: list[Any]) -> None:
    config = engine("several")
    tiers = {"secondary_tiers": [{"type": "LifeboatTier"}]}
    inner = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": tiers}
    config.kv_transfer_config.kv_connector_extra_config = {"connectors": [inner]}
    KVConnectorFactory.create_connector(config, "r", None)
    handed = vllm_handover.engine_config("several")
    assert handed is not None
    assert handed.vllm_config is config


def test_other_connectors_are_left_alone(created: list[Any]) -> None:
    config = engine("other", block_size=64, something=1)
    extra = config.kv_transfer_config.kv_connector_extra_config
    del extra["secondary_tiers"]
    KVConnectorFactory.create_connector(config, "r", None)
    assert extra == {"block_size": 64, "something": 1}
    assert vllm_handover.engine_config("other") is None
    KVConnectorFactory.create_connector(SimpleNamespace(), "r", None)
    assert len(created) == 2


def test_an_engine_without_the_plugin_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM has loaded its plugins, and ours was not among them: nobody knows the weights.
    monkeypatch.setattr(vllm_namespace, "_inside_engine", lambda: True)
    offloading = SimpleNamespace(engine_id="never seen")
    with pytest.raises(IdentityError, match="VLLM_PLUGINS"):
        vllm_namespace.find_namespace(offloading, "", 4096, lambda: False)
