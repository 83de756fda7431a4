"""Turns a ConfigDict into a frozen Config, after all checks that need no files and no devices.

Checks that depend on the number of devices are in `parallel.degrees`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from hlat_jax.config import (
    SECTIONS,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    check_bounds,
    check_section,
    convert_value,
    field_of,
)
from hlat_jax.facts.number_ranges import parse_ranges
from hlat_jax.facts.policies import POLICY_FACTS


def resolve(mutable: Any) -> Config:
    """Returns the frozen Config of a ConfigDict (or of a nested dict) after all checks that need no files or devices.

    Raises:
      ValueError: a key is unknown or missing, a value has a wrong type or is not among the choices, or values
        contradict each other. The message has the path, the numbers and the remedy.
    """
    tree = mutable if isinstance(mutable, dict) else mutable.to_dict()
    for name in sorted(set(tree) - {"name"}):
        check_section(name, tree[name])
    sections = {name: _section(name, cls, tree.get(name, {})) for name, cls in SECTIONS.items()}
    config = Config(name=tree.get("name", "custom"), **sections)
    is_plain = isinstance(config.name, str) and config.name.isprintable() and "/" not in config.name
    if not is_plain or config.name.startswith((".", "-")) or not 0 < len(config.name.encode()) <= 255:
        raise ValueError(
            f"config.name={repr(config.name)[:100]} must not contain '/' or begin with '.' or '-'. It names the run "
            "folder, runs/NAME."
        )
    for name in SECTIONS:
        check_bounds(name, getattr(config, name))
    config.model.check()
    check_parallel(config.parallel, config.model)
    check_training(config)
    return config


def _section(name: str, cls: type, values: dict[str, Any]) -> Any:
    fields = {key: field_of(name, key) for key in values}
    missing = sorted({field.name for field in dataclasses.fields(cls)} - set(fields))
    if missing:
        raise ValueError(
            f"config lacks {name}.{missing[0]}. Start from hlat_jax.config.default(), which has every key."
        )
    for key, value in values.items():
        check_unicode(f"{name}.{key}", value)
    return cls(**{key: convert_value(f"{name}.{key}", fields[key], value) for key, value in values.items()})


def check_unicode(what: str, value: Any) -> None:
    """Raises ValueError for text of a command line that is not UTF-8. The message begins with `what`."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{what}={value[:100]!a} is not UTF-8.") from None


def check_parallel(parallel: ParallelConfig, model: ModelConfig) -> None:
    """Raises ValueError for degrees that no number of devices allows. Called again after a degree of -1 is resolved."""
    degrees = {name: getattr(parallel, name) for name in ("pipe", "data", "fsdp", "context", "tensor")}
    for name, degree in degrees.items():
        if degree < 1 and degree != -1:
            raise ValueError(f"parallel.{name}={degree} must be positive, or -1 for all remaining devices.")
    if sum(degree == -1 for degree in degrees.values()) > 1:
        raise ValueError(f"parallel={degrees} has several degrees of -1. At most one may be -1.")
    tensor, kv, heads = parallel.tensor, model.num_kv_heads, model.num_heads
    if tensor > 1 and (kv % tensor and (tensor % kv or heads % tensor)):
        allowed = [d for d in range(1, heads + 1) if heads % d == 0 and (kv % d == 0 or d % kv == 0)]
        raise ValueError(
            f"parallel.tensor={tensor} must divide model.num_kv_heads={kv}, or be a multiple of it that divides "
            f"model.num_heads={heads}. Use one of {allowed}."
        )
    if parallel.context > 1 and model.attention not in ("auto", "chunked"):
        raise ValueError(
            f"parallel.context={parallel.context} splits rows, but model.attention={model.attention!r} needs "
            "whole rows. Set model.attention='chunked' or 'auto', or parallel.context=1."
        )
    if parallel.pipe > 1 and model.num_layers % parallel.pipe:
        divisors = [d for d in range(1, model.num_layers + 1) if model.num_layers % d == 0]
        raise ValueError(
            f"parallel.pipe={parallel.pipe} must divide model.num_layers={model.num_layers}. Use one of {divisors}."
        )
    if parallel.pipe > 1 and parallel.reduce_gradients == "microbatch":
        raise ValueError(
            f"parallel.pipe={parallel.pipe} excludes parallel.reduce_gradients='microbatch', because stages hold "
            "gradients of several microbatches. Set parallel.reduce_gradients='step' or parallel.pipe=1."
        )


def export_problem(model: ModelConfig) -> str:
    """Returns the reason why transformers cannot load an export of a model, with the remedy, or "" if it can.

    Source: transformers 5, the configurations and models of llama, mistral, qwen2 and qwen3.
    """
    if model.out_bias and not model.qkv_bias:
        return "transformers supports model.out_bias only with model.qkv_bias. Set both, or neither"
    if model.qkv_bias and model.qk_norm and not model.out_bias:
        return (
            "transformers supports model.qkv_bias with model.qk_norm only with model.out_bias. Set model.out_bias too, "
            "or unset one of the two"
        )
    if model.qk_norm or (model.qkv_bias and not model.out_bias):  # a Qwen
        return ""
    if model.out_bias and model.sliding_window:
        return "transformers supports model.out_bias with model.sliding_window only with model.qk_norm. Set it too"
    if model.sliding_window_layers:
        return "transformers supports model.sliding_window_layers only with model.qk_norm or model.qkv_bias"
    if model.sliding_window:  # a Mistral
        return ""
    width, heads = model.embed_dim, model.num_heads
    if width % heads:
        below = next(count for count in range(heads, 0, -1) if width % count == 0)
        above = next(count for count in range(heads, width + heads) if width % count == 0 or count > width)
        near = f"{below} or {above}" if above <= width else str(below)
        return (
            f"transformers refuses model.num_heads={heads}, which does not divide model.embed_dim={width}. Use "
            f"{near} heads, with any model.head_dim"
        )
    if model.init_std > 1:
        return f"transformers refuses model.init_std={model.init_std}. Use 0 to 1"
    return ""


def check_policy(policy: str, *, pipe: int) -> None:
    """Raises ValueError for a policy that excludes pipeline stages. Called again after a degree of -1 is resolved."""
    if policy == "autocast" and pipe > 1:
        raise ValueError(
            f"precision.policy=autocast excludes parallel.pipe={pipe}, because autocast transforms a whole loss "
            "function. Set precision.policy='mixed' or parallel.pipe=1."
        )


def branch_source(train: TrainConfig) -> tuple[str, int] | None:
    """Returns (run folder, step) of `train.branch_from`, or None if it is empty. Raises ValueError for another form."""
    if not train.branch_from:
        return None
    match = re.fullmatch("(.+)@([0-9]{1,9})", train.branch_from)
    if not match or not int(match[2]):
        raise ValueError(
            f"train.branch_from={train.branch_from!r} must be RUN@STEP, such as runs/tiny@300. RUN is a run folder, "
            "and STEP is the step of one of its checkpoints."
        )
    step = int(match[2])
    if train.init_from:
        raise ValueError(
            f"train.branch_from={train.branch_from} and train.init_from={train.init_from} both give the initial "
            "weights. Unset one of them."
        )
    if step >= train.num_steps:
        raise ValueError(
            f"train.branch_from={train.branch_from} leaves no step to train. Raise train.num_steps={train.num_steps} "
            f"above {step}."
        )
    return match[1], step


def profiled_steps(train: TrainConfig) -> range:
    """Returns the steps that `train.profile_steps` names. Raises ValueError if the run does not have such steps."""
    if not train.profile_steps:
        return range(0)
    match = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", train.profile_steps)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last <= train.num_steps:
        raise ValueError(
            f"train.profile_steps={train.profile_steps!r} must be FIRST:LAST with 1 <= FIRST <= LAST <= "
            f"train.num_steps={train.num_steps}, such as 10:13 for four steps. Leave it empty to trace none."
        )
    return range(first, last + 1)


def skipped_batches(skip_steps: str) -> tuple[range, ...]:
    """Returns the numbers of the batches that `train.skip_steps` leaves out, as `parse_ranges` does."""
    return parse_ranges("train.skip_steps", skip_steps, example="1200:1400 for 201 batches")


def batch_of_step(step: int, skipped: Sequence[range]) -> int:
    """Returns the number of the batch that a step trains on, which equals the number of batches passed after it."""
    batch = step
    for part in skipped:
        batch += len(part) if part.start <= batch else 0
    return batch


def held_out_share(validation: str) -> float:
    """Returns the share of data.train that a data.validation such as "5%" holds out, or 0 for any other value.

    Raises:
      ValueError: the share is not above 0% and at most 50%.
    """
    match = re.fullmatch(r"\s*([0-9.+-]+)\s*%\s*", validation)
    if not match:
        return 0.0
    try:
        share = float(match[1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 0.5:
        raise ValueError(f"data.validation={validation!r} must be above 0% and at most 50% of data.train.")
    return share


# Optimizer keys that only count with one value of another key.
_ONLY_WITH = {
    "cooldown_steps": ("schedule", "wsd"),
    "cooldown": ("schedule", "wsd"),
    "muon_beta": ("name", "muon"),
    "muon_lr_ratio": ("name", "muon"),
}


def check_optimizer(o: OptimizerConfig) -> None:
    """Raises ValueError for keys without effect, and for a schedule with parts that exceed its horizon."""
    for name, (key, wanted) in _ONLY_WITH.items():
        value, chosen = getattr(o, name), getattr(o, key)
        if chosen != wanted and value != field_of("optimizer", name).default:
            raise ValueError(
                f"optimizer.{name}={value} has no effect with optimizer.{key}={chosen!r}. Unset it, or set "
                f"optimizer.{key}={wanted!r}."
            )
    if o.schedule == "wsd" and not o.cooldown_steps:
        raise ValueError(
            "optimizer.schedule='wsd' needs optimizer.cooldown_steps, such as a fifth of optimizer.horizon_steps. "
            "For a schedule without a decay, set optimizer.schedule='constant'."
        )
    if o.schedule != "constant" and not o.warmup_steps <= o.decay_start < o.horizon_steps:
        names = ("warmup_steps", "cooldown_steps")
        parts = ", ".join(f"optimizer.{name}={getattr(o, name)}" for name in names)
        raise ValueError(
            f"optimizer.horizon_steps={o.horizon_steps} is too short for {parts}. Raise optimizer.horizon_steps, or "
            "lower the others."
        )


def check_training(c: Config) -> None:
    """Raises ValueError for settings outside their range, and for settings that contradict each other."""
    o, d, t = c.optimizer, c.data, c.train
    if c.precision.stochastic_rounding != "auto" and POLICY_FACTS[c.precision.policy].rounding != "stochastic":
        raise ValueError(
            f"precision.stochastic_rounding={c.precision.stochastic_rounding!r} has no effect with precision.policy="
            f"{c.precision.policy!r}, which rounds to nearest. Set precision.policy='bf16_sr', or unset this key."
        )
    check_policy(c.precision.policy, pipe=c.parallel.pipe)
    held_out_share(d.validation)  # raises for a share out of range
    if not 0 < t.spike_sigmas < math.inf:
        raise ValueError(f"train.spike_sigmas={t.spike_sigmas} must be above 0 and finite, such as 6.0.")
    if c.checkpoint.export_every_steps and (problem := export_problem(c.model)):
        raise ValueError(f"checkpoint.export_every_steps={c.checkpoint.export_every_steps}: {problem}.")
    for name in ("beta1", "beta2", "muon_beta", "min_lr_ratio"):
        if not 0 <= getattr(o, name) < 1:
            raise ValueError(f"optimizer.{name}={getattr(o, name)} must lie in [0, 1).")
    if d.seq_len > c.model.max_positions:
        raise ValueError(
            f"data.seq_len={d.seq_len} exceeds model.max_positions={c.model.max_positions}. "
            "Lower data.seq_len, or raise model.max_positions."
        )
    if not t.num_microbatches:
        raise ValueError(
            "train.num_microbatches=0 must be positive, or -1 for microbatches of one row of each replica."
        )
    if d.batch_size % t.num_microbatches:
        divisors = [n for n in range(1, d.batch_size + 1) if d.batch_size % n == 0]
        raise ValueError(
            f"data.batch_size={d.batch_size} is not a multiple of train.num_microbatches={t.num_microbatches}. "
            f"Set train.num_microbatches to one of {divisors}."
        )
    if t.check_devices_every_steps and c.precision.simulate != "none":
        raise ValueError(
            f"train.check_devices_every_steps={t.check_devices_every_steps} excludes precision.simulate="
            f"{c.precision.simulate!r}, whose step is one program. Set one of them to its default."
        )
    check_optimizer(o)
    profiled_steps(t)
    skipped_batches(t.skip_steps)
    branch_source(t)
    if t.eval_tasks and not all(t.eval_tasks.split(",")):
        raise ValueError(f"train.eval_tasks={t.eval_tasks!r} has an empty name. Write NAME,NAME without spaces.")
    for name in ("every_steps", "limit", "folder"):
        value = getattr(t, f"eval_tasks_{name}")
        if value and not t.eval_tasks:
            raise ValueError(
                f"train.eval_tasks_{name}={value} has no effect without train.eval_tasks. Set train.eval_tasks too, or "
                "unset this key."
            )
    if (c.checkpoint.keep_best or t.early_stop_evals) and not (d.validation and t.eval_every_steps):
        raise ValueError(
            "checkpoint.keep_best and train.early_stop_evals need validations during training. Set data.validation "
            f"(now {d.validation!r}) and train.eval_every_steps (now {t.eval_every_steps})."
        )
    if t.sample_every_steps and not t.sample_prompt:
        raise ValueError(f"train.sample_every_steps={t.sample_every_steps} needs a prompt. Set train.sample_prompt.")
    if t.eval_loss_high < t.eval_loss_low:
        raise ValueError(
            f"train.eval_loss_high={t.eval_loss_high} is below train.eval_loss_low={t.eval_loss_low}. Raise "
            "train.eval_loss_high, or lower train.eval_loss_low."
        )
