"""Which settings of SGLang decide what is in a page.

Every field of SGLang's ``ServerArgs`` is *kept* (it enters the identity), or *ignored*,
by its name or with its whole namespace. A field in neither list is newer than this
adapter and enters when it is not at its default: a needless miss is better than wrong
KV. A test fails when the installed SGLang has such fields.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lifeboat_cache.identity import jsonable

__all__ = [
    "DECISIVE_ENVIRONMENT",
    "IGNORED",
    "IGNORED_NAMESPACES",
    "KEPT",
    "decisive_environment",
    "select_settings",
    "unclassified",
]


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


KEPT = _names(
    # The model, and the form of its numbers.
    "dtype quantization kv_cache_dtype quantization_param_path qsa_indexer_dtype modelopt_quant",
    "quantize_and_serve rl_quant_profile model_impl json_model_override_args is_embedding",
    # Kernels with formats or approximations of their own.
    "attention_backend decode_attention_backend prefill_attention_backend",
    "prefill_kv_cache_dequant_dtype enable_tf32_matmul fp8_gemm_runner_backend",
    "fp4_gemm_runner_backend bf16_gemm_backend dsa_prefill_backend dsv4_prefill_backend",
    "dsa_decode_backend dsv4_attn_backend dsa_topk_backend enable_deepseek_v4_fp4_indexer",
    "enable_nvidia_megakernel enable_amd_monokernel enable_precise_embedding_interpolation",
    "enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay",
    "mamba_backend mamba_ssm_dtype enable_mamba_cache_stochastic_rounding",
    "mamba_cache_philox_rounds enable_int8_mamba_checkpoint linear_attn_backend",
    "linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend",
    "enable_linear_replayssm linear_replayssm_cache_len enable_linear_replayssm_spec",
    "mamba_radix_cache_strategy",
    "moe_runner_backend flashinfer_mxfp4_moe_precision deepep_dispatcher_output_dtype",
    "enable_w4a4_mxfp4_megamoe kt_weight_path kt_method kt_num_gpu_experts",
    "kt_max_deferred_experts_per_token enable_quant_communications rl_on_policy_target",
    "dllm_algorithm dllm_algorithm_config",
    # Where and how pages are kept.
    "page_size c128_page_size enable_page_major_kv_layout enable_hisparse hisparse_config",
    "swa_prefix_tails disable_hybrid_swa_memory",
    "enable_kv_cache_sharding enable_dsa_cache_layer_split enable_prefill_cp cp_strategy",
    "dcp_replicate_q_proj",
    # A draft model has KV, too.
    "speculative_algorithm speculative_draft_kv_cache_dtype speculative_draft_model_quantization",
    "speculative_draft_attention_backend speculative_draft_window_size",
    "speculative_draft_sink_size enable_multi_layer_eagle uno_lora_path",
    "speculative_enable_w4a4_mxfp4_megamoe speculative_dflash_block_size",
    "speculative_dspark_block_size",
    # How media become embeddings.
    "enable_multimodal mm_attention_backend mm_process_config image_processor_backend",
    "disable_fast_image_processor language_model_only language_only encoder_only",
    "device mlx_enable_sampling",
)

#: Namespaces of which nothing decides a token's KV: how requests come and are scheduled,
#: graphs of the same kernels, overlap, how ranks talk, where memory is.
IGNORED_NAMESPACES = frozenset(
    {
        "disagg",
        "exec.comm",
        "exec.deterministic",
        "exec.features",
        "exec.graph",
        "exec.offload",
        "exec.overlap",
        "lora",
        "observability",
        "schedule",
        "serving",
    }
)

IGNORED = _names(
    # Where the model lies and how it is read: the weights are known by content.
    "model_path load_format model_loader_extra_config trust_remote_code revision download_dir",
    "model_config_parser modelopt_checkpoint_restore_path modelopt_checkpoint_save_path",
    "modelopt_export_path startup_weight_load_mode custom_weight_loader model_checksum",
    "weight_loader_disable_mmap weight_loader_prefetch_checkpoints",
    "weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load",
    "remote_instance_weight_loader_seed_instance_ip",
    "remote_instance_weight_loader_seed_instance_service_port",
    "remote_instance_weight_loader_send_weights_group_ports",
    "remote_instance_weight_loader_backend",
    "remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port",
    "modelexpress_config delete_ckpt_after_loading decrypted_config_file",
    "decrypted_draft_config_file checkpoint_engine_wait_weights_before_ready weight_cache_mode",
    "weight_cache_socket weight_cache_timeout",
    # Enters where it reaches the rotary embedding or attention.
    "context_length",
    # The same numbers by another schedule.
    "enable_lean_attention sampling_backend grammar_backend dsa_triton_union",
    "dsa_paged_mqa_logits_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops",
    "triton_attention_reduce_in_fp32 triton_attention_num_kv_splits",
    "triton_attention_split_tile_size flashinfer_mla_disable_ragged enable_fused_qk_norm_rope",
    "enable_dsa_fused_indexer",
    # How much state is kept, and when.
    "mamba_max_states_per_path uses_mamba_radix_cache mamba_track_interval int8_mamba_ckpt_size",
    # The same experts, elsewhere.
    "enable_fused_moe_sum_all_reduce moe_a2a_backend deepep_v2_mode deepep_mode fuseep_mode",
    "flashinfer_a2a_dispatch_type ep_num_redundant_experts ep_dispatch_algorithm",
    "init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations",
    "eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold",
    "expert_distribution_recorder_mode expert_distribution_recorder_buffer_size",
    "expert_balancedness_report_mode deepep_config elastic_ep_backend",
    "enable_elastic_expert_backup mooncake_ib_device enable_waterfill ep_join_mode",
    "elastic_ep_scale_timeout disable_flashinfer_cutlass_moe_fp4_allgather",
    "disable_shared_experts_fusion enforce_shared_experts_fusion enable_paged_experts",
    "paged_experts_num_resident kt_cpuinfer kt_threadpool_count dllm_fdfo",
    # What is kept in memory and moved when, not what is in it; and us.
    "radix_eviction_policy _radix_eviction_policy_explicitly_set radix_eviction_policy_config",
    "disable_radix_cache enable_unified_memory enable_session_radix_cache radix_cache_backend",
    "enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size",
    "hicache_host_memory_fraction hicache_write_policy hicache_io_backend hicache_mem_layout",
    "hicache_storage_backend hicache_storage_prefetch_policy",
    "hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval",
    "hicache_storage_prefetch_retry_max_attempts",
    "enable_unified_cache_external_linker unified_cache_external_linker_backend",
    "unified_cache_external_linker_config enable_linker_mla_dedup enable_lmcache",
    "lmcache_config_file enable_flexkv flexkv_config_file",
    # Addresses, processes; ranks and sizes are named by the pages' parallel section.
    "nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank tp_size dcp_size",
    "pp_size pp_max_micro_batch_size pp_async_batch_depth dp_size attn_dp_size",
    "load_balance_method attn_cp_size moe_dp_size dwdp_size dcp_comm_backend",
    "enable_cp_tp_group_sharing enable_cp_decode_attn_tp enable_dp_attention",
    "enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all",
    "enable_attn_tp_input_scattered enable_shared_experts_attn_tp shared_experts_tp_size",
    "enable_dense_mlp_attn_tp enable_layernorm_sp enable_megamoe_for_layernorm_sp",
    "disable_attn_tp_gather enable_p2p_check ep_size moe_dense_tp_size ep_join_rank_offset",
    "elastic_ep_initial_size max_ep_size",
    # How tokens are proposed and accepted; the draft model is known by content.
    "speculative_draft_model_path speculative_boundary_reduction",
    "speculative_draft_model_revision speculative_draft_load_format speculative_num_steps",
    "speculative_eagle_topk speculative_num_draft_tokens speculative_domino_candidate_pool_size",
    "speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path",
    "speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single",
    "speculative_accept_threshold_acc speculative_use_rejection_sampling",
    "speculative_use_block_verification speculative_token_map speculative_attention_mode",
    "speculative_dsa_topk_backend speculative_moe_runner_backend speculative_moe_a2a_backend",
    "_speculative_draft_quantization_explicitly_set speculative_adaptive",
    "speculative_adaptive_config spec_trace_dir speculative_ngram_min_bfs_breadth",
    "speculative_ngram_max_bfs_breadth speculative_ngram_match_type",
    "speculative_ngram_max_trie_depth speculative_ngram_capacity",
    "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget",
    "speculative_ngram_external_corpus_max_tokens",
    # How media come and wait.
    "enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder",
    "mm_processor_worker_num mm_io_worker_num allowed_media_domains media_url_max_file_size_mb",
    "mm_preprocess_cache_size_mb trust_mm_content_hashes limit_mm_data_per_request",
    "enable_mm_global_cache mm_global_cache_backend mm_feature_transport",
    # Which device, and processes beside it.
    "base_gpu_id gpu_id_step random_seed watchdog_timeout soft_watchdog_timeout sleep_on_idle",
    "use_ray custom_sigquit_handler numa_node gc_threshold",
)

#: Environment variables of SGLang that change numbers by more than rounding, or a
#: layout, and that no setting shows.
DECISIVE_ENVIRONMENT = tuple(
    sorted(
        _names(
            "SGLANG_AITER_KV_CACHE_LAYOUT SGLANG_CPU_QUANTIZATION SGLANG_DEEPEP_BF16_DISPATCH",
            "SGLANG_DSA_HIP_DISABLE_PRESHUFFLE SGLANG_DSV4_COMPRESSED_KV_LAYOUT",
            "SGLANG_DSV4_COMPRESS_STATE_DTYPE SGLANG_DSV4_DENSE_MXSCALE",
            "SGLANG_DSV4_DENSE_MXSCALE_SHAPES SGLANG_DSV4_FP4_DEQUANT SGLANG_DSV4_FP4_EXPERTS",
            "SGLANG_DSV4_KV_LAYOUT SGLANG_DSV4_UNIFIED_KV_FP8",
            "SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE SGLANG_ENABLE_DP_GATHER_FP8",
            "SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX SGLANG_EXTERNAL_MM_MODEL_ARCH",
            "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE SGLANG_EXTERNAL_MODEL_PACKAGE",
            "SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16 SGLANG_FLASHINFER_MEGAMOE_COMBINE_DTYPE",
            "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION SGLANG_FORCE_FP8_MARLIN",
            "SGLANG_FORCE_MXFP8_BLOCK_CONVERT_DENSE SGLANG_FP4_IGNORED_LAYERS",
            "SGLANG_FP8_IGNORED_LAYERS SGLANG_GLM_NEXTN_MOE_PTPC",
            "SGLANG_HIP_DSV4_C4_INDEXER_ROWGROUP SGLANG_HIP_DSV41_INDEX_K_PAGE8",
            "SGLANG_HIP_FP4_INDEXER_ROWGROUP SGLANG_HUMMING_INPUT_QUANT_CONFIG",
            "SGLANG_HUMMING_ONLINE_QUANT_CONFIG SGLANG_HUMMING_USE_F16_ACCUM",
            "SGLANG_IMAGE_MAX_PIXELS SGLANG_INT4_WEIGHT SGLANG_MAMBA_CONV_DTYPE",
            "SGLANG_MAMBA_SSM_DTYPE SGLANG_MINICPM_DENSE_AS_SPARSE SGLANG_MINICPM_FORCE_DENSE",
            "SGLANG_MLX_USE_CUSTOM_ROPE SGLANG_MOE_NVFP4_DISPATCH SGLANG_MORI_COMBINE_DTYPE",
            "SGLANG_MORI_DISPATCH_DTYPE SGLANG_NIXL_EP_BF16_DISPATCH",
            "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN SGLANG_NVFP4_CKPT_FP8_NEXTN_MOE",
            "SGLANG_OPT_HOPPER_BLOCK_FP8_BF16 SGLANG_OPT_MINIMAX_M3_FP8_INDEX_CACHE",
            "SGLANG_OPT_USE_ONLINE_COMPRESS SGLANG_QUANT_ALLOW_DOWNCASTING",
            "SGLANG_RESIZE_RESAMPLE SGLANG_ROPE_CACHE_FP32 SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
            "SGLANG_SIMULATE_UNIFORM_EXPERTS SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR",
            "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR SGLANG_USE_AITER_FP8_PER_TOKEN",
            "SGLANG_USE_HND_KVCACHE SGLANG_USE_MLX SGLANG_USE_SAGE_ATTENTION_IMPL",
        )
    )
)


def decisive_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The decisive variables that are set."""
    return {name: environ[name] for name in DECISIVE_ENVIRONMENT if environ.get(name)}


def select_settings(
    resolved: Mapping[str, Any], namespaces: Mapping[str, str], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings that enter the identity, as JSON values.

    Parameters
    ----------
    resolved
        Every field of ``ServerArgs`` after resolution.
    namespaces
        Namespace of each field.
    defaults
        Default of each field that has one.

    Returns
    -------
    dict
        The kept fields, and under ``"unclassified"`` those that the adapter does not
        know and that are not at their default.

    Raises
    ------
    IdentityError
        If a value has no spelling of its own.
    """
    found: dict[str, Any] = {
        name: jsonable(resolved[name], f"server_args.{name}")
        for name in sorted(KEPT)
        if name in resolved
    }
    unknown = {
        name: jsonable(value, f"server_args.{name}")
        for name, value in resolved.items()
        if name not in KEPT and name not in IGNORED
        if not _ignored_with_its_namespace(namespaces.get(name, ""))
        if name not in defaults or value != defaults[name]
    }
    if unknown:
        found["unclassified"] = unknown
    return found


def unclassified(namespaces: Mapping[str, str]) -> list[str]:
    """Fields of ``ServerArgs`` that this adapter does not know, by their namespaces."""
    return sorted(
        name
        for name, namespace in namespaces.items()
        if name not in KEPT and name not in IGNORED and not _ignored_with_its_namespace(namespace)
    )


def _ignored_with_its_namespace(namespace: str) -> bool:
    return any(
        namespace == ignored or namespace.startswith(f"{ignored}.")
        for ignored in IGNORED_NAMESPACES
    )
