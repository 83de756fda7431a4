"""What other trainers call our settings: Hugging Face, NxDT, MaxText and torchtitan, see docs/coming-from.md."""

from __future__ import annotations

# Our key or flag, or an answer in words -> their names, with a section where the name alone means something else.
_OF_OTHERS = {
    "model.vocab_size": "padded_vocab_size make_vocab_size_divisible_by",
    "model.num_layers": "num_hidden_layers base_num_decoder_layers n_layers n_layer num_decoder_layers",
    "model.embed_dim": "hidden_size base_emb_dim emb_dim dim n_embd d_model",
    "model.mlp_dim": "intermediate_size ffn_hidden_size base_mlp_dim ffn_dim hidden_dim",
    "model.num_heads": "num_attention_heads base_num_query_heads num_query_heads n_heads n_head",
    "model.num_kv_heads": "num_key_value_heads base_num_kv_heads n_kv_heads num_query_groups",
    "model.head_dim": "kv_channels",
    "model.max_positions": "max_position_embeddings n_positions",
    "model.norm_eps": "rms_norm_eps layernorm_epsilon normalization_layer_epsilon rms_norm_epsilon",
    "model.rope_theta": "rope_max_timescale rotary_base rope_base",
    "model.rope_scaling": "rope_type rope_parameters",
    "model.tie_embeddings": (
        "tie_word_embeddings share_embeddings_and_output_weights logits_via_embedding enable_weight_tying"
    ),
    "model.init_std": "initializer_range init_method_std dense_init_scale",
    "model.depth_scaled_init": "use_scaled_init_method",
    "model.fuse_qkv": "fused_qkv",
    "model.layer_loop": "scan_layers",
    "model.remat": (
        "remat_policy activations_checkpoint_granularity activation_checkpoint activation_checkpointing "
        "gradient_checkpointing"
    ),
    "model.attention": "flash_attention attn_implementation attn_backend use_flash_attention",
    "parallel.tensor": "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size ici_tensor_parallelism",
    "parallel.sequence_parallel": "enable_sequence_parallel ici_tensor_sequence_parallelism",
    "parallel.pipe": (
        "pipeline_model_parallel_size pipeline_parallel_degree pipeline_parallel_size ici_pipeline_parallelism"
    ),
    "parallel.data": ("data_parallel_replicate_degree data_parallel_size dcn_data_parallelism ici_data_parallelism"),
    "parallel.fsdp": "data_parallel_shard_degree ici_fsdp_parallelism",
    "parallel.zero1": "shard_optimizer_over_data zero_stage",
    "parallel.bucket_bytes": "bucket_size_collectives",
    "precision.policy": (
        "torch_dtype dtype weight_dtype bf16 fp16 mixed_precision mixed_precision_param mixed_precision_reduce"
    ),
    "optimizer.peak_lr": "lr learning_rate max_lr",
    "optimizer.min_lr_ratio": "min_lr learning_rate_final_fraction min_lr_factor lr_min",
    "optimizer.warmup_steps": "warmup_steps_fraction warmup_ratio num_warmup_steps lr_warmup_steps",
    "optimizer.horizon_steps": "learning_rate_schedule_steps total_steps lr_decay_steps lr_decay_iters",
    "optimizer.beta1 optimizer.beta2": "betas",
    "optimizer.beta1": "adam_b1 adam_beta1 b1",
    "optimizer.beta2": "adam_b2 adam_beta2 b2",
    "optimizer.eps": "adam_eps adam_epsilon epsilon",
    "optimizer.weight_decay": "adam_weight_decay wd",
    "optimizer.decay": "adamw_mask do_layer_norm_weight_decay param_groups",
    "optimizer.clip_norm": "gradient_clip_val gradient_clipping_threshold max_norm max_grad_norm grad_clip clip_grad",
    "data.batch_size": (
        "global_batch_size per_device_batch_size per_device_train_batch_size train_batch_size local_batch_size "
        "num_tokens_per_train_step"
    ),
    "data.seq_len": (
        "encoder_seq_length max_target_length max_context_length seq_length max_seq_len max_seq_length max_length "
        "block_size"
    ),
    "data.train": (
        "train_dir data_prefix grain_train_files hf_train_files train_file train_files dataset_name dataset"
    ),
    "data.validation": "val_dir grain_eval_files hf_eval_files validation_file splits_string validator.dataloader",
    "data.packing": "FirstFitPackingConfig ConcatThenSplitPackingConfig reset_attention_mask",
    "data.text_field": "train_data_columns text_column dataset_text_field",
    "data.tokenizer": "tokenizer_path tokenizer_name hf_assets_path tokenizer_model tokenizer_type tokenizer.type",
    "data.num_threads": "dataloader_num_workers num_workers",
    "data.shuffle": "enable_data_shuffling dataloader_type",
    "data.seed": "data_shuffle_seed data_seed",
    "train.seed": "init_weights_seed",
    "train.num_steps": "max_steps steps num_train_steps train_steps max_train_steps",
    "train.num_microbatches": (
        "gradient_accumulation_steps num_pipeline_microbatches micro_batch_size accumulate_grad_batches "
        "num_tokens_per_microbatch_per_dp_rank"
    ),
    "train.z_loss_weight": "z_loss_multiplier z_loss",
    "train.eval_every_steps": "val_check_interval eval_interval validator.freq",
    "train.num_eval_batches": "limit_val_batches eval_iters validator.steps",
    "train.eval_every_steps train.num_eval_batches": "eval_steps",
    "train.init_from": (
        "load_parameters_path initial_load_path model_name_or_path initial_load_model_only initial_load_in_hf "
        "pretrained_model_name_or_path"
    ),
    "train.branch_from": "load_full_state_path",
    "train.profile_steps": ("profiler profiler_steps enable_profiling profile_freq skip_first_n_steps_for_profiler"),
    "train.max_nonfinite_steps": "abort_on_nan_loss",
    "train.spikes": "skip_step_on_spikes",
    "checkpoint.every_steps": "every_n_train_steps checkpoint_period save_steps save_interval interval",
    "checkpoint.keep_last": "save_top_k max_num_checkpoints_to_keep keep_latest_k save_total_limit",
    "checkpoint.export_every_steps": "last_save_in_hf",
    "metrics.log_every_steps": "log_every_n_steps log_period log_freq logging_steps log_interval",
    "metrics.tensorboard": "create_tensorboard_logger enable_tensorboard",
    "metrics.wandb_project": "enable_wandb wandb_project_name report_to wandb",
    "--workdir": "explicit_log_dir base_output_directory dump_folder output_dir out_dir log_dir",
    "The same command resumes the run in its --workdir; to begin a new run with given weights, set train.init_from.": (
        "resume resume_from_checkpoint resume_if_exists auto_resume continue restart"
    ),
    "Saves run in the background; there is nothing to set.": "async_checkpointing async_mode async_save",
    "KV heads are replicated where parallel.tensor exceeds them; there is nothing to set.": "kv_replicator",
    "A run counts steps, not epochs; set train.num_steps.": "num_train_epochs max_epochs num_epochs epochs epoch",
}
_MEANINGS = {name: meaning for meaning, names in _OF_OTHERS.items() for name in names.split()}


def meant_by(name: str) -> tuple[list[str], str]:
    """Returns (our keys or flags for a setting of another trainer, an answer in words); both empty for other names.

    `name` may begin with sections, as in trainer.max_steps, and have hyphens.
    """
    name = name.replace("-", "_")
    meaning = _MEANINGS.get(name) or _MEANINGS.get(name.rpartition(".")[2], "")
    return ([], meaning) if meaning.endswith(".") else (meaning.split(), "")
