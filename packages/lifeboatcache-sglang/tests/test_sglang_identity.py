"""What names a rank's namespace."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.integrations import sglang_identity
from lifeboat_cache.integrations import sglang_identity_fields as fields
from lifeboat_cache.interface import Namespace

Identify = Callable[..., Namespace]


class _Config:
    """As SGLang's ``HiCacheStorageConfig``."""

    def __init__(self, **changes: Any) -> None:
        self.tp_rank, self.tp_size, self.pp_rank, self.pp_size = 0, 1, 0, 1
        self.attn_cp_rank, self.attn_cp_size, self.dcp_rank, self.dcp_size = 0, 1, 0, 1
        self.dp_rank, self.is_mla_model, self.model_name = 0, False, "org/tiny"
        vars(self).update(changes)


@pytest.fixture
def identify(model: Path, monkeypatch: pytest.MonkeyPatch) -> Identify:
    """A function that names the namespace of a launch, with some settings changed."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr(sglang_identity, "process_start_time", time.time)
    resolved = get_context().resolved_server_args_dict()

    def find(salt: str = "", config: _Config | None = None, **settings: Any) -> Namespace:
        return sglang_identity._identify(
            {**resolved, **settings},
            namespace_of(ServerArgs),
            sglang_identity._defaults(ServerArgs),
            config or _Config(),
            salt,
            "0.5.23",
            lambda: False,
        )

    return find


def test_every_setting_of_this_sglang_is_classified(model: Path) -> None:
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    namespaces = namespace_of(ServerArgs)
    assert fields.unclassified(namespaces) == []
    assert not fields.KEPT & fields.IGNORED
    assert (fields.KEPT | fields.IGNORED) - set(namespaces) == set()


def test_every_decisive_variable_is_one_of_this_sglang(model: Path) -> None:
    from sglang.srt.environ import envs

    assert [name for name in fields.DECISIVE_ENVIRONMENT if not hasattr(envs, name)] == []


def test_what_the_controller_finds_is_what_is_found_here(model: Path, identify: Identify) -> None:
    found = sglang_identity.find_namespace(_Config(), "", lambda: False)
    assert found == identify()
    assert found.identity["settings"]["page_size"] == 1
    assert found.identity["model"]["config"]["rope_parameters"]["rope_theta"] == 10000.0
    assert "unclassified" not in found.identity["settings"]


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"page_size": 64},
        {"attention_backend": "triton"},
        {"json_model_override_args": '{"rope_theta": 500000.0}'},
        {"speculative_algorithm": "EAGLE"},
        {"salt": "experiment"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_decides_the_bytes_is_in_the_identity(
    identify: Identify, settings: dict[str, Any]
) -> None:
    assert identify(**settings) != identify()


@pytest.mark.parametrize(
    "settings",
    [
        {"served_model_name": "other"},
        {"port": 31000},
        {"mem_fraction_static": 0.5},
        {"hicache_mem_layout": "layer_first"},
        {"hicache_size": 5},
        {"random_seed": 3},
        {"context_length": 1024},
        {"dp_size": 4},
        {"max_running_requests": 7},
        {"enable_lora": True},
        {"log_level": "debug"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_does_not_is_not(identify: Identify, settings: dict[str, Any]) -> None:
    assert identify(**settings) == identify()


def test_the_context_counts_where_it_reaches_the_rotary_embedding(identify: Identify) -> None:
    long = '{"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}'
    one = identify(json_model_override_args=long, context_length=1024)
    assert one != identify(json_model_override_args=long, context_length=2048)


def test_a_setting_of_a_later_sglang_counts_when_it_is_not_at_its_default() -> None:
    namespaces = {"brand_new": "exec.kernel", "brand_new_port": "serving"}
    defaults = {"brand_new": False, "brand_new_port": 1}
    at_default = fields.select_settings(dict(defaults), namespaces, defaults)
    assert at_default == {}
    changed = fields.select_settings({"brand_new": True, "brand_new_port": 2}, namespaces, defaults)
    assert changed == {"unclassified": {"brand_new": True}}


def test_ranks_differ_where_their_kv_does(identify: Identify) -> None:
    def of(**changes: Any) -> Namespace:
        return identify(config=_Config(**changes))

    assert of(tp_rank=1, tp_size=2) != of(tp_rank=0, tp_size=2)
    assert of(tp_size=2) != of()
    assert of(dp_rank=1) == of()
    assert of(model_name="other") == of()
    assert of(pp_rank=1, pp_size=2) != of(pp_size=2)
    assert of(attn_cp_rank=1, attn_cp_size=2) != of(attn_cp_size=2)
    mla = {"is_mla_model": True}
    assert of(tp_rank=1, tp_size=2, **mla) == of(**mla)
    assert of(pp_rank=1, pp_size=2, **mla) != of(pp_size=2, **mla)
    assert of(**mla) != of()


def test_a_decisive_variable_counts(identify: Identify, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identify()
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert identify() != before


@pytest.mark.parametrize("load_format", ["remote", "flash_rl", "npcache"])
def test_weights_that_are_elsewhere_are_refused(identify: Identify, load_format: str) -> None:
    with pytest.raises(IdentityError, match="--load-format auto"):
        identify(load_format=load_format)


def test_dummy_weights_are_a_kind_of_their_own(identify: Identify) -> None:
    dummy = identify(load_format="dummy", random_seed=1)
    assert dummy != identify()
    assert dummy != identify(load_format="dummy", random_seed=2)


def test_a_draft_model_is_known_by_content(identify: Identify, tmp_path: Path) -> None:
    import tiny_llama

    draft = tmp_path / "draft"
    tiny_llama.write(draft, layers=1)
    options = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(draft)}
    one = identify(**options)
    assert one != identify(speculative_algorithm="EAGLE")
    tiny_llama.write(draft, layers=1, seed=1)
    assert identify(**options) != one
    ngram = {**options, "speculative_algorithm": "NGRAM"}
    assert identify(**ngram).identity["draft"] is None


def test_a_process_without_an_engine_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.runtime_context import get_context

    monkeypatch.setattr(get_context(), "_server_args", None)
    with pytest.raises(IdentityError, match="inside SGLang"):
        sglang_identity.find_namespace(_Config(), "", lambda: False)
