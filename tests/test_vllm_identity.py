"""The identity of real vLLM configurations: what shares KV and what does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_llama

pytest.importorskip("vllm")

from vllm_configs import Handed, hand_over, takes_fp8_kv

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.integrations import (
    vllm_epoch,
    vllm_identity_fields,
    vllm_lora,
    vllm_standdown,
)
from lifeboat_cache.integrations.vllm_identity import identify_engine, unverified_identity
from lifeboat_cache.namespace import Namespace, canonical_json

pytestmark = pytest.mark.engine

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 2}


def name(handed: Handed, *, salt: str = "", version: str = "0.32.0") -> Namespace:
    identity, display = identify_engine(
        handed.vllm_config,
        handed.kv_cache_config,
        handed.offloading_config,
        salt=salt,
        engine_version=version,
    )
    return Namespace.from_identity(identity, display)


def digest(model: Path, **options: Any) -> str:
    salt, version = options.pop("salt", ""), options.pop("version", "0.32.0")
    return name(hand_over(model, **options), salt=salt, version=version).hex


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write(tmp_path_factory.mktemp("models") / "draft", layers=1, seed=7)


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    return digest(model)


# What never shares --------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"block_size": 32},
        {"extra": {"blocks_per_chunk": 2}},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"load_format": "dummy"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        {"hf_overrides": {"rms_norm_eps": 1e-6}},
        {"speculative_config": NGRAM},
        {"salt": "tenant"},
        {"version": "0.33.0"},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
def test_another_engine_never_shares(model: Path, expected: str, options: dict[str, Any]) -> None:
    if options.get("kv_cache_dtype") == "fp8" and not takes_fp8_kv():
        pytest.skip("vLLM takes no fp8 KV on this processor")
    assert digest(model, **options) != expected


def test_all_of_them_differ_from_each_other(model: Path) -> None:
    scaled = {"rope_theta": 1e4, "rope_type": "linear"}
    found = [
        digest(model, **options)
        for options in (
            {},
            {"tensor_parallel_size": 2},
            {"pipeline_parallel_size": 2},
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            {"hf_overrides": {"rope_parameters": {**scaled, "factor": 2.0}}},
            {"hf_overrides": {"rope_parameters": {**scaled, "factor": 4.0}}},
            {"salt": "one"},
            {"salt": "other"},
        )
    ]
    assert len(set(found)) == len(found)


def test_another_checkpoint_at_the_same_path_never_shares(tmp_path: Path) -> None:
    weights = tiny_llama.tensors()
    first = digest(tiny_llama.write(tmp_path, weights=weights))
    tensor = "model.layers.1.self_attn.k_proj.weight"
    weights[tensor] = tiny_llama.tensors(seed=1)[tensor]
    assert digest(tiny_llama.write(tmp_path, weights=weights)) != first


def test_a_changed_rope_factor_at_the_same_path_never_shares(tmp_path: Path) -> None:
    found = [
        digest(tiny_llama.write(tmp_path, rope_scaling={"rope_type": "linear", "factor": factor}))
        for factor in (2.0, 2.5)
    ]
    assert found[0] != found[1]


def test_speculative_decoding_on_or_off_never_shares(
    model: Path, draft: Path, expected: str, tmp_path: Path
) -> None:
    with_draft = digest(model, speculative_config={**DRAFT, "model": str(draft)})
    other_draft = tiny_llama.write(tmp_path / "draft", layers=1, seed=8)
    found = {
        expected,
        digest(model, speculative_config=NGRAM),
        with_draft,
        digest(model, speculative_config={**DRAFT, "model": str(other_draft)}),
        digest(
            model,
            speculative_config={**DRAFT, "model": str(draft), "num_speculative_tokens": 3},
        ),
    }
    assert len(found) == 5
    moved = tiny_llama.write(tmp_path / "moved", layers=1, seed=7)
    assert digest(model, speculative_config={**DRAFT, "model": str(moved)}) == with_draft


def test_a_variable_that_changes_numbers_counts(
    model: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "3")
    assert digest(model) == expected
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "medium")
    namespace = name(hand_over(model))
    assert namespace.hex != expected
    assert namespace.identity["environment"]["VLLM_FLOAT32_MATMUL_PRECISION"] == "medium"


def test_how_far_ngrams_look_does_not_count(model: Path) -> None:
    more = {**NGRAM, "num_speculative_tokens": 4, "prompt_lookup_max": 5}
    assert digest(model, speculative_config=NGRAM) == digest(model, speculative_config=more)


def test_processor_settings_count_for_multimodal_models_only(model: Path, expected: str) -> None:
    settings = model / "preprocessor_config.json"
    settings.write_text('{"size": 336}')
    try:
        assert digest(model) == expected
    finally:
        settings.unlink()


def test_code_that_a_trusted_model_brings_counts(model: Path, expected: str) -> None:
    assert digest(model, trust_remote_code=True) == expected
    code = model / "modeling_tiny.py"
    code.write_text("scale = 1")
    try:
        assert digest(model) == expected, "it is not run"
        first = digest(model, trust_remote_code=True)
        code.write_text("scale = 2")
        assert len({expected, first, digest(model, trust_remote_code=True)}) == 3
    finally:
        code.unlink()


def test_the_longest_context_counts_where_it_changes_the_rotary_embedding(
    model: Path, expected: str, tmp_path: Path
) -> None:
    assert digest(model, max_model_len=512) == expected
    half = tiny_llama.HEAD_SIZE // 2
    longrope = tiny_llama.write(
        tmp_path,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * half,
            "long_factor": [2.0] * half,
            "original_max_position_embeddings": 512,
            "factor": 4.0,
        },
    )
    assert digest(longrope, max_model_len=512) != digest(longrope, max_model_len=1024)


def test_an_unverified_model_never_shares_with_an_identified_one(model: Path) -> None:
    handed = hand_over(model)
    identified = name(handed)
    unverified = unverified_identity(handed.offloading_config, "", "0.32.0")
    assert unverified["kind"] != identified.identity["kind"]
    assert Namespace.from_identity(unverified) != identified


# What shares --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"served_model_name": "another"},
        {"seed": 5},
        {"memory": 1 << 27},
        {"gpu_memory_utilization": 0.5},
        {"max_num_seqs": 8},
        {"extra": {"cpu_bytes_to_use": 1 << 27, "secondary_tiers": []}},
        {"hf_overrides": {"tie_word_embeddings": False}},
        {"enable_lora": True},
        {"version": "0.32.4"},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
def test_what_does_not_change_kv_shares(
    model: Path, expected: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_lora, "_hook_problem", None)
    assert digest(model, **options) == expected


def test_the_same_files_at_another_path_share(expected: str, tmp_path: Path) -> None:
    assert digest(tiny_llama.write(tmp_path / "elsewhere" / "copy")) == expected
    assert digest(tiny_llama.write(tmp_path / "resharded", shards=3)) == expected


def test_a_hub_snapshot_shares_with_the_directory(
    model: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--tiny"
    tiny_llama.write(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    handed = hand_over(repository / "snapshots" / commit)
    # vLLM's configuration of a Hub id differs in name and revision only.
    handed.vllm_config.model_config.model = "org/tiny"
    handed.vllm_config.load_config.download_dir = str(tmp_path)
    namespace = name(handed)
    assert namespace.hex == expected
    assert namespace.display["model"] == "org/tiny"
    handed.vllm_config.model_config.revision = "absent"
    with pytest.raises(IdentityError, match="absent"):
        name(handed)


def test_another_data_parallel_rank_shares(model: Path) -> None:
    found = []
    for rank in (0, 1):
        handed = hand_over(model, data_parallel_size=2)
        parallel = handed.vllm_config.parallel_config
        # As the engine core of that rank does it.
        parallel.data_parallel_index = parallel.data_parallel_rank = rank
        parallel.data_parallel_rank_local = rank
        handed.vllm_config.kv_transfer_config.engine_id = f"engine_dp{rank}"
        found.append(name(handed).hex)
    assert found[0] == found[1]


def test_another_process_finds_the_same(model: Path, expected: str) -> None:
    code = (
        "import sys; from pathlib import Path; import test_vllm_identity; "
        "print('digest', test_vllm_identity.digest(Path(sys.argv[1])))"
    )
    places = [str(Path(__file__).parent), *(path for path in sys.path if path)]
    output = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places), "PYTHONHASHSEED": "12345"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert re.findall(r"^digest (\w+)$", output, re.MULTILINE) == [expected]


def test_the_document_can_be_read_and_kept(model: Path) -> None:
    namespace = name(hand_over(model), salt="hunter2")
    text = namespace.to_json()
    assert Namespace.from_json(text) == namespace
    document = json.loads(text)
    assert document["identity"]["model"]["config"]["rope_parameters"]["rope_theta"] == 10000.0
    assert document["display"]["model"] == str(model)
    assert str(model) not in canonical_json(document["identity"]).decode()
    assert "hunter2" not in text


# Standing down ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_prefix_caching": False}, "prefix caching is off"),
        ({"prefix_caching_hash_algo": "xxhash_cbor"}, "sha256"),
        ({"enable_lora": True}, "adapters"),
    ],
)
def test_engines_that_cannot_share_say_why(
    model: Path, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(vllm_lora, "_hook_problem", "no hook")
    with pytest.raises(IdentityError, match=words):
        digest(model, **options)


def test_weights_that_changed_after_the_start_are_refused(model: Path) -> None:
    handed = hand_over(model)
    with pytest.raises(IdentityError, match="restart the engine"):
        identify_engine(
            handed.vllm_config,
            handed.kv_cache_config,
            handed.offloading_config,
            salt="",
            engine_version="0.32.0",
            not_after=(model / "model.safetensors").stat().st_mtime - 60,
        )


# What this vLLM has that the adapter must know ------------------------------------


def test_every_field_of_the_configuration_is_classified() -> None:
    from vllm.config import (
        AttentionConfig,
        CacheConfig,
        LoRAConfig,
        ModelConfig,
        MultiModalConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.config.mamba import MambaConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    rules = vllm_identity_fields
    for config_class, rule in (
        (AttentionConfig, rules.ATTENTION),
        (CacheConfig, rules.CACHE),
        (KVCacheConfig, rules.KV_CACHE),
        (KVCacheGroupSpec, rules.KV_GROUP),
        (LoRAConfig, rules.LORA),
        (MambaConfig, rules.MAMBA),
        (ModelConfig, rules.MODEL),
        (MultiModalConfig, rules.MULTIMODAL),
        (ParallelConfig, rules.PARALLEL),
        (SpeculativeConfig, rules.DRAFT),
        (VllmConfig, rules.ENGINE),
    ):
        assert rules.unclassified(config_class, rule) == [], config_class.__name__
        assert not rule.kept & rule.ignored, config_class.__name__


def test_every_model_that_loads_weights_from_elsewhere_is_known() -> None:
    import vllm

    root = Path(vllm.__file__).parent
    found = set()
    for directory in (root / "model_executor" / "models", root / "models"):
        for path in directory.rglob("*.py"):
            if re.search(r"secondary_weights = |allow_patterns_overrides = ", path.read_text()):
                parts = path.relative_to(directory).with_suffix("").parts
                found.add(parts[0])
    known = vllm_standdown._SCATTERED_WEIGHTS | vllm_standdown._SCATTERED_HEADS
    assert found <= known


# The hooks on the real classes ------------------------------------------------------


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Both hooks on vLLM's own classes, taken off afterwards."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
    from vllm.v1.engine.core import EngineCore

    for method in (*vllm_epoch._REASONS, "add_lora"):
        monkeypatch.setattr(EngineCore, method, getattr(EngineCore, method))
    monkeypatch.setattr(scheduler, "_create_req_context", scheduler._create_req_context)
    monkeypatch.setattr(vllm_lora, "_hook_problem", None)
    monkeypatch.setattr(vllm_lora, "_watch", vllm_lora.AdapterWatch())
    reasons: list[str] = []
    monkeypatch.setattr(vllm_epoch, "_listeners", [])
    monkeypatch.setattr(vllm_epoch, "_has_changed", False)
    vllm_epoch.on_change(reasons.append)
    vllm_lora.install()
    return reasons


class _Executor:
    """Answers what the engine core asks its workers."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        self.calls.append(method)
        return [None]

    def add_lora(self, lora_request: Any) -> bool:
        self.calls.append(lora_request)
        return True


def _core() -> Any:
    from vllm.v1.engine.core import EngineCoreProc

    core = object.__new__(EngineCoreProc)
    core.model_executor = _Executor()
    core.scheduler = object()
    return core


def test_utility_calls_of_the_real_engine_core_are_watched(hooked: list[str]) -> None:
    core = _core()
    core.collective_rpc("compute_weight_checksums")
    assert hooked == []
    # By position, as the client's message is unpacked.
    core.collective_rpc(*core._convert_msgspec_args(core.collective_rpc, ("update_weights", None)))
    core.set_weight_version("7")
    assert hooked == ["collective_rpc update_weights", "weight version 7"]
    assert core.model_executor.calls == ["compute_weight_checksums", "update_weights"]


def test_adapter_messages_are_still_unpacked_by_type(hooked: list[str], tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    core = _core()
    # msgspec sends the struct as an array.
    (request,) = core._convert_msgspec_args(core.add_lora, (["a", 1, str(tmp_path)],))
    assert isinstance(request, LoRARequest)
    assert core.add_lora(request) is True
    assert ("a", str(tmp_path)) in vllm_lora.watch()._adapters
    assert hooked == []


@pytest.mark.parametrize("adapter", [False, True])
def test_real_requests_carry_their_adapter(
    hooked: list[str], tmp_path: Path, adapter: bool
) -> None:
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    create: Callable[[Any], Any] = scheduler._create_req_context
    request = Request(
        "r",
        [1, 2, 3],
        SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest("a", 1, str(tmp_path)) if adapter else None,
    )
    context = create(request)
    assert context.req_id == "r"
    assert vllm_lora.lora_of(context) == (str(tmp_path) if adapter else None)
    if not adapter:
        assert vllm_lora.watch().key_space(context) == b""
