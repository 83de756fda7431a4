"""What settings may be: every check that spans fields, and needs no file and no device.

Owns what is said of settings that do not fit: the path, the numbers and what to change. Where devices have to be known,
see `degrees`.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING, Any

from hlat_jax.byte_sizes import parse_bytes
from hlat_jax.store.atomic_files import check_name

if TYPE_CHECKING:
    from hlat_jax.config import Config, ModelConfig, ParallelConfig

REMAT_BUDGET = "budget:"


def nearest(word: str, candidates: Any) -> str:
    """Returns ` Did you mean 'x'?` for the closest candidate, or all of them when none is close."""
    candidates = sorted(candidates)
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(candidates)}."


def check_choice(path: str, field: dataclasses.Field, value: Any) -> None:
    """Raises ValueError for a value that a key does not take; the message has the nearest."""
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"{path}={value!r} is not one of {', '.join(choices)}. {nearest(str(value), choices)}")


def _at_least(lowest: float, **values: float) -> None:
    for path, value in values.items():
        if not value >= lowest:
            raise ValueError(f"{path.replace('__', '.')}={value} must be at least {lowest}.")


def check_run_name(name: Any) -> None:
    """Raises ValueError unless `name` can be that of a folder in `runs/`."""
    if check_name(name, "config.name").startswith((".", "-")):
        raise ValueError(f"config.name={name!r} must not begin with '.' or '-': it names the run folder, runs/NAME.")


def check_model(m: ModelConfig) -> None:
    """Raises ValueError when a model cannot be built as described; called by `resolve` and by `Decoder`."""
    for field in dataclasses.fields(m):
        check_choice(f"model.{field.name}", field, getattr(m, field.name))
    for name in ("rope_theta", "rope_factor", "rope_low_freq_factor"):
        if not getattr(m, name) > 0:
            raise ValueError(f"model.{name}={getattr(m, name)} must be above 0.")
    _at_least(0, model__norm_eps=m.norm_eps, model__init_std=m.init_std)
    for name in ("vocab_size", "num_layers", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim"):
        _at_least(1, **{f"model__{name}": getattr(m, name)})
    _at_least(1, model__max_positions=m.max_positions, model__rope_original_positions=m.rope_original_positions)
    if m.num_heads % m.num_kv_heads:
        divisors = [d for d in range(1, m.num_heads + 1) if m.num_heads % d == 0]
        raise ValueError(
            f"model.num_kv_heads={m.num_kv_heads} must divide model.num_heads={m.num_heads}; use one of {divisors}."
        )
    if m.head_dim % 2:
        raise ValueError(f"model.head_dim={m.head_dim} must be even: rotary embeddings turn pairs.")
    if m.rope_high_freq_factor <= m.rope_low_freq_factor:
        raise ValueError(
            f"model.rope_high_freq_factor={m.rope_high_freq_factor} must exceed "
            f"model.rope_low_freq_factor={m.rope_low_freq_factor}."
        )
    choices = ("auto", "none", "full", "selective", "products")
    if m.remat.startswith(REMAT_BUDGET):
        parse_bytes(m.remat.removeprefix(REMAT_BUDGET), name="model.remat: the budget")
    elif m.remat not in choices and not m.remat.startswith(("names:", "saved:", "policy:")):
        raise ValueError(
            f"model.remat={m.remat!r} must be {', '.join(choices)}, names:A,B,..., saved:A,B,..., "
            "policy:dots_saveable or the like, or budget:12GiB."
        )


def check_parallel(parallel: ParallelConfig, model: ModelConfig) -> None:
    """Raises ValueError for degrees that no number of devices allows; called again when a degree of -1 is known."""
    degrees = {name: getattr(parallel, name) for name in ("pipe", "data", "fsdp", "tensor")}
    for name, degree in degrees.items():
        if degree < 1 and degree != -1:
            raise ValueError(f"parallel.{name}={degree} must be a positive degree, or -1 for the devices that remain.")
    if sum(degree == -1 for degree in degrees.values()) > 1:
        raise ValueError(f"parallel={degrees}: at most one degree may be -1.")
    tensor, kv, heads = parallel.tensor, model.num_kv_heads, model.num_heads
    if tensor > 1 and (kv % tensor and (tensor % kv or heads % tensor)):
        allowed = [d for d in range(1, heads + 1) if heads % d == 0 and (kv % d == 0 or d % kv == 0)]
        raise ValueError(
            f"parallel.tensor={tensor} must divide model.num_kv_heads={kv}, or be a multiple of it that divides "
            f"model.num_heads={heads}; use one of {allowed}."
        )
    if parallel.pipe > 1 and model.num_layers % parallel.pipe:
        divisors = [d for d in range(1, model.num_layers + 1) if model.num_layers % d == 0]
        raise ValueError(
            f"parallel.pipe={parallel.pipe} must divide model.num_layers={model.num_layers}; use one of {divisors}."
        )
    if parallel.pipe > 1 and model.layer_loop == "unroll":
        raise ValueError(
            f"parallel.pipe={parallel.pipe} with model.layer_loop='unroll' would keep a copy of a stage's weights "
            "for every microbatch in flight; set model.layer_loop='scan'."
        )
    if parallel.pipe > 1 and parallel.reduce_gradients == "microbatch":
        raise ValueError(
            f"parallel.pipe={parallel.pipe} with parallel.reduce_gradients='microbatch': the gradients of several "
            "microbatches are made at a time; set it to 'step' or 'layer'."
        )
    if parallel.bucket_bytes < 0:
        raise ValueError(f"parallel.bucket_bytes={parallel.bucket_bytes} must be 0 or more.")
    if parallel.pipe > 1 and model.norm_eps == 0:
        raise ValueError(
            f"parallel.pipe={parallel.pipe} with model.norm_eps=0: a stage without a microbatch runs on zeros, which "
            "no norm can scale; set model.norm_eps above 0."
        )


def check_policy(policy: str, *, pipe: int) -> None:
    """Raises ValueError for a policy that stages cannot have; called again when a degree of -1 is known."""
    if policy == "autocast" and pipe > 1:
        raise ValueError(
            f"precision.policy=autocast with parallel.pipe={pipe}: it casts a loss that runs whole, and stages run one "
            "by one; use 'mixed', or other degrees than pipe."
        )


def check_training(c: Config) -> None:
    """Raises ValueError for settings of a run that do not fit each other."""
    o, d, t = c.optimizer, c.data, c.train
    if c.precision.stochastic_rounding != "auto" and c.precision.policy != "bf16_sr":
        raise ValueError(
            f"precision.stochastic_rounding={c.precision.stochastic_rounding!r} with precision.policy="
            f"{c.precision.policy!r}, which rounds to nearest; set the policy to 'bf16_sr' or leave 'auto'."
        )
    check_policy(c.precision.policy, pipe=c.parallel.pipe)
    _at_least(1, data__batch_size=d.batch_size, train__num_microbatches=t.num_microbatches)
    _at_least(2, data__seq_len=d.seq_len)
    _at_least(1, data__max_document_chars=d.max_document_chars, data__prefetch_batches=d.prefetch_batches)
    _at_least(1, train__max_nonfinite_steps=t.max_nonfinite_steps)
    _at_least(0, train__num_eval_batches=t.num_eval_batches)
    _at_least(1, checkpoint__keep_last=c.checkpoint.keep_last, metrics__log_every_steps=c.metrics.log_every_steps)
    _at_least(0, train__num_steps=t.num_steps, train__eval_every_steps=t.eval_every_steps)
    _at_least(0, data__num_threads=d.num_threads, data__position_every_steps=d.position_every_steps)
    _at_least(1, data__window_documents=d.window_documents)
    _at_least(0, optimizer__warmup_steps=o.warmup_steps)
    _at_least(0, checkpoint__every_steps=c.checkpoint.every_steps, checkpoint__every_minutes=c.checkpoint.every_minutes)
    _at_least(0, checkpoint__keep_every_steps=c.checkpoint.keep_every_steps, train__sample_tokens=t.sample_tokens)
    _at_least(0, checkpoint__export_every_steps=c.checkpoint.export_every_steps)
    _at_least(0, train__eval_tasks_every_steps=t.eval_tasks_every_steps, train__eval_tasks_limit=t.eval_tasks_limit)
    _at_least(0, optimizer__peak_lr=o.peak_lr, optimizer__eps=o.eps, optimizer__clip_norm=o.clip_norm)
    _at_least(0, optimizer__weight_decay=o.weight_decay, train__z_loss_weight=t.z_loss_weight)
    for name in ("beta1", "beta2", "min_lr_ratio"):
        if not 0 <= getattr(o, name) < 1:
            raise ValueError(f"optimizer.{name}={getattr(o, name)} must lie in [0, 1).")
    if d.seq_len > c.model.max_positions:
        raise ValueError(
            f"data.seq_len={d.seq_len} exceeds model.max_positions={c.model.max_positions}; "
            "shorten the sequence or raise the positions."
        )
    if d.batch_size % t.num_microbatches:
        divisors = [n for n in range(1, d.batch_size + 1) if d.batch_size % n == 0]
        raise ValueError(
            f"data.batch_size={d.batch_size} does not divide into train.num_microbatches={t.num_microbatches}; "
            f"use one of {divisors}."
        )
    if o.horizon_steps <= o.warmup_steps:
        raise ValueError(
            f"optimizer.horizon_steps={o.horizon_steps} must exceed optimizer.warmup_steps={o.warmup_steps}."
        )
    if t.eval_tasks and not all(t.eval_tasks.split(",")):
        raise ValueError(f"train.eval_tasks={t.eval_tasks!r} has an empty name; give NAME,NAME without spaces.")
    for name in ("every_steps", "limit", "folder"):
        value = getattr(t, f"eval_tasks_{name}")
        if value and not t.eval_tasks:
            raise ValueError(f"train.eval_tasks_{name}={value} without train.eval_tasks: name tasks, or leave it out.")
    if t.eval_loss_high < t.eval_loss_low:
        raise ValueError(f"train.eval_loss_high={t.eval_loss_high} is below train.eval_loss_low={t.eval_loss_low}.")
