"""Which fields of vLLM's configuration decide what is in a KV block.

Every field of the classes below is either *kept* (it enters the identity) or
*ignored* (it does not change the KV of a token, see the comment at its list). A
field in neither list is newer than this adapter: it enters the identity if its
value is not the default, because a needless miss is better than wrong KV. A test
fails when an installed vLLM has such fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lifeboat_cache.identity import jsonable

__all__ = [
    "ATTENTION",
    "CACHE",
    "DRAFT",
    "ENGINE",
    "KV_CACHE",
    "KV_GROUP",
    "LORA",
    "MAMBA",
    "MODEL",
    "MULTIMODAL",
    "PARALLEL",
    "SPECULATIVE",
    "FieldRule",
    "select_fields",
    "unclassified",
]


@dataclass(frozen=True)
class FieldRule:
    """What of a configuration class enters the identity.

    Attributes
    ----------
    kept
        Fields that do.
    ignored
        Fields that do not, or that are treated by name elsewhere.
    """

    kept: frozenset[str]
    ignored: frozenset[str]


def _rule(kept: str, *ignored: str) -> FieldRule:
    return FieldRule(
        frozenset(kept.split()), frozenset(name for line in ignored for name in line.split())
    )


MODEL = _rule(
    """
    convert disable_sliding_window dtype model_class_overrides model_impl quantization
    quantization_config runner
    """,
    # Treated by name: the effective configuration and what it was made from.
    "hf_config hf_text_config hf_overrides hf_config_path config_format multimodal_config",
    # Where the model lies. The weights are known by content.
    "model model_weights revision code_revision hf_token trust_remote_code is_submodel_config",
    # Tokens are in the block hashes, whoever made them.
    "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init renderer_num_workers",
    "io_processor_plugin enable_prompt_embeds allowed_local_media_path allowed_media_domains",
    # Behind the last hidden state: logits, sampling, pooling, names.
    "word_embeddings_untied_by_checkpoint max_logprobs logprobs_mode use_fp64_gumbel",
    "return_sampling_mask enable_trace_replay logits_processors pooler_config served_model_name",
    "generation_config override_generation_config",
    # The same numbers by another schedule or from other memory.
    "enforce_eager disable_cascade_attn enable_sleep_mode sleep_preserve_parameter_names",
    "sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend",
    "enable_cumem_allocator allow_deprecated_quantization seed",
    # Enters where it reaches the rotary embedding or attention, see `length_matters`.
    "max_model_len spec_target_max_model_len",
)

MULTIMODAL = _rule(
    """
    allow_missing_mm_embeddings language_model_only media_io_kwargs mm_device_do_normalize
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_hasher_algorithm mm_processor_kwargs
    video_pruning_method video_pruning_rate
    """,
    # How many items may come, and where they wait.
    "limit_per_prompt enable_mm_embeds mm_processor_cache_gb mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb mm_tensor_ipc mm_ipc_gpu_memory_gb skip_mm_profiling",
    # Changes the prompt, which is hashed.
    "interleave_mm_strings",
    # The same encoder, cut or computed otherwise; encoder-only engines have no KV.
    "mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend",
    "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
)

CACHE = _rule(
    """
    block_size cache_dtype kv_cache_dtype_skip_layers kv_cache_layout kv_sharing_fast_prefill
    mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_page_size_padded
    mamba_ssm_cache_dtype prefix_caching_hash_algo prefix_match_unit replayssm_buffer_len
    skip_page_size_padded sliding_window swa_bounded_replay use_kda_recoverssm use_replayssm
    """,
    # How much is kept, and which blocks, not what is in them.
    "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks",
    "kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes",
    "kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks",
    "prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint",
    "enable_prefix_caching is_attention_free",
    # Derived from what is kept; set at different moments of the start.
    "user_specified_block_size effective_attention_block_size hash_block_size",
    "cache_hit_alignment_tokens",
)

PARALLEL = _rule(
    """
    cp_kv_cache_interleave_size dcp_kv_cache_interleave_size decode_context_parallel_size
    pipeline_parallel_size prefill_context_parallel_size tensor_parallel_size worker_cls
    world_size
    """,
    # Which replica this is: replicas hold the same model.
    "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local",
    "data_parallel_index data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb",
    "dp_sync_interval rank node_rank nnodes",
    # Addresses, processes, devices.
    "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port master_addr",
    "master_port distributed_executor_backend worker_extension_cls ray_workers_use_nsight",
    "ray_runtime_env placement_group numa_bind numa_bind_nodes numa_bind_cpus",
    "assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds",
    "max_parallel_loading_workers enable_fault_tolerance fault_tolerance_config",
    # The same layers, computed on other ranks: the KV of a token stays.
    "is_moe_model enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling",
    "enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy all2all_backend",
    "disable_custom_all_reduce enable_shm_tensor_arena enable_elastic_ep elastic_ep_max_dp_size",
    "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold",
    "disable_nccl_for_dp_synchronization dcp_comm_backend dcp_q_replicate",
)

ATTENTION = _rule(
    """
    backend backend_per_kind disable_flashinfer_q_quantization flash_attn_version hisparse_config
    indexer_kv_dtype indexer_sparse_logits minimax_m3_msa_decode_backend mla_prefill_backend
    use_non_causal use_prefill_query_quantization use_trtllm_attention
    """,
    # How a kernel cuts its work.
    "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv",
    "tq_max_kv_splits_for_cuda_graph sparse_mla_force_mqa sparse_mla_prefill_workspace_factor",
    "flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size",
    "indexer_tp_shard_min_rows minimax_m3_indexer_cp trtllm_ragged_backend",
)

MAMBA = _rule(
    "backend enable_stochastic_rounding stochastic_rounding_philox_rounds",
    "ssu_algorithm",
)

#: Speculative decoding by a method whose drafter has KV of its own.
DRAFT = _rule(
    """
    attention_backend disable_eagle_block_drop disable_lookahead_block_hashes
    draft_tensor_parallel_size index_share_for_mtp_iteration kv_cache_dtype method
    num_speculative_tokens num_speculative_tokens_per_batch_size parallel_drafting quantization
    use_heterogeneous_vocab
    """,
    # Treated by name, or known by content.
    "model revision code_revision draft_model_config draft_parallel_config draft_load_config",
    "target_model_config target_parallel_config max_model_len tensor_parallel_size",
    # How tokens are proposed and accepted.
    "enforce_eager moe_backend disable_padded_drafter_batch use_local_argmax_reduction",
    "prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates",
    "synthetic_acceptance_length enable_adaptive_verification draft_sample_method",
    "dspark_draft_topk draft_lm_head_quantization fly_window_size fly_entropy_threshold",
    "fly_entropy_top_k xpress_topc",
)

#: Speculative decoding without a draft model: only which method counts.
SPECULATIVE = FieldRule(frozenset({"method"}), (DRAFT.kept | DRAFT.ignored) - {"method"})

KV_CACHE = _rule(
    "hisparse_host_block_stride hisparse_shared_host_pool kv_tp_replicas",
    # How much memory there is.
    "num_blocks hisparse_host_num_blocks",
    # Treated by name, or known from what is kept.
    "kv_cache_tensors kv_cache_groups kv_cache_layout hash_block_size",
    "cache_hit_alignment_tokens prefix_cache_retention_interval",
)

KV_GROUP = _rule(
    "enable_kv_transfer host_resident is_eagle_group kv_cache_spec layer_names role",
)

#: How adapters are applied; joins an adapter's own digest, so that engines with and
#: without adapters share the KV of the base model.
LORA = _rule(
    "enable_tower_connector_lora lora_dtype target_modules",
    "max_lora_rank max_loras max_cpu_loras fully_sharded_loras specialize_active_lora",
    "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
    # Named in the request, so in its block hashes and its adapter.
    "default_mm_loras",
)

#: Parts of the engine's configuration as a whole.
ENGINE = _rule(
    "additional_config",
    "model_config cache_config parallel_config attention_config mamba_config speculative_config",
    "load_config lora_config kv_transfer_config",
    # Refused, see `vllm_standdown`.
    "diffusion_config",
    # Read from the checkpoint's configuration or from the command line, which are kept.
    "quant_config",
    # Neither a token's KV nor its place.
    "scheduler_config device_config offload_config aux_output_config engram_config kernel_config",
    "watermark_config structured_outputs_config observability_config logging_config",
    "compilation_config profiler_config kv_events_config ec_transfer_config ec_manager_config",
    "reasoning_config instance_id optimization_level performance_mode weight_transfer_config",
    "shutdown_timeout watchdog_config",
)


def _default(field: dataclasses.Field[Any]) -> Any:
    """A field's default; ``dataclasses.MISSING`` if it has none or making it fails."""
    default: Any = field.default
    factory: Any = field.default_factory
    # pydantic dataclasses keep `Field(default=...)` as the default.
    if type(default).__name__ == "FieldInfo":
        default, factory = default.default, default.default_factory or dataclasses.MISSING
        if type(default).__name__ == "PydanticUndefinedType":
            default = dataclasses.MISSING
    if default is not dataclasses.MISSING:
        return default
    if factory is dataclasses.MISSING or factory is None:
        return dataclasses.MISSING
    try:
        return factory()
    except Exception:
        return dataclasses.MISSING


def _fields(config: Any) -> Iterable[tuple[str, Any]]:
    if dataclasses.is_dataclass(config):
        return [(field.name, _default(field)) for field in dataclasses.fields(config)]
    return [(name, dataclasses.MISSING) for name in getattr(config, "__dict__", {})]


def _same(value: Any, default: Any) -> bool:
    try:
        return bool(value is default or value == default)
    except Exception:
        return False


def select_fields(config: Any, rule: FieldRule, where: str) -> dict[str, Any]:
    """The part of a configuration object that enters the identity, as JSON values.

    Parameters
    ----------
    config
        The object; ``None`` gives an empty mapping.
    rule
        Which fields.
    where
        Its name, for errors.

    Returns
    -------
    dict
        The kept fields that it has, and under ``"unclassified"`` those that the
        adapter does not know and that are not at their default.

    Raises
    ------
    IdentityError
        If a value has no spelling of its own.
    """
    if config is None:
        return {}
    found: dict[str, Any] = {
        name: jsonable(getattr(config, name), f"{where}.{name}")
        for name in sorted(rule.kept)
        if hasattr(config, name)
    }
    unknown = {
        name: jsonable(getattr(config, name), f"{where}.{name}")
        for name, default in _fields(config)
        if name not in rule.kept
        and name not in rule.ignored
        and not name.startswith("_")
        and hasattr(config, name)
        and not _same(getattr(config, name), default)
    }
    if unknown:
        found["unclassified"] = unknown
    return found


def unclassified(config_class: type, rule: FieldRule) -> list[str]:
    """Fields of a configuration class that a rule does not know."""
    return sorted(
        name
        for name in (field.name for field in dataclasses.fields(config_class))
        if name not in rule.kept and name not in rule.ignored and not name.startswith("_")
    )
