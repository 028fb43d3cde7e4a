"""Our connector in a process that has vLLM and LMCache: identity, refusals, registration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_llama

pytest.importorskip("lmcache")

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm_configs import takes_fp8_kv

from lifeboat_cache.config import load_config
from lifeboat_cache.errors import ConfigError, IdentityError, InterfaceError
from lifeboat_cache.integrations import vllm_connector, vllm_plugin
from lifeboat_cache.integrations.lmcache_identity import read_tag


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    tiny_llama.write(directory)
    return directory


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    # The model was made by this very process, which in an engine would be refused.
    monkeypatch.setattr(vllm_connector, "process_start_time", lambda: None)
    return tmp_path


def configure(checkpoint: Path, **arguments: Any) -> Any:
    transfer = KVTransferConfig(
        kv_connector="LifeboatConnector",
        kv_connector_module_path="lifeboat_cache.integrations.vllm_connector",
        kv_role="kv_both",
        kv_connector_extra_config=arguments.pop("extra", {}),
    )
    arguments.setdefault("kv_transfer_config", transfer)
    return EngineArgs(model=str(checkpoint), **arguments).create_engine_config()


class _Adapter:
    model_name = "a/model"


@pytest.fixture
def connect(home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the connector of a role, without a server; says which ports were asked for."""
    ports: list[int] = []
    monkeypatch.setattr(vllm_connector, "ensure_server", lambda loaded, port: ports.append(port))
    monkeypatch.setattr(vllm_connector, "_keep_server", lambda loaded, port: None)

    def make(config: Any, role: str = "worker") -> Any:
        def start(self: Any, vllm_config: Any, role: str, kv_cache_config: Any = None) -> None:
            setattr(self, f"{role}_adapter", _Adapter())

        monkeypatch.setattr(LMCacheMPConnector, "__init__", start)
        made = vllm_connector.LifeboatConnector(config, role)
        return getattr(made, f"{role}_adapter").model_name, ports

    return make


def test_workers_and_scheduler_tell_the_same_model_and_start_a_server_once_each(
    checkpoint: Path, connect: Any
) -> None:
    config = configure(checkpoint)
    name, ports = connect(config, "worker")
    plain, tag = read_tag(name)
    assert plain == "a/model"
    assert tag is not None
    assert not tag.recurrent
    assert connect(config, "scheduler") == (name, ports)
    assert ports == [6555, 6555]
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert (extra["lmcache.mp.host"], extra["lmcache.mp.port"]) == ("tcp://127.0.0.1", 6555)


def test_a_killed_server_does_not_hold_the_engine_for_minutes(
    checkpoint: Path, connect: Any
) -> None:
    config = configure(checkpoint)
    connect(config)
    # LMCache's 300 s are also vLLM's patience with a worker: the engine ended.
    assert config.kv_transfer_config.kv_connector_extra_config["lmcache.mp.mq_timeout"] <= 30
    config = configure(checkpoint, extra={"lmcache.mp.mq_timeout": 120})
    connect(config)
    assert config.kv_transfer_config.kv_connector_extra_config["lmcache.mp.mq_timeout"] == 120


def test_a_server_elsewhere_is_used_and_none_is_started(checkpoint: Path, connect: Any) -> None:
    elsewhere = {"lmcache.mp.host": "tcp://10.1.2.3", "lmcache.mp.port": 7000}
    config = configure(checkpoint, extra=dict(elsewhere))
    assert connect(config)[1] == []
    assert config.kv_transfer_config.kv_connector_extra_config == elsewhere


@pytest.mark.parametrize(
    "other",
    [{"dtype": "float16"}, {"max_model_len": 64}, {"kv_cache_dtype": "fp8"}, {"block_size": 32}],
    ids=str,
)
def test_what_decides_the_kv_decides_the_name(
    checkpoint: Path, connect: Any, other: dict[str, Any]
) -> None:
    if other.get("kv_cache_dtype") == "fp8" and not takes_fp8_kv():
        pytest.skip("vLLM takes no fp8 KV on this processor")
    alike = connect(configure(checkpoint))[0]
    assert connect(configure(checkpoint))[0] == alike
    try:
        config = configure(checkpoint, **other)
    except (ValueError, NotImplementedError) as error:
        pytest.skip(f"vLLM refuses {other} here: {error}")
    different = "max_model_len" not in other
    assert (connect(config)[0] != alike) is different


def test_the_salt_and_the_weights_are_part_of_it(
    checkpoint: Path, connect: Any, home: Path, tmp_path: Path
) -> None:
    alike = connect(configure(checkpoint))[0]
    other = tmp_path / "other"
    other.mkdir()
    tiny_llama.write(other)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    assert connect(configure(other))[0] != alike
    (home / "lifeboat.yaml").write_text('security: {namespace_salt: "s"}\n')
    (home / "lifeboat.yaml").chmod(0o600)
    assert connect(configure(checkpoint))[0] != alike


def test_lora_is_refused(checkpoint: Path, connect: Any) -> None:
    config = configure(checkpoint)
    config.lora_config = SimpleNamespace()
    with pytest.raises(ConfigError, match="LoRA"):
        connect(config)


def test_another_vllm_is_refused(
    checkpoint: Path, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.40.1")
    with pytest.raises(InterfaceError, match=r"this is 0\.40\.1: use engine\.vllm_mode native"):
        connect(configure(checkpoint))


def test_an_engine_that_was_switched_on_starts_even_if_it_cannot_be_identified(
    checkpoint: Path, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise IdentityError("the model's files have changed: restart the engine")

    monkeypatch.setattr(vllm_connector, "engine_tag", fail)
    with pytest.raises(IdentityError):
        connect(configure(checkpoint))
    config = configure(checkpoint, extra={vllm_connector.ACTIVATED: True})
    first, second = connect(config)[0], connect(config)[0]
    assert first != second  # it finds nothing, its own included


def test_vllm_knows_the_connector_by_its_name(home: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    vllm_plugin._offer_connector()
    vllm_plugin._offer_connector()
    made = KVConnectorFactory.get_connector_class_by_name("LifeboatConnector")
    assert made is vllm_connector.LifeboatConnector


def test_the_launch_finds_out_what_would_fail_later(
    checkpoint: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(checkpoint)
    started: list[int] = []
    monkeypatch.setattr(vllm_connector, "ensure_server", lambda loaded, port: started.append(port))
    vllm_connector.prepare(config, load_config())
    assert started == [6555]
    config.lora_config = SimpleNamespace()
    with pytest.raises(ConfigError):
        vllm_connector.prepare(config, load_config())
    assert started == [6555]
