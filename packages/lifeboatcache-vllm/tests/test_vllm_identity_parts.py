"""Parts of the engine's identity that need no vLLM: selection, cleaning, standing down."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.integrations import vllm_identity, vllm_lora
from lifeboat_cache.integrations.vllm_identity import (
    standdown_reason,
    unverified_identity,
    version_for_identity,
)
from lifeboat_cache.integrations.vllm_identity_fields import FieldRule, select_fields
from lifeboat_cache.integrations.vllm_identity_model import effective_config, length_matters


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", "0.32"),
        ("0.32.11", "0.32"),
        ("v0.33.1.post2", "0.33"),
        ("0.32.0+cu129.torch2.13", "0.32"),
        ("0.33.0rc1", "0.33.0rc1"),
        ("0.33.1.dev7+gabc123", "0.33.1.dev7+gabc123"),
        ("dev", "dev"),
    ],
)
def test_minor_releases_share_and_development_builds_do_not(version: str, expected: str) -> None:
    assert version_for_identity(version) == expected


# Configuration objects --------------------------------------------------------


@dataclasses.dataclass
class FutureConfig:
    kept: int = 1
    ignored: int = 2
    new: int = 3
    new_list: list[int] = dataclasses.field(default_factory=list)
    _private: int = 4


RULE = FieldRule(frozenset({"kept", "gone"}), frozenset({"ignored"}))


def test_a_field_that_the_adapter_does_not_know_counts_unless_at_its_default() -> None:
    assert select_fields(FutureConfig(), RULE, "c") == {"kept": 1}
    assert select_fields(FutureConfig(ignored=9, _private=9), RULE, "c") == {"kept": 1}
    assert select_fields(FutureConfig(new=4, new_list=[1]), RULE, "c") == {
        "kept": 1,
        "unclassified": {"new": 4, "new_list": [1]},
    }


def test_an_object_without_fields_is_taken_by_its_attributes() -> None:
    assert select_fields(SimpleNamespace(kept=1, other="x"), RULE, "c") == {
        "kept": 1,
        "unclassified": {"other": "x"},
    }
    assert select_fields(None, RULE, "c") == {}


def test_an_unknown_value_without_a_spelling_is_refused_by_name() -> None:
    with pytest.raises(IdentityError, match=r"cache_config\.new"):
        select_fields(SimpleNamespace(new=object()), RULE, "cache_config")


class HfConfig:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


def test_what_says_nothing_about_kv_is_removed_where_models_are_described_only() -> None:
    config = HfConfig(
        model_type="m",
        dtype="bfloat16",
        _name_or_path="/models/a",
        transformers_version="5.0",
        rope_parameters={"rope_type": "yarn", "factor": 2.0},
        text_config={"model_type": "t", "torch_dtype": "float16", "hidden_size": 8},
        quantization_config={"weights": {"dtype": "fp8_e4m3"}},
        auto_map={"AutoConfig": "org/name--configuration_m.MConfig", "AutoModel": ["a--b", None]},
    )
    assert effective_config(config) == {
        "model_type": "m",
        "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
        "text_config": {"model_type": "t", "hidden_size": 8},
        "quantization_config": {"weights": {"dtype": "fp8_e4m3"}},
        "auto_map": {"AutoConfig": "configuration_m.MConfig", "AutoModel": ["b", None]},
    }


def test_a_configuration_that_cannot_describe_itself_is_taken_by_its_attributes() -> None:
    class Broken:
        def __init__(self) -> None:
            self.hidden_size = 8

        def to_dict(self) -> dict[str, Any]:
            raise TypeError("cannot copy")

    assert effective_config(Broken()) == {"hidden_size": 8}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, False),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, False),
        ({"rope_parameters": {"rope_type": "llama3"}, "type": "anything"}, False),
        ({"quantization_config": {"type": "int8"}}, False),
        ({}, False),
        ({"rope_scaling": {"type": "su"}}, True),
        ({"rope_parameters": {"rope_type": "longrope"}}, True),
        ({"text_config": {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}}, True),
        ({"rope_parameters": {"rope_type": "of the future"}}, True),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, True),
    ],
)
def test_when_the_longest_context_decides_kv(config: dict[str, Any], expected: bool) -> None:
    assert length_matters(config) is expected


def tensors(*places: tuple[list[str], int, int, int]) -> Any:
    return SimpleNamespace(
        kv_cache_tensors=[
            SimpleNamespace(layers=layers, offset=offset, layer_stride=stride, block_stride=block)
            for layers, offset, stride, block in places
        ]
    )


def test_placement_does_not_depend_on_memory_but_on_order_aliases_and_packing() -> None:
    def place(blocks: int, names: list[str]) -> Any:
        return vllm_identity._placement(tensors((names, 0, 64 * blocks, 64)))

    assert place(10, ["a", "b"]) == place(1000, ["a", "b"])
    assert place(10, ["a", "b"]) != place(10, ["b", "a"])
    aliased = vllm_identity._placement(tensors((["a"], 0, 640, 64), (["b"], 0, 640, 64)))
    assert aliased != place(10, ["a", "b"])
    packed = vllm_identity._placement(tensors((["a", "b"], 0, 64, 128)))
    spaced = vllm_identity._placement(tensors((["a", "b"], 0, 96, 192)))
    assert len({str(value) for value in (packed, spaced, place(10, ["a", "b"]))}) == 3


# Without an engine -------------------------------------------------------------


def offloading(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "groups": (SimpleNamespace(tokens_per_block=16, layer_names=("l0",), group_id=0),),
        "worker_kv_bytes_per_block": 4096,
        "model": SimpleNamespace(name="m", dtype="bfloat16"),
        "cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        "engine_id": "e",
        "extra_config": {},
        **changes,
    }
    return SimpleNamespace(**values)


def test_an_unverified_model_is_marked_and_known_by_what_there_is() -> None:
    base = unverified_identity(offloading(), "", "0.32.0")
    assert base["kind"] == "vllm-unverified-model"
    assert base["model"] == "unverified-model"
    assert base == unverified_identity(offloading(engine_id="other"), "", "0.32.5")
    others = [
        unverified_identity(offloading(), "salt", "0.32.0"),
        unverified_identity(offloading(), "", "0.33.0"),
        unverified_identity(
            offloading(model=SimpleNamespace(name="n", dtype="bfloat16")), "", "0.32.0"
        ),
        unverified_identity(
            offloading(cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2)), "", "0.32.0"
        ),
        unverified_identity(offloading(canonical_layout=True), "", "0.32.0"),
    ]
    assert all(other != base for other in others)


def test_the_salt_itself_is_not_in_the_document() -> None:
    assert "hunter2" not in str(unverified_identity(offloading(), "hunter2", "0.32.0"))


# Standing down ------------------------------------------------------------------


def engine(**changes: Any) -> Any:
    model = SimpleNamespace(
        model="org/name",
        model_weights="",
        is_encoder_decoder=False,
        architecture="A",
        registry=None,
    )
    values: dict[str, Any] = {
        "cache_config": SimpleNamespace(
            enable_prefix_caching=True, prefix_caching_hash_algo="sha256"
        ),
        "parallel_config": SimpleNamespace(
            nnodes_within_dp=1, world_size=1, distributed_executor_backend="mp"
        ),
        "load_config": SimpleNamespace(load_format="auto"),
        "model_config": model,
        "diffusion_config": None,
        "speculative_config": None,
        "lora_config": None,
    }
    for name, value in changes.items():
        if isinstance(value, dict):
            values[name] = SimpleNamespace(**{**vars(values[name]), **value})
        else:
            values[name] = value
    return SimpleNamespace(**values)


def two_workers() -> Any:
    return offloading(
        parallel=SimpleNamespace(world_size=2, tp_size=2, pp_size=1, pcp_size=1, dcp_size=1)
    )


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)


def test_an_ordinary_engine_does_not_stand_down() -> None:
    assert standdown_reason(engine(), offloading()) is None
    assert standdown_reason(None, offloading()) is None
    several = engine(parallel_config={"world_size": 2})
    assert standdown_reason(several, two_workers()) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache_config": {"enable_prefix_caching": False}}, "--no-enable-prefix-caching"),
        ({"cache_config": {"prefix_caching_hash_algo": "xxhash"}}, "use sha256"),
        ({"cache_config": {"prefix_caching_hash_algo": "xxhash_cbor"}}, "PYTHONHASHSEED"),
        ({"load_config": {"load_format": "tensorizer"}}, "--load-format auto"),
        ({"load_config": {"load_format": "somebody's"}}, "does not know"),
        ({"model_config": {"model": "s3://bucket/m"}}, "local directory"),
        ({"model_config": {"model_weights": "gs://bucket/m"}}, "local directory"),
        ({"model_config": {"is_encoder_decoder": True}}, "encoder"),
        ({"diffusion_config": object()}, "diffusion"),
        ({"parallel_config": {"nnodes_within_dp": 2}}, "several hosts"),
    ],
)
def test_it_stands_down_with_a_reason(changes: dict[str, Any], words: str) -> None:
    reason = standdown_reason(engine(**changes), offloading())
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize("backend", ["ray", "external_launcher"])
def test_workers_that_may_be_elsewhere_stand_down(backend: str) -> None:
    parallel = {"world_size": 2, "distributed_executor_backend": backend}
    reason = standdown_reason(engine(parallel_config=parallel), two_workers())
    assert reason is not None
    assert "mp" in reason
    alone = {"distributed_executor_backend": backend}
    assert standdown_reason(engine(parallel_config=alone), offloading()) is None


def test_a_disagreement_about_workers_stands_down() -> None:
    assert standdown_reason(engine(), two_workers()) is not None


def test_seeded_hashes_are_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    changed = engine(cache_config={"prefix_caching_hash_algo": "xxhash"})
    assert standdown_reason(changed, offloading()) is None


def test_a_draft_model_that_cannot_be_identified_stands_down() -> None:
    draft = SimpleNamespace(
        draft_model_config=SimpleNamespace(model="s3://x/y", model_weights=""),
        draft_load_config=None,
    )
    assert standdown_reason(engine(speculative_config=draft), offloading()) is not None


def test_adapters_without_the_hooks_stand_down(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = engine(lora_config=SimpleNamespace())
    monkeypatch.setattr(vllm_lora, "_hook_problem", "no hook")
    assert standdown_reason(serving, offloading()) is not None
    monkeypatch.setattr(vllm_lora, "_hook_problem", None)
    assert standdown_reason(serving, offloading()) is None


def test_models_whose_weights_are_scattered_stand_down() -> None:
    registry = SimpleNamespace(
        models={"A": SimpleNamespace(module_name="vllm.model_executor.models.ultravox")}
    )
    reason = standdown_reason(engine(model_config={"registry": registry}), offloading())
    assert reason is not None
    assert "ultravox" in reason
    registry.models["A"] = SimpleNamespace(module_name="vllm.models.flint.nvidia.model")
    assert standdown_reason(engine(model_config={"registry": registry}), offloading()) is not None
