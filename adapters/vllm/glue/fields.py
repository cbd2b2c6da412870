"""Table of the place where each field of vLLM's configuration and KV cache specs counts when KV is named.

Two engines share KV if their namespaces and keys are equal, so a field that changes KV must be in one of them. The
table holds the fields of all supported versions. ``settings.py`` makes the namespace's part from it, and a test
compares it with each version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Treatment(Enum):
    """The place where a field counts."""

    NAMESPACE = "in the namespace"
    KEY = "in the key"
    REFUSED = "refused"
    HARMLESS = "harmless"


@dataclass(frozen=True)
class Rule:
    """The treatment of a field.

    Attributes:
        treatment: where it counts.
        why: the reason, or the namespace's field that holds it.
        is_written: the table itself writes the field into the namespace; otherwise something derived from it does.
        unless: values with which it is left out, as they change nothing.
        names_file: the value is a path, and the file's content counts.
    """

    treatment: Treatment
    why: str
    is_written: bool = False
    unless: tuple[object, ...] = ()
    names_file: bool = False


MODEL_DTYPE: Final = "the model's dtype"
"""Stands in ``unless`` for the data type of the model."""

_Row = tuple[Rule, str]


def _written(fields: str, *unless: object) -> _Row:
    return Rule(Treatment.NAMESPACE, "", is_written=True, unless=unless), fields


def _always(name: str, field: str) -> _Row:
    return Rule(Treatment.NAMESPACE, name, is_written=True), field


def _content(field: str) -> _Row:
    return Rule(Treatment.NAMESPACE, "", is_written=True, unless=(None,), names_file=True), field


def _held(name: str, fields: str) -> _Row:
    return Rule(Treatment.NAMESPACE, name), fields


def _keyed(why: str, fields: str) -> _Row:
    return Rule(Treatment.KEY, why), fields


def _refused(why: str, fields: str) -> _Row:
    return Rule(Treatment.REFUSED, why), fields


def _harmless(why: str, fields: str) -> _Row:
    return Rule(Treatment.HARMLESS, why), fields


def _rules(*rows: _Row) -> dict[str, Rule]:
    pairs = [(field, rule) for rule, fields in rows for field in fields.split()]
    rules = dict(pairs)
    assert len(rules) == len(pairs), "a field has two treatments"
    return rules


_ROUNDING: Final = "another kernel or division of the same work: rounds otherwise"
_SIZES: Final = "room, counts and limits"
_LOCAL: Final = "about vLLM's own prefix cache or other connectors"
_DERIVED: Final = "made by vLLM from other fields"
_TEXT: Final = "decides tokens, which are in the key"
_SAMPLING: Final = "comes after KV: which token is chosen, what is returned"
_PROCESSES: Final = "which processes and devices carry the model, and how they talk"
_LOADING: Final = "how the same weights get into memory"
_CONTEXT: Final = "context parallelism is refused"
_PADDING: Final = "bytes between or behind those that are stored"
_CHECKPOINT: Final = "model_config, model"  # a checkpoint's own quantization is in its configuration and files

_MODEL: Final = _rules(
    _always("dtype", "dtype"),
    _always("quantization", "quantization"),
    _written("quantization_config code_revision", None),
    _written("model_impl", "auto", "vllm"),
    _written("model_class_overrides", {}),
    _written("convert", "auto", "none"),
    _held("model", "model model_weights revision"),
    _held("model_config", "hf_config hf_text_config hf_config_path hf_overrides config_format disable_sliding_window"),
    _held("rope, attention_scale", "max_model_len"),
    _held("attention_scale", "generation_config override_generation_config"),
    _held("multimodal_config", "multimodal_config"),
    _keyed(_TEXT, "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin"),
    _refused("requests with embeddings are passed by", "enable_prompt_embeds"),
    _refused("or told of it, so that nothing moves meanwhile", "enable_sleep_mode enable_cumem_allocator"),
    _harmless("not part of what computes KV", "runner pooler_config word_embeddings_untied_by_checkpoint"),
    _harmless("allows or names things", "trust_remote_code allowed_local_media_path allowed_media_domains hf_token"),
    _harmless("allows or names things", "served_model_name allow_deprecated_quantization"),
    _harmless("of random weights only, which need a model_id", "seed"),
    _harmless(_DERIVED, "is_submodel_config spec_target_max_model_len"),
    _harmless(_ROUNDING, "enforce_eager disable_cascade_attn"),
    _harmless(_SAMPLING, "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay"),
    _harmless(_SAMPLING, "logits_processors enable_return_routed_experts"),
    _harmless("when memory is given back", "sleep_preserve_parameter_names sleep_mode_backend"),
    _harmless("when memory is given back", "sleep_mode_offload_cudagraph enable_nccl_comm_suspend"),
    _harmless(_SIZES, "renderer_num_workers"),
)

_CACHE: Final = _rules(
    _always("kv_cache_dtype", "cache_dtype"),
    _written("kv_cache_dtype_skip_layers", []),
    _written("kv_sharing_fast_prefill use_replayssm use_kda_recoverssm", False),
    _held("states", "mamba_cache_dtype mamba_ssm_cache_dtype replayssm_buffer_len"),
    _held("layout", "block_size kv_cache_layout mamba_block_size"),
    _held("model_config", "is_attention_free sliding_window"),
    _held("layers", "swa_bounded_replay"),
    _harmless(_LOCAL, "prefix_match_unit enable_prefix_caching prefix_caching_hash_algo kv_offloading_size"),
    _harmless(_LOCAL, "prefix_cache_retention_interval kv_offloading_backend simple_cpu_offload_num_blocks"),
    _harmless(_LOCAL, "enable_mamba_shared_prefix_checkpoint enable_mamba_fine_grained_prefix_cache"),
    _harmless("which states are left, not which values", "mamba_cache_mode"),
    _harmless(_PADDING, "mamba_page_size_padded skip_page_size_padded"),
    _harmless(_SIZES, "gpu_memory_utilization num_gpu_blocks_override kv_cache_memory_bytes num_gpu_blocks"),
    _harmless(_SIZES, "num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency"),
    _harmless(_DERIVED, "user_specified_block_size user_specified_mamba_block_size _block_size_resolved"),
    _harmless(_DERIVED, "effective_attention_block_size hash_block_size cache_hit_alignment_tokens"),
)

_MULTIMODAL: Final = _rules(
    _written("mm_processor_kwargs mm_encoder_attn_dtype video_pruning_rate", None),
    _written("media_io_kwargs", {}),
    _written("video_pruning_method", "evs"),
    _content("mm_encoder_fp8_scale_path"),
    _keyed("names a feature by its content", "mm_hasher_algorithm enable_mm_embeds"),
    _keyed(_TEXT, "interleave_mm_strings"),
    _harmless("which requests are let in", "language_model_only limit_per_prompt mm_encoder_only"),
    _harmless("which requests are let in", "allow_missing_mm_embeddings"),
    _harmless(_ROUNDING, "mm_device_do_normalize mm_encoder_tp_mode mm_encoder_attn_backend"),
    _harmless("written, not read", "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"),
    _harmless(_SIZES, "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb"),
    _harmless(_SIZES, "skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb"),
)

_PARALLEL: Final = _rules(
    _held("shard", "pipeline_parallel_size tensor_parallel_size rank"),
    _refused(_CONTEXT, "prefill_context_parallel_size decode_context_parallel_size dcp_kv_cache_interleave_size"),
    _refused(_CONTEXT, "dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size"),
    _refused(_CONTEXT, "_allow_auto_resolve_cp_interleave_size"),
    _harmless("replicas hold the same KV", "data_parallel_size data_parallel_size_local data_parallel_rank"),
    _harmless("replicas hold the same KV", "data_parallel_rank_local data_parallel_index"),
    _harmless(_ROUNDING, "enable_expert_parallel enable_eplb eplb_config expert_placement_strategy all2all_backend"),
    _harmless(_ROUNDING, "disable_custom_all_reduce enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size"),
    _harmless(_ROUNDING, "dbo_decode_token_threshold dbo_prefill_token_threshold enable_hc_sp is_moe_model"),
    _harmless(_SAMPLING, "enable_batch_sharded_sampling"),
    _harmless(_LOADING, "enable_ep_weight_filter max_parallel_loading_workers"),
    _harmless(_PROCESSES, "data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port"),
    _harmless(_PROCESSES, "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb world_size"),
    _harmless(_PROCESSES, "disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env placement_group"),
    _harmless(_PROCESSES, "distributed_executor_backend worker_cls sd_worker_cls worker_extension_cls master_addr"),
    _harmless(_PROCESSES, "master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus"),
    _harmless(_PROCESSES, "assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds"),
    _harmless(_PROCESSES, "_data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank"),
    _harmless(_PROCESSES, "enable_fault_tolerance fault_tolerance_config enable_shm_tensor_arena"),
)

_LORA: Final = _rules(
    _written("lora_dtype", MODEL_DTYPE, "auto", None),
    _written("target_modules", None),
    _written("enable_tower_connector_lora enable_moe_shared_loras", False),
    _keyed("makes a request use an adapter", "default_mm_loras"),
    _harmless(_SIZES, "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels"),
    _harmless(_ROUNDING, "fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format"),
)

_PROPOSALS: Final = "what is proposed, not what the model computes of it"
_SPECULATIVE: Final = _rules(
    _written("quantization kv_cache_dtype code_revision", None),
    _held("draft", "model method revision draft_model_config draft_load_config"),
    _held("model, model_config, shard", "target_model_config target_parallel_config"),
    _harmless(_SIZES, "max_model_len"),
    _harmless(_LOCAL, "disable_eagle_block_drop disable_lookahead_block_hashes"),
    _harmless(_ROUNDING, "enforce_eager draft_tensor_parallel_size tensor_parallel_size moe_backend"),
    _harmless(_ROUNDING, "attention_backend draft_parallel_config"),
    _harmless(_PROPOSALS, "num_speculative_tokens index_share_for_mtp_iteration disable_padded_drafter_batch"),
    _harmless(_PROPOSALS, "use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min"),
    _harmless(_PROPOSALS, "parallel_drafting num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth"),
    _harmless(_PROPOSALS, "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor draft_sample_method"),
    _harmless(_PROPOSALS, "suffix_decoding_min_token_prob dspark_draft_topk draft_lm_head_quantization xpress_topc"),
    _harmless(_SAMPLING, "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length"),
    _harmless(_SAMPLING, "enable_adaptive_verification fly_window_size fly_entropy_threshold fly_entropy_top_k"),
)

_OWN_FILES: Final = ("auto", "hf", "pt", "safetensors", "npcache", "fastsafetensors", "instanttensor", "runai_streamer")
_LOAD: Final = _rules(
    _written("load_format", *_OWN_FILES, "dummy"),  # dummy needs a model_id
    _written("model_loader_extra_config", {}),
    _written("ignore_patterns", ["original/**/*"]),
    _harmless(_LOADING, "download_dir safetensors_load_strategy safetensors_prefetch_num_threads device"),
    _harmless(_LOADING, "safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location"),
)

_ATTENTION: Final = _rules(
    _written("disable_flashinfer_q_quantization use_prefill_query_quantization use_non_causal", False),
    _written("indexer_kv_dtype", "auto"),
    _written("hisparse_config", None),
    _harmless(_ROUNDING, "backend backend_per_kind minimax_m3_msa_decode_backend flash_attn_version"),
    _harmless(_ROUNDING, "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv"),
    _harmless(_ROUNDING, "tq_max_kv_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend"),
    _harmless(_ROUNDING, "indexer_sparse_logits sparse_mla_force_mqa sparse_mla_prefill_workspace_factor"),
    _harmless(_ROUNDING, "flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size"),
    _harmless(_ROUNDING, "trtllm_ragged_backend indexer_tp_shard_min_rows minimax_m3_indexer_cp"),
)

_MAMBA_KERNELS: Final = _rules(
    _written("enable_stochastic_rounding", False),
    _harmless(_ROUNDING, "backend ssu_algorithm stochastic_rounding_philox_rounds"),
)

_ENGINE: Final = _rules(
    _written("diffusion_config", None),
    _written("additional_config", {}),
    _held("fields of their own", "model_config cache_config parallel_config load_config attention_config"),
    _held("fields of their own", "mamba_config lora_config speculative_config quant_config"),
    _harmless("when something is computed, and how much at once", "scheduler_config"),
    _harmless(_ROUNDING, "kernel_config compilation_config optimization_level performance_mode"),
    _harmless(_PROCESSES, "device_config instance_id shutdown_timeout watchdog_config"),
    _harmless("where weights and tables lie", "offload_config engram_config"),
    _harmless(_SAMPLING, "watermark_config structured_outputs_config reasoning_config aux_output_config"),
    _harmless("what is observed", "observability_config profiler_config logging_config kv_events_config"),
    _harmless("how KV and features travel", "kv_transfer_config ec_transfer_config ec_manager_config"),
    _harmless("new weights come with a reset", "weight_transfer_config"),
)

_SPECS: Final[Mapping[str, Mapping[str, Rule]]] = {
    "KVCacheSpec": _rules(
        _held("layout", "block_size"),
        _refused(_CONTEXT, "dcp_sharded"),
        _harmless(_PADDING, "block_stride_alignment"),
        _harmless("whose layer it is: the layer's name says so, too", "is_draft"),
    ),
    "AttentionSpec": _rules(
        _written("num_head_slots state_content_bytes", None),  # or 2 heads look like the slots of K and V
        _held("layout, model_config", "num_kv_heads head_size head_size_v"),
        _held("layout, model_config", "tokens_per_state"),
        _held("dtype, kv_cache_dtype", "dtype kv_quant_mode"),
        _held("shard", "max_tp_shards"),
        _refused(_CONTEXT, "dcp_sharded"),
        _harmless(_PADDING, "page_size_padded"),
    ),
    "FullAttentionSpec": _rules(
        _held("model_config", "sliding_window attention_chunk_size"),
        _refused("equal prefixes need not have equal KV", "non_causal"),
    ),
    "MLAAttentionSpec": _rules(
        _held("kv_cache_dtype, AttentionConfig.indexer_kv_dtype", "cache_dtype_str"),
        _held("layers, model_config", "model_version cache_role is_index_group_leader"),
        _held("layout, model_config", "storage_block_size head_size_v"),
        _harmless(_PADDING, "alignment"),
        _harmless(_SIZES, "topk_buffer_width"),
        _harmless("of tokens that are proposed", "non_causal_multi_token_decode"),
    ),
    "HiddenStateCacheSpec": {},
    "RSWASpec": _rules(_refused("equal prefixes need not have equal KV", "rswa_window")),
    "ChunkedLocalAttentionSpec": _rules(_held("model_config", "attention_chunk_size")),
    "SlidingWindowSpec": _rules(
        _held("model_config", "sliding_window"),
        _refused("speculation with several groups is refused", "extra_retained_tokens"),
    ),
    "CircularBufferSpec": {},
    "KpoolTailSpec": {},
    "SlidingWindowMLASpec": _rules(
        _held("kv_cache_dtype", "cache_dtype_str"),
        _held("layers, model_config", "model_version bounded_replay head_size_v"),
        _harmless(_PADDING, "alignment"),
    ),
    "MambaSpec": _rules(
        _written("shapes dtypes mamba_type"),
        _held("layout", "num_heads tokens_per_state"),
        _held("shard", "tp_replicated"),
        _refused("speculation with states is refused", "num_speculative_blocks"),
        _harmless(_PADDING, "page_size_padded"),
        _harmless("which states are left, not which values", "mamba_cache_mode num_prefill_checkpoint_blocks"),
        _harmless("which states are left, not which values", "prefill_checkpoint_alignment"),
    ),
    "EncoderOnlyAttentionSpec": {},
    "CrossAttentionSpec": {},
    "SinkFullAttentionSpec": _rules(_held("model_config", "sink_len")),
    "UniformTypeKVCacheSpecs": _rules(_held("the fields of each", "kv_cache_specs")),
    "HiSparseHotSpec": _rules(_harmless("not stored", "page_size blocks_per_request")),
    "HiSparseResidentSpec": _rules(_harmless("not stored", "page_size")),
    "KVCacheGroupSpec": _rules(
        _held("layers", "layer_names"),
        _held("the fields of each", "kv_cache_spec"),
        _harmless("which groups are stored: their layers say so, too", "is_eagle_group host_resident role"),
        _harmless("which groups are stored: their layers say so, too", "enable_kv_transfer"),
    ),
    "KVCacheConfig": _rules(
        _held("the fields of each", "kv_cache_groups"),
        _held("layout", "kv_cache_layout kv_cache_tensors"),
        _held("shard", "kv_tp_replicas"),
        _harmless(_SIZES, "num_blocks hisparse_host_num_blocks hisparse_host_block_stride hisparse_shared_host_pool"),
        _harmless(_LOCAL, "prefix_cache_retention_interval hash_block_size cache_hit_alignment_tokens"),
    ),
}

_CHECKPOINTS: Final[Mapping[str, str]] = {
    "AutoAWQConfig": "weight_bits group_size zero_point lm_head_quantized modules_to_not_convert full_config",
    "AutoGPTQConfig": "weight_bits group_size desc_act is_sym lm_head_quantized dynamic full_config "
    "modules_in_block_to_quantize",
    "CompressedTensorsConfig": "target_scheme_map ignore quant_format kv_cache_scheme config transform_config "
    "total_num_heads total_num_kv_heads",
    "DeepseekV4FP8Config": "",
    "ExpertsInt8Config": "",
    "FBGEMMFp8Config": "ignore_list input_scale_ub",
    "FPQuantConfig": "hadamard_group_size forward_dtype forward_method modules_to_not_convert",
    "Fp8Config": "is_checkpoint_fp8_serialized activation_scheme ignored_layers weight_block_size store_dtype",
    "GptOssMxfp4Config": "",
    "HummingConfig": "full_config",
    "HummingLayerQuantizationConfig": "weight_schema input_schema force_weight_schema force_input_schema "
    "is_online_quant allow_input_schema_fallback",
    "INCConfig": "weight_bits group_size sym packing_format block_name_to_quantize extra_config data_type backend",
    "ModelOptFp8Config": "quant_method is_checkpoint_fp8_serialized kv_cache_quant_method exclude_modules",
    "ModelOptMixedPrecisionConfig": "kv_cache_quant_method exclude_modules quantized_layers fp8_config nvfp4_config "
    "w4a16_nvfp4_config mxfp8_config",
    "ModelOptMxFp8Config": "is_checkpoint_mxfp8_serialized kv_cache_quant_algo exclude_modules",
    "ModelOptNvFp4Config": "quant_method is_checkpoint_nvfp4_serialized kv_cache_quant_algo exclude_modules group_size "
    "quantization_args",
    "ModelOptQuantConfigBase": "exclude_modules",
    "MoeWNA16Config": "linear_quant_method weight_bits group_size has_zp lm_head_quantized modules_to_not_convert "
    "full_config",
    "Mxfp4Config": "ignored_layers",
    "QuantizationConfig": "",
    "QuarkConfig": "quant_config kv_cache_group kv_cache_config pack_method",
    "TorchAOConfig": "torchao_config skip_modules is_checkpoint_torchao_serialized",
}
"""vLLM's quantization methods, with the arguments of their constructors."""

VARIABLES: Final[Mapping[str, object]] = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": False,
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "",  # to measure speed: what the model computes is garbage
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": False,
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE",
    "VLLM_ROCM_USE_AITER_FP4BMM": True,
    "VLLM_ROCM_USE_AITER_FP8BMM": True,
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": None,
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": "auto",
    "VLLM_USE_DEEP_GEMM_E8M0": True,
}
"""Variables of the environment with which vLLM computes other values, such as with fewer bits, and their defaults."""

RULES: Final[Mapping[str, Mapping[str, Rule]]] = {
    "VllmConfig": _ENGINE,
    "ModelConfig": _MODEL,
    "CacheConfig": _CACHE,
    "MultiModalConfig": _MULTIMODAL,
    "ParallelConfig": _PARALLEL,
    "LoRAConfig": _LORA,
    "SpeculativeConfig": _SPECULATIVE,
    "LoadConfig": _LOAD,
    "AttentionConfig": _ATTENTION,
    "MambaConfig": _MAMBA_KERNELS,
    "QuantizationConfigArgs": _rules(_held("ModelConfig.quantization_config", "linear moe ignore targets")),
    "QuantSpec": _rules(_held("ModelConfig.quantization_config", "weight activation")),
    "OnlineQuantizationConfig": _rules(_held("ModelConfig.quantization_config", "args")),
    **_SPECS,
    **{name: _rules(_held(_CHECKPOINT, fields)) for name, fields in _CHECKPOINTS.items()},
}
"""The treatment of each field, by class and name."""
