"""The passive hook that hands an engine's configuration to the tier."""

from __future__ import annotations

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
from lifeboat_cache.integrations.vllm_handover import (
    LEAST_CHUNKS,
    blocks_per_chunk,
    fitting_chunk,
)


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
    ("blocks", "block_bytes", "cpu_bytes", "expected"),
    [
        (16, 1 << 20, 20 << 30, (16, 20 << 30)),
        (16, 40 << 20, 4 << 30, (6, 4 << 30)),
        (16, 100 << 20, 256 << 20, (1, 256 << 20)),
        (16, 300 << 20, 256 << 20, (1, 600 << 20)),
        (2, 5000, 1, (1, 2 * 8192)),
        (2, 0, 256 << 20, (2, 256 << 20)),
    ],
)
def test_a_small_cpu_tier_holds_some_chunks(
    blocks: int, block_bytes: int, cpu_bytes: int, expected: tuple[int, int]
) -> None:
    assert fitting_chunk(blocks, block_bytes, cpu_bytes) == expected


def test_vllm_starts_with_chunks_larger_than_the_cpu_tier(
    created: list[Any], tmp_path: Path
) -> None:
    # vLLM cannot map a region without a single chunk.
    tiny_llama.write(tmp_path)
    small = {"cpu_bytes_to_use": 1 << 15, "lifeboat_chunk_tokens": 1024, "secondary_tiers": []}
    handed = hand_over(tmp_path, extra=small)
    extra = handed.vllm_config.kv_transfer_config.kv_connector_extra_config
    KVConnectorFactory.create_connector(handed.vllm_config, "r", handed.kv_cache_config)
    assert extra["blocks_per_chunk"] == 1
    spec = OffloadingSpecFactory.create_spec(
        build_offloading_config(handed.vllm_config, handed.kv_cache_config)
    )
    assert 0 < spec.num_chunks < LEAST_CHUNKS


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
