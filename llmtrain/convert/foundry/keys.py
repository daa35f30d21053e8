"""Every key of LLM Foundry's pretraining YAMLs: what it becomes here, or why it becomes nothing.

The migration page's table is made from these, and `notes.py` reads the reasons from them. Below `eval_loader` the keys are
those of `train_loader`; a key stands for all keys below it that are not listed themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MAPPED: dict[str, tuple[str, str]] = {
    "variables": ("", "written out where they are used"),
    "run_name": ("name", "blank: `${oc.env:RUN_NAME,FILE}`, as there"),
    "max_seq_len": ("data.seq_len", "the loader's own `max_seq_len` comes first"),
    "seed": ("seed", ""),
    "max_duration": (
        "train.duration",
        "`ba` steps, `tok` tokens, `ep` epochs (also a bare number), `sp` steps of a batch",
    ),
    "global_train_batch_size": ("train.global_batch_size", ""),
    "device_train_microbatch_size": ("train.microbatch_size", ""),
    "device_eval_batch_size": ("eval.microbatch_size", ""),
    "precision": ("train.precision", "`fp32`, `amp_bf16`; another becomes amp_bf16, and a note"),
    "eval_interval": ("eval.interval", "0: no validation. Default: an epoch, as there"),
    "eval_subset_num_batches": ("eval.max_samples", "batches × device_eval_batch_size, on one rank"),
    "save_folder": ("run_dir, checkpoint.remote", "`{run_name}` is `${name}`; an address `s3://…` is the remote"),
    "save_interval": ("checkpoint.interval", ""),
    "save_num_checkpoints_to_keep": ("checkpoint.keep_last", "-1: null, all"),
    "progress_bar": ("logging.progress_bar", ""),
    "console_log_interval": ("logging.interval", ""),
    "icl_tasks": ("eval.icl.file", "an eval YAML, written by `--icl FILE`"),
    "icl_seq_len": ("max_length", "of that eval YAML"),
    "tokenizer.name": ("", "the shards bring their tokenizer; named in a comment beside `data.train`"),
    "model.name": (
        "model.blocks",
        "`mpt_causal_lm`, and `hf_causal_lm` of every imported family, GPT-2, GPT-Neo and OPT",
    ),
    "model.vocab_size": ("model.vocab_size", ""),
    "model.d_model": ("model.d_model", ""),
    "model.n_heads": ("model.blocks.*.n_heads", ""),
    "model.n_layers": ("model.layers", ""),
    "model.head_dim": ("model.blocks.*.head_dim", ""),
    "model.max_seq_len": ("model.max_seq_len", ""),
    "model.expansion_ratio": ("model.blocks.*.mlp.d_ff", "× d_model"),
    "model.no_bias": ("norm.bias, qkv_bias, out_bias, mlp.bias", "default false: every bias"),
    "model.attention_bias": ("model.blocks.*.qkv_bias", ""),
    "model.norm_type": ("model.norm.type", ""),
    "model.norm_eps": ("model.norm.eps", ""),
    "model.learned_pos_emb": ("model.positions", "default true, and off beside ALiBi or rotary"),
    "model.tie_word_embeddings": ("model.tie_embeddings", ""),
    "model.final_logit_softcapping": ("model.logit_softcap", ""),
    "model.resid_pdrop": ("model.dropout", "where equal to `emb_pdrop`"),
    "model.emb_pdrop": ("model.dropout", "where equal to `resid_pdrop`"),
    "model.block_overrides": ("model.blocks, model.layers", "one block for each name, `order` as the pattern"),
    "model.z_loss": ("train.loss.z_loss", ""),
    "model.attn_config.attn_type": ("model.blocks.*.n_kv_heads", ""),
    "model.attn_config.kv_n_heads": ("model.blocks.*.n_kv_heads", ""),
    "model.attn_config.qk_ln": ("model.blocks.*.qk_norm", "full"),
    "model.attn_config.qk_gn": ("model.blocks.*.qk_norm", "head"),
    "model.attn_config.clip_qkv": ("model.blocks.*.clip_qkv", ""),
    "model.attn_config.softmax_scale": ("model.blocks.*.softmax_scale", ""),
    "model.attn_config.attn_logit_softcapping": ("model.blocks.*.softcap", ""),
    "model.attn_config.sliding_window_size": ("model.blocks.*.sliding_window", "+ 1: ours counts the token itself"),
    "model.attn_config.attn_uses_sequence_id": ("data.mask_documents", "which also leaves out labels across documents"),
    "model.attn_config.alibi": ("model.blocks.*.position", "type: alibi"),
    "model.attn_config.alibi_bias_max": ("model.blocks.*.position.max_bias", ""),
    "model.attn_config.rope": ("model.blocks.*.position", "type: rotary"),
    "model.attn_config.nope": ("model.blocks.*.position", "type: none; in a block override"),
    "model.attn_config.rope_theta": ("model.blocks.*.position.theta", ""),
    "model.attn_config.rope_dail_config": ("model.blocks.*.position", "`xpos` has no counterpart"),
    "model.attn_config.rope_hf_config": ("model.blocks.*.position.scaling", "`linear`, `llama3`; not `dynamic`"),
    "model.ffn_config.ffn_type": ("model.blocks.*.mlp.type", "`mptmlp` gelu, `mptglu` geglu or swiglu; no experts"),
    "model.ffn_config.ffn_hidden_size": ("model.blocks.*.mlp.d_ff", ""),
    "model.ffn_config.ffn_act_fn": ("model.blocks.*.mlp.type", "`gelu`; `silu` in an `mptglu`"),
    "model.init_config": (
        "model.init",
        "`kaiming_normal_` (the default), `baseline_`, `small_init_`; others are noted",
    ),
    "model.pretrained_model_name_or_path": ("model", "a folder with config.json, or a name in hf_model.py"),
    "model.config_overrides": ("model", "they replace settings of config.json"),
    "model.pretrained": ("init_from", "after `llmtrain import`, which the note names"),
    "train_loader.name": ("data", "`text`"),
    "train_loader.dataset.local": ("data.train.streams.*.local", ""),
    "train_loader.dataset.remote": ("data.train.streams.*.remote", ""),
    "train_loader.dataset.split": ("data.train.streams.*.split", ""),
    "train_loader.dataset.streams": (
        "data.train.streams",
        "local, remote, split, proportion, `repeat`, `choose`",
    ),
    "train_loader.dataset.max_seq_len": ("data.seq_len", ""),
    "train_loader.dataset.shuffle": ("data.shuffle", "default false, as there"),
    "train_loader.dataset.shuffle_seed": ("data.shuffle_seed", ""),
    "train_loader.dataset.shuffle_block_size": ("data.shuffle_block_size", ""),
    "train_loader.dataset.num_canonical_nodes": ("data.num_canonical_nodes", ""),
    "train_loader.dataset.predownload": ("data.predownload", ""),
    "train_loader.num_workers": ("data.num_workers", ""),
    "eval_loader": ("data.validation.streams", "several loaders become one validation set"),
    "optimizer.name": ("optimizer.type", "`decoupled_adamw`; not Lion"),
    "optimizer.lr": ("optimizer.lr", ""),
    "optimizer.betas": ("optimizer.betas", ""),
    "optimizer.eps": ("optimizer.eps", ""),
    "optimizer.weight_decay": (
        "optimizer.weight_decay",
        "÷ lr: there the decay of a step is × lr / peak lr, here × lr",
    ),
    "scheduler.name": ("schedule.type", "cosine, linear, constant, inverse_sqrt"),
    "scheduler.t_warmup": ("schedule.warmup", "longer than the run: the rise it reaches, exactly"),
    "scheduler.alpha_f": ("schedule.final_lr_fraction", "default 0, as there"),
    "scheduler.alpha_i": ("optimizer.lr", "multiplies it"),
    "scheduler.alpha": ("optimizer.lr", "multiplies it"),
    "scheduler.t_max": ("", "where it is the run's length, the only one that ours has"),
    "scheduler.t_scale": ("schedule.warmup", "where equal to `t_warmup`"),
    "scheduler.t_cooldown": ("", "where it is 0"),
    "algorithms.gradient_clipping": ("train.clip_grad_norm", "`clipping_type: norm`; without it null, never"),
    "fsdp_config.sharding_strategy": ("train.sharding", "FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD"),
    "fsdp_config.data_parallel_shard_degree": ("train.sharding.shard_size", ""),
    "fsdp_config.activation_checkpointing": ("train.activation_checkpointing.type", "full"),
    "loggers.wandb": ("logging.wandb", "project, entity, group, tags"),
    "loggers.tensorboard": ("logging.tensorboard", ""),
}
"""Key -> (ours, remark)."""

_LOGGED = "is in metrics.jsonl and the terminal of every run"
_LOADER = "is how the loader works, not what it gives"
_FSDP = "FSDP2 decides it by itself"
_NAMES = "checkpoints have names of their own: checkpoints/step-N"

NOT_NEEDED: dict[str, str] = {
    "log_to_console": "the terminal always gets metrics",
    "log_config": "the config is stored with every run",
    "python_log_level": "notices have one level",
    "dist_timeout": "a rank that is lost ends the run",
    "expandable_segments": "PyTorch's allocator is set by PYTORCH_CUDA_ALLOC_CONF",
    "max_split_size_mb": "PyTorch's allocator is set by PYTORCH_CUDA_ALLOC_CONF",
    "cuda_load_lazy": "CUDA's own default",
    "autoresume": "the same command always continues from the newest checkpoint",
    "save_overwrite": "a second start continues the run; `llmtrain train FILE --fresh` starts anew",
    "save_filename": _NAMES,
    "save_latest_filename": _NAMES,
    "spin_dataloaders": "a resumed run goes to its sample directly",
    "accumulate_train_batch_on_tokens": "every sequence is full, so both averages are equal",
    "flatten_metadata": "belongs to metadata",
    "compile_config": "blocks are compiled with train.compile: auto",
    "tokenizer.kwargs": "belongs to the shards' tokenizer",
    "model.init_device": "weights are always made in their shards",
    "model.verbose": "prints only",
    "model.use_cache": "training uses none",
    "model.loss_fn": "the same loss; train.loss.type chooses how it is computed",
    "model.fc_type": "linear layers are PyTorch's",
    "model.use_pad_tok_in_ffn": "packed sequences have no padding",
    "model.use_auth_token": "read from the environment by the Hugging Face hub",
    "model.trust_remote_code": "no code of a model is run",
    "model.use_flash_attention_2": "`backend: auto` chooses the kernel by measurements",
    "model.attn_implementation": "`backend: auto` chooses the kernel by measurements",
    "model.use_train_metrics": _LOGGED,
    "model.attn_config.attn_impl": "`backend: auto` chooses the kernel by measurements; all compute the same",
    "model.attn_config.fused_qkv": "always fused",
    "model.attn_config.rope_impl": "both turn the two halves of a head, as ours",
    "model.attn_config.seq_parallel_world_size": "1 is the only value LLM Foundry takes",
    "train_loader.drop_last": "training takes whole batches, validation every sample",
    "train_loader.pin_memory": _LOADER,
    "train_loader.prefetch_factor": _LOADER,
    "train_loader.persistent_workers": _LOADER,
    "train_loader.timeout": _LOADER,
    "train_loader.dataset.download_retry": "data.download_retries here",
    "train_loader.dataset.download_timeout": "data.download_timeout here",
    "train_loader.dataset.validate_hash": _LOADER,
    "train_loader.dataset.keep_zip": _LOADER,
    "train_loader.dataset.keep_raw": _LOADER,
    "train_loader.dataset.cache_limit": "data.cache_limit here, in bytes; without it every shard that was read is kept",
    "train_loader.dataset.partition_algo": "the order depends on seed and epoch, not on ranks",
    "train_loader.dataset.shuffle_algo": "the order depends on seed and epoch; StreamingDataset's default shuffles",
    "train_loader.dataset.token_encoding_type": "read from the shards; bytes are int64",
    "train_loader.dataset.tokenizer_name": "the shards bring their tokenizer",
    "train_loader.dataset.group_method": "shards hold sequences that are packed already",
    "train_loader.dataset.eos_token_id": "the shards' manifest.json or tokenizer/ names it",
    "train_loader.dataset.bos_token_id": "the shards' manifest.json or tokenizer/ names the token that ends a document",
    "scheduler.scale_warmup": "takes part only with Composer's scale_schedule_ratio, which a YAML cannot set",
    "algorithms.low_precision_layernorm": "norms take bf16 and sum in fp32 under amp_bf16",
    "fsdp_config.mixed_precision": "parameters and sums of gradients are fp32, computation is bf16 under amp_bf16",
    "fsdp_config.activation_checkpointing_reentrant": "never reentrant",
    "fsdp_config.limit_all_gathers": _FSDP,
    "fsdp_config.backward_prefetch": _FSDP,
    "fsdp_config.forward_prefetch": _FSDP,
    "fsdp_config.backward_prefetch_limit": _FSDP,
    "fsdp_config.forward_prefetch_limit": _FSDP,
    "fsdp_config.sync_module_states": "weights are made in their shards",
    "fsdp_config.use_orig_params": _FSDP,
    "fsdp_config.flatten_parameters": _FSDP,
    "fsdp_config.min_params": "every layer is a unit",
    "fsdp_config.keep_low_precision_grads": _FSDP,
    "fsdp_config.state_dict_type": "checkpoints do not depend on the number of ranks",
    "fsdp_config.load_monolith_rank0_only": "every rank reads its part",
    "fsdp_config.verbose": "prints only",
    "callbacks.speed_monitor": "throughput and MFU: " + _LOGGED,
    "callbacks.lr_monitor": "the learning rate: " + _LOGGED,
    "callbacks.memory_monitor": "memory: " + _LOGGED,
    "callbacks.runtime_estimator": "the time left: " + _LOGGED,
    "callbacks.scheduled_gc": "garbage is collected between steps",
    "callbacks.nan_monitor": "train.nonfinite: stop, the default, ends the run at the first value that is not finite",
    "callbacks.env_logging": "`llmtrain doctor` prints it",
    "callbacks.oom_observer": "`llmtrain describe` predicts memory",
    "callbacks.eval_output_logging": "`llmtrain eval` keeps them all, in documents/",
    "loggers.inmemory": "metrics.jsonl holds every metric",
    "loggers.in_memory_logger": "metrics.jsonl holds every metric",
}
"""Keys that change nothing of what is learned, with the reason why ours has none."""

_EXPERTS = "there are no experts; written as a dense MLP"
_STREAM = "StreamingDataset's default is taken"

MISSING: dict[str, tuple[tuple[Any, ...], str]] = {
    "code_paths": ((None, []), "code is not loaded from a YAML; docs/extending shows how to add a part"),
    "metadata": ((None, {}), "use logging.wandb.tags and group"),
    "profiler": ((None, {}), "use PyTorch's profiler around `llmtrain train`"),
    "tp_config": ((None, {}), "set train.parallel.tensor to its degree"),
    "eval_first": ((None, False), "there is no validation before the first step"),
    "train_subset_num_batches": ((None, -1), "an epoch is the whole of the data"),
    "save_weights_only": ((None, False), "checkpoints hold the optimizer too; `llmtrain export` writes weights alone"),
    "save_ignore_keys": ((None, []), "a checkpoint is whole"),
    "load_path": (
        (None, ""),
        "convert its weights, `llmtrain checkpoint convert PATH OUT --to llmtrain --config OURS.yaml`, and write "
        "init_from: OUT; the optimizer and the position in the data begin anew",
    ),
    "load_weights_only": ((None,), "init_from takes weights alone; see load_path"),
    "load_strict_model_weights": ((None, True), "write init_from: {path: …, strict: false}"),
    "load_ignore_keys": ((None, []), "write init_from: {path: …, parameters: [patterns to take]}"),
    "load_object_store": ((None,), "init_from takes s3://bucket/prefix"),
    "only_hf_checkpoint": ((None, False), "use `llmtrain export`"),
    "only_composer_checkpoint": ((None, False), "use `llmtrain checkpoint convert`"),
    "icl_subset_num_batches": ((None, -1), "write limit: in the eval YAML that eval.icl names, in documents"),
    "eval_gauntlet": ((None,), "name one of ours in the eval YAML, gauntlet: core, or write one: eval/README.md"),
    "model.logit_scale": ((None, 1, 1.0), "logits are not scaled"),
    "model.embedding_fraction": ((None, 1, 1.0), "the embedding's gradient is not scaled"),
    "model.master_weights_dtype": ((None, "fp32", "float32"), "parameters are kept in fp32"),
    "model.pretrained_lora_id_or_path": ((None,), "there are no adapters; all parameters are trained"),
    "model.peft_config": ((None, {}), "there are no adapters; all parameters are trained"),
    "model.should_save_peft_only": ((None, True, False), "there are no adapters"),
    "model.load_in_8bit": ((None, False), "weights are not quantised"),
    "model.allow_embedding_resizing": ((None, False, True), "vocab_size is written"),
    "model.additional_train_metrics": ((None, []), "metrics are fixed: " + _LOGGED),
    "model.additional_eval_metrics": ((None, []), "metrics are fixed: " + _LOGGED),
    "model.attn_config.attn_pdrop": ((None, 0, 0.0), "attention weights have no dropout"),
    "model.attn_config.prefix_lm": ((None, False), "attention is causal throughout"),
    "model.attn_config.kv_dim": ((None,), "keys and values are made from the layer's own input"),
    "model.attn_config.attn_temperature_tuning": (
        (None, {}, {"floor_scale": 8192, "attn_scale": 0.0}),
        "the temperature of attention does not depend on the position",
    ),
    "model.attn_config.reuse_kv_layer_idx": ((None,), "every layer has keys and values of its own"),
    "model.attn_config.reuse_kv_x_layer_idx": ((None,), "every layer has keys and values of its own"),
    "model.ffn_config": ((None,), _EXPERTS),
    "model.fuse_norm_attn_norm": ((None, False), "norm, attention and norm are separate operations"),
    "train_loader.dataset.epoch_size": ((None,), "an epoch is as long as the data; proportion mixes streams"),
    "train_loader.dataset.sampling_method": ((None, "balanced"), _STREAM),
    "train_loader.dataset.sampling_granularity": ((None, 1), _STREAM),
    "train_loader.dataset.batching_method": ((None, "random"), _STREAM),
    "train_loader.dataset.allow_unsafe_types": ((None, False), "shards hold tokens alone"),
    "train_loader.dataset.replication": ((None, 1), "every rank has samples of its own"),
    "train_loader.dataset.stream_name": ((None, "stream"), _STREAM),
    "train_loader.dataset.stream_config": ((None, {}), _STREAM),
    "optimizer.amsgrad": ((None, False), "AdamW has no amsgrad"),
    "optimizer.disable_grad": ((None, []), "no parameter is frozen"),
    "optimizer.param_groups": ((None, []), "write optimizer.groups, whose patterns match whole names of ours"),
    "scheduler.alpha_f_decay": ((None, 0, 0.0), "inverse_sqrt falls towards 0"),
    "scheduler.alpha_f_cooldown": ((None, 0, 0.0), "there is no cooldown; type: wsd has one"),
    "fsdp_config.activation_checkpointing_target": (
        (None,),
        "use train.activation_checkpointing.type: every_k or selective",
    ),
    "fsdp_config.activation_cpu_offload": (
        (None, False),
        "write train.activation_checkpointing.offload: true with type: full",
    ),
    "fsdp_config.cpu_offload": ((None, False), "parameters stay on the GPU; describe predicts memory"),
    "fsdp_config.data_parallel_replicate_degree": ((None, 1), "write train.sharding.shard_size, the ranks of a group"),
    "fsdp_config.te_checkpoint_wrapper": ((None, False), "there is no fp8"),
    "fsdp_config.te_shard_fp8_weight": ((None, False), "there is no fp8"),
    "fsdp_config.load_planner": ((None,), "checkpoints are ours"),
    "fsdp_config.save_planner": ((None,), "checkpoints are ours"),
    "algorithms": ((None, {}), "Composer's algorithms are not built"),
    "callbacks": ((None,), "there is no counterpart"),
    "callbacks.hf_checkpointer": ((None,), "use `llmtrain export RUN OUT` on any checkpoint"),
    "callbacks.mono_checkpoint_saver": ((None,), "use `llmtrain checkpoint convert`"),
    "callbacks.generate_callback": ((None,), "eval.prompt continues one text when the run ends"),
    "callbacks.early_stopper": ((None,), "runs have the length that train.duration says"),
    "callbacks.optimizer_monitor": ((None,), "only the norm of the gradient is logged"),
    "callbacks.async_eval": ((None,), "use `llmtrain eval` on a checkpoint, on other GPUs"),
    "callbacks.load_checkpoint": ((None,), "see load_path"),
    "callbacks.layer_freezing": ((None,), "no parameter is frozen"),
    "callbacks.global_lr_scaling": ((None,), "write optimizer.lr"),
    "callbacks.curriculum_learning": (
        (None,),
        "data.mixture changes the proportions of streams during the run; for other data, start the next stage with init_from",
    ),
    "callbacks.run_timeout": ((None,), "SIGTERM saves and ends a run"),
    "loggers.mlflow": ((None,), "logging has wandb, TensorBoard and metrics.jsonl"),
    "loggers.mosaicml": ((None,), "logging has wandb, TensorBoard and metrics.jsonl"),
    "loggers": ((None,), "logging has wandb, TensorBoard and metrics.jsonl"),
}
"""Key -> (values without effect, why there is no counterpart and what to do)."""

SAME = {"eval_gauntlet_str": "eval_gauntlet", "icl_tasks_str": "icl_tasks", "eval_loaders": "eval_loader"}
"""Keys that are other spellings of one above."""


class Meaning(NamedTuple):
    """A row of the tables. kind: mapped, not needed or missing. harmless: values of a missing key that change nothing."""

    kind: str
    text: str
    harmless: tuple[Any, ...] = ()


def meaning(path: str) -> Meaning | None:
    """Entry of the tables for a key, or for the nearest one above it; None for a key that LLM Foundry does not have."""
    parts = [part for part in path.split(".") if not part.isdigit()]
    if len(parts) > 1 and SAME.get(parts[0], parts[0]) == "eval_loader":
        parts[0] = "train_loader"
    parts[0] = SAME.get(parts[0], parts[0])
    for end in range(len(parts), 0, -1):
        key = ".".join(parts[:end])
        if key in NOT_NEEDED:
            return Meaning("not needed", NOT_NEEDED[key])
        if key in MISSING:
            return Meaning("missing", MISSING[key][1], MISSING[key][0])
        if key in MAPPED and end == len(parts):
            return Meaning("mapped", MAPPED[key][0])
    return None


def table() -> str:
    """The Markdown table of the migration page."""
    rows = ["| LLM Foundry | llmtrain | remark |", "|---|---|---|"]
    rows += [_row(key, ours, remark) for key, (ours, remark) in MAPPED.items()]
    rows += [
        "",
        "Not needed, because nothing of what is learned depends on it:",
        "",
        "| LLM Foundry | reason |",
        "|---|---|",
    ]
    rows += [f"| `{key}` | {reason} |" for key, reason in NOT_NEEDED.items()]
    rows += ["", "Without a counterpart, and named in the output where the value matters:", ""]
    rows += ["| LLM Foundry | why, and what to do |", "|---|---|"]
    rows += [f"| `{key}` | {reason} |" for key, (_, reason) in MISSING.items()]
    return "\n".join(rows) + "\n"


def _row(key: str, ours: str, remark: str) -> str:
    names = ", ".join(f"`{name}`" for name in ours.split(", ")) if ours else "–"
    return f"| `{key}` | {names} | {remark} |"
