"""Prints the description of a run before its first step."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import jax

from hlat_jax.data.held_out import HeldOut
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.sources import many_unknown, unknown_share
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.host import distributed
from hlat_jax.host.console import say
from hlat_jax.model import param_axes
from hlat_jax.ops.muon import is_hidden
from hlat_jax.ops.registry import OPS
from hlat_jax.program import SIMULATED, RunProgram, state_bytes
from hlat_jax.run import costs


def describe(program: RunProgram) -> None:
    """Prints the model, devices, steps, state and implementations."""
    config, layout = program.config, program.layout
    device = layout.mesh.devices.flat[0]
    degrees = " x ".join(f"{axis} {size}" for axis, size in layout.degrees.items() if size > 1) or "one device"
    step_tokens = config.data.batch_size * config.data.seq_len
    print(f"{config.name}: {layout.mesh.size} x {device.device_kind} ({device.platform}), {degrees}")
    say("parameters", f"{costs.num_params(config.model):,} ({config.precision.policy})")
    vocab_size, num_rows = config.model.vocab_size, layout.vocab_rows(config.model.vocab_size)
    if num_rows > vocab_size:
        say("vocabulary", f"{vocab_size:,} tokens, padded to {num_rows:,} rows for the degrees of pipe and tensor")
    if config.data.packing == "concat":
        counted = step_tokens - config.data.batch_size  # the last token of a row has no target
        say("tokens per step", f"{step_tokens:,}, of which {counted:,} have a target")
    else:
        say("tokens per step", f"{step_tokens:,}, padding and ends of documents included")
    has_decay = config.optimizer.schedule != "constant"
    until = f"of a horizon of {config.optimizer.horizon_steps:,}" if has_decay else "at a constant rate after warm-up"
    say("steps", f"{config.train.num_steps:,} {until}")
    if program.accumulate == "programs":
        say("microbatches", f"{program.num_microbatches:,}, each a separate program (train.accumulate)")
    if (simulate := SIMULATED[config.precision.simulate]) is not None:
        rounding = "stochastically" if program.training.options.policy.rounding == "hardware" else "to nearest"
        say("simulator", f"Neuron core, --auto-cast={simulate}, values in bf16 rounded {rounding}")
    say("state", f"{format_bytes(state_bytes(program.abstract_state))} on the fullest device")
    if config.optimizer.name == "muon":
        _describe_updates(program)
    chosen = [f"{key} {program.choices[key].name} ({program.choices[key].because})" for key in OPS]
    chosen += [f"remat {program.model.remat}", f"layer_loop {program.model.layer_loop}"]
    say("implementations", ", ".join(chosen))


def _describe_updates(program: RunProgram) -> None:
    """Prints a line for each parameter: its update rule, path and shape."""
    params, label = program.abstract_state["params"], "optimizer"
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    for (path, leaf), axes in zip(paths, structure.flatten_up_to(param_axes(program.config.model)), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        say(label, f"{'Muon' if is_hidden(axes) else 'AdamW':<6} {name} {list(leaf.shape)}")
        label = ""


def describe_data(
    batches: TrainBatches, held_out: Mapping[str, HeldOut], *, vocab_size: int, tokenizer: Tokenizer
) -> None:
    """Prints sources, mixture, held-out text, padding rows of the vocabulary and unknown tokens of the run's data."""
    if padding_rows := vocab_size - tokenizer.vocab_size:
        say("vocabulary", f"model.vocab_size has {padding_rows:,} padding rows beyond the tokenizer's vocabulary")
    if len(batches.definition.sources) > 1:
        say("sources", batches.definition.mixture.describe())
    for source in batches.definition.sources:
        if source.notes:
            say("data", f"source {source.name}: {source.notes}")
        if tokenizer.unk_id >= 0:
            share = unknown_share(source.documents, tokenizer)
            say("vocabulary", f"<unk> is {share:.2%} of the tokens of source {source.name}, by a sample")
            if distributed.is_first() and (warning := many_unknown(f"source {source.name}", share)):
                print(warning, file=sys.stderr)
    for name, source in held_out.items():
        say("validation", source.describe(name))
