"""All settings of a run as frozen dataclasses, with type, unit, meaning and default of each. Imports no JAX.

`default()` returns an `ml_collections.ConfigDict` with every key. A config module edits it. `resolve.resolve` checks it
and returns a `Config`, the form that the rest of the package uses.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_type_hints

from hlat_jax.facts.byte_sizes import parse_bytes
from hlat_jax.facts.local_paths import check_local
from hlat_jax.facts.names import nearest
from hlat_jax.facts.number_ranges import parse_ranges
from hlat_jax.facts.policies import POLICY_FACTS

HELD_OUT = "5%"  # of a user's own text, where the config has validation text of another


# The keys of a model that choose an implementation; `ops.registry` has the ops.
OP_KEYS = ("attention", "cross_entropy")


def count_text(count: int, noun: str) -> str:
    """Returns "1 document", "0 documents" or "1,200 batches"."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def check_choice(path: str, field: dataclasses.Field, value: Any) -> None:
    """Raises ValueError for a value outside the key's choices. The message names the nearest choice."""
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"{path}={value!r} is not one of {', '.join(choices)}. {nearest(str(value), choices)}")


def check_bounds(section: str, values: Any) -> None:
    """Raises ValueError for a value of a section that is outside the bounds of its key, or not finite."""
    for field in dataclasses.fields(values):
        path, value = f"{section}.{field.name}", getattr(values, field.name)
        least, most = field.metadata["least"], field.metadata["most"]
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path}={value} must be finite.")
        if least is not None and value < least:
            raise ValueError(f"{path}={value} must be at least {least}.")
        if most is not None and value > most:  # far beyond any model: a mistake, or made to exhaust a machine
            raise ValueError(f"{path}={value} must be at most {most}.")


def _key(
    default: Any,
    doc: str,
    *,
    choices: tuple = (),
    least: float | None = None,
    most: int | None = None,
    is_path: bool = False,
    is_bucket: bool = False,
) -> Any:
    metadata = {"doc": doc, "choices": choices, "least": least, "most": most}
    metadata |= {"is_path": is_path or is_bucket, "is_bucket": is_bucket}  # of a bucket, or local
    return dataclasses.field(default=default, metadata=metadata)


# The keys that each scaling of the rotary frequencies reads.
ROPE_SCALING = {
    "none": (),
    "linear": ("rope_factor",),
    "llama3": ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_positions"),
    "yarn": ("rope_factor", "rope_original_positions", "rope_beta_fast", "rope_beta_slow", "rope_attention_factor"),
}
_CROSS_ENTROPY = ("auto", "dense", "chunked", "reference")
_ATTENTION = ("auto", "einsum", "blocked", "chunked", "cudnn", "triton", "nki")


# Values that layers name and a backward pass may keep. HLAT recomputes core attention and the SwiGLU product and saves
# every linear's input and RoPE's results. Source: arXiv 2404.10630 III-D and its published modeling code.
_SELECTIVE = ("attn_norm", "q", "k", "v", "attn_out", "residual", "mlp_norm", "gate", "up")
# The results of products and of attention; norms, activations and core attention are recomputed. On cpu that costs less
# than the fresh memory that they would fill.
_PRODUCTS = ("q", "k", "v", "attn_out", "residual", "gate", "up")
# Of `jax.checkpoint_policies`, by how much they save.
STOCK_POLICIES = ("everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")


@dataclasses.dataclass(frozen=True)
class Remat:
    """A parsed value of `model.remat`, the choice of values that the backward pass recomputes.

    Attributes:
      kind: one of "auto" (chosen by platform), "none", "full", "names", "saved", "policy" or "budget". "full" saves
        only the inputs of layers. "names" adds values that layers name, and "saved" values of any name, chosen for a
        budget. "policy" saves by a policy of `jax.checkpoint`. "budget" needs a choice of values.
      saved: the names of the values for kinds "names" and "saved".
      policy: one of `STOCK_POLICIES`, for kind "policy".
      budget_bytes: the bytes for the temporaries of a step on one device, for kind "budget".
    """

    kind: str
    saved: tuple[str, ...] = ()
    policy: str = ""
    budget_bytes: int = 0


def parse_remat(text: str) -> Remat:
    """Returns the parsed value of `model.remat`. Raises ValueError for any other text."""
    if text in ("auto", "none", "full"):
        return Remat(text)
    if text in ("selective", "products"):
        return Remat("names", _SELECTIVE if text == "selective" else _PRODUCTS)
    kind, colon, rest = text.partition(":")
    names = tuple(name.strip() for name in rest.split(",") if name.strip())
    if kind == "names" and colon:
        if unknown := set(names) - set(_SELECTIVE):
            raise ValueError(
                f"model.remat={text!r} has unknown names: {', '.join(sorted(unknown))}. Use {', '.join(_SELECTIVE)}."
            )
        return Remat(kind, names)
    if kind == "saved" and colon:
        return Remat(kind, names)
    if kind == "policy" and rest in STOCK_POLICIES:
        return Remat(kind, policy=rest)
    if kind == "budget" and colon:
        return Remat(kind, budget_bytes=parse_bytes(rest, name="model.remat: the budget"))
    raise ValueError(
        f"model.remat={text!r} must be auto, none, full, selective, products, names:A,B,..., saved:A,B,..., "
        f"policy:{', policy:'.join(STOCK_POLICIES)} or budget:12GiB."
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-architecture decoder. `Decoder(ModelConfig(...))` needs no other section."""

    vocab_size: int = _key(32000, "Number of token ids. 0 takes data.tokenizer's.", least=1, most=1 << 24)
    num_layers: int = _key(2, "Decoder layers.", least=1, most=10_000)
    embed_dim: int = _key(64, "Width of the residual stream.", least=1, most=1 << 20)
    mlp_dim: int = _key(176, "Hidden width of the SwiGLU block.", least=1, most=1 << 22)
    num_heads: int = _key(4, "Query heads.", least=1, most=1 << 16)
    num_kv_heads: int = _key(4, "Key and value heads. It must divide num_heads.", least=1, most=1 << 16)
    head_dim: int = _key(16, "Width of one head, an even number.", least=1, most=1 << 16)
    max_positions: int = _key(4096, "Longest sequence that the model supports, in tokens.", least=1, most=1 << 30)
    norm_eps: float = _key(1e-5, "Added to the mean square inside RMSNorm.", least=0)
    rope_theta: float = _key(10000.0, "Base of the rotary frequencies.")
    rope_scaling: str = _key("none", "Scaling of the rotary frequencies.", choices=tuple(ROPE_SCALING))
    rope_factor: float = _key(8.0, "Divisor of all rotary frequencies (linear) or of the low ones.")
    rope_low_freq_factor: float = _key(1.0, "llama3: full scaling above wavelengths of original positions / this.")
    rope_high_freq_factor: float = _key(4.0, "llama3: no scaling below wavelengths of original positions / this.")
    rope_original_positions: int = _key(8192, "Positions before llama3 or yarn scaling.", least=1)
    rope_beta_fast: float = _key(32.0, "yarn: no scaling of pairs with more rotations in the original positions.")
    rope_beta_slow: float = _key(1.0, "yarn: full scaling of pairs with fewer rotations in the original positions.")
    rope_attention_factor: float = _key(
        0.0, "yarn: factor of rotated queries and keys. 0 means 0.1 ln(rope_factor) + 1.", least=0
    )
    qkv_bias: bool = _key(False, "Queries, keys and values have biases, as in Qwen 2.")
    out_bias: bool = _key(False, "Attention's output has a bias, as in Llama and Qwen 3 with attention_bias.")
    qk_norm: bool = _key(False, "RMSNorm on every head of queries and keys, before the rotation, as in Qwen 3.")
    sliding_window: int = _key(
        0, "Keys that a query attends to, its key included (Mistral). 0 means all.", least=0, most=1 << 30
    )
    sliding_window_layers: str = _key("", "Layers with the window, FIRST:LAST,FIRST:LAST, from 1. Empty means all.")
    tie_embeddings: bool = _key(False, "The output head shares the embedding table.")
    fuse_qkv: bool = _key(True, "One projection for Q, K and V (HLAT-7B). False separates Q from KV (HLAT-70B).")
    init_std: float = _key(0.02, "Standard deviation of initial weights.", least=0)
    depth_scaled_init: bool = _key(True, "Output projections start at init_std / sqrt(2 * num_layers).")
    layer_loop: str = _key(
        "auto", "Scan or unroll the layers. auto unrolls on Neuron.", choices=("auto", "scan", "unroll")
    )
    remat: str = _key(
        "auto",
        "Recompute in backward: auto, none, full, selective (HLAT), products, names:A,B to save, budget:12GiB to fit.",
    )
    attention: str = _key("auto", "Attention implementation.", choices=_ATTENTION)
    allow_nki_on_trn1: bool = _key(
        False, "Allow attention=nki on trn1, documented to SDK 2.28. auto does not choose it there."
    )
    cross_entropy: str = _key("auto", "Cross-entropy implementation.", choices=_CROSS_ENTROPY)

    def check(self) -> None:
        """Raises ValueError for a model that cannot be built. `resolve` and `Decoder` call it."""
        for field in dataclasses.fields(self):
            check_choice(f"model.{field.name}", field, getattr(self, field.name))
        for name in ("rope_theta", "rope_factor", "rope_low_freq_factor", "rope_beta_slow"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be above 0.")
        if self.rope_scaling == "yarn" and self.rope_theta <= 1:  # else its pairs have no order
            raise ValueError(f"model.rope_theta={self.rope_theta} must be above 1 with model.rope_scaling='yarn'.")
        check_bounds("model", self)
        if self.num_heads % self.num_kv_heads:
            divisors = [d for d in range(1, self.num_heads + 1) if self.num_heads % d == 0]
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} must divide model.num_heads={self.num_heads}. "
                f"Use one of {divisors}."
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even, as rotary embeddings rotate pairs.")
        for upper, lower in (("rope_high_freq_factor", "rope_low_freq_factor"), ("rope_beta_fast", "rope_beta_slow")):
            if getattr(self, upper) <= getattr(self, lower):
                raise ValueError(
                    f"model.{upper}={getattr(self, upper)} must exceed model.{lower}={getattr(self, lower)}."
                )
        if self.sliding_window_layers and not self.sliding_window:
            raise ValueError(
                f"model.sliding_window_layers={self.sliding_window_layers!r} has no effect without "
                "model.sliding_window. Set model.sliding_window too, or unset this key."
            )
        if self._window_ranges() and self._window_ranges()[-1].stop > self.num_layers + 1:
            raise ValueError(
                f"model.sliding_window_layers={self.sliding_window_layers!r} goes beyond model.num_layers="
                f"{self.num_layers}. End it at {self.num_layers} or before."
            )
        parse_remat(self.remat)

    @property
    def parsed_remat(self) -> Remat:
        """The parsed value of `remat`."""
        return parse_remat(self.remat)

    def windows(self, num_keys: int) -> tuple[int, ...]:
        """Returns the largest number of keys, at most `num_keys`, that a query attends to in each layer."""
        window = min(self.sliding_window or num_keys, num_keys)
        numbers = range(1, self.num_layers + 1)
        ranges = self._window_ranges() or (numbers,)
        return tuple(window if any(number in part for part in ranges) else num_keys for number in numbers)

    def _window_ranges(self) -> tuple[range, ...]:
        return parse_ranges("model.sliding_window_layers", self.sliding_window_layers, example="29:36 for 8 layers")


# What `auto` is: on the platform that is named, and on all others. On Neuron layers are unrolled, as in AXLearn: the
# compiler finds repeated blocks, and its time does not grow with the number of layers; a scan needs undocumented flags
# in AXLearn's forks. We have run neither there. Source: apple/axlearn, experiments/text/gpt/fuji.py, modifier for trn2.
_AUTO = {
    "remat": ("cpu", "products", "none"),
    "layer_loop": ("neuron", "unroll", "scan"),
    "accumulate": ("neuron", "programs", "scan"),
}


def select(key: str, value: str, platform: str) -> str:
    """Returns a value of `model.remat`, `model.layer_loop` or `train.accumulate`, with `auto` resolved."""
    named, there, elsewhere = _AUTO[key]
    return value if value != "auto" else there if platform == named else elsewhere


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Degrees of the device mesh, outermost first. At most one may be -1, for all remaining devices."""

    pipe: int = _key(1, "Pipeline stages.")
    data: int = _key(-1, "Replicas of the parameters.")
    fsdp: int = _key(1, "Shards of parameters and optimizer state, gathered for use.")
    context: int = _key(1, "Parts of the sequence of each row.")
    tensor: int = _key(1, "Megatron tensor parallel degree.")
    zero1: bool = _key(False, "Shard optimizer state and master weights over data.")
    sequence_parallel: bool = _key(False, "Shard activations between blocks over tensor along the sequence.")
    reduce_gradients: str = _key(
        "step",
        "Sum gradients over data once a step, or after each microbatch (ZeRO-2 with zero1).",
        choices=("step", "microbatch"),
    )
    pipe_exchange: str = _key(
        "permute",
        "Stages send to their neighbors by a permute, or gather the values of all stages and take the one they need.",
        choices=("permute", "all_gather"),
    )
    bucket_bytes: int = _key(0, "Largest collective that gradients share, per device. 0 means one for each.", least=0)


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of storage, compute and accumulation, and how stored values are rounded."""

    policy: str = _key("fp32", "Dtypes and rounding by name, see hlat_jax.precision.", choices=tuple(POLICY_FACTS))
    stochastic_rounding: str = _key(
        "auto",
        "Unit that rounds for bf16_sr. auto means hardware on Neuron, software elsewhere.",
        choices=("auto", "hardware", "software"),
    )
    simulate: str = _key(
        "none",
        "Simulate the rounding of a Neuron core. neuron_all also rounds fp32.",
        choices=("none", "neuron", "neuron_all"),
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon, the learning-rate schedule, and clipping. Defaults are HLAT-7B's."""

    name: str = _key(
        "adamw",
        "Optimizer. muon is for the matrices of layers, with AdamW for the rest.",
        choices=("adamw", "muon"),
    )
    schedule: str = _key(
        "cosine",
        "Learning rate after warm-up. wsd is constant and ends with a cooldown.",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    peak_lr: float = _key(3e-4, "Learning rate at the end of warm-up.", least=0)
    min_lr_ratio: float = _key(0.1, "Share of the peak at which every decay, which goes to zero, is clipped.")
    warmup_steps: int = _key(2000, "Steps of linear warm-up from 0.", least=0)
    horizon_steps: int = _key(500_000, "Step at which the decay would reach zero. train.num_steps ends a run.", least=1)
    cooldown_steps: int = _key(0, "Steps of the decay of wsd, which ends at horizon_steps.", least=0)
    cooldown: str = _key("linear", "Shape of the decay of wsd. sqrt is 1 - sqrt(progress).", choices=("linear", "sqrt"))
    beta1: float = _key(0.9, "Decay of the first moment.")
    beta2: float = _key(0.95, "Decay of the second moment.")
    eps: float = _key(1e-8, "Added to the root of the second moment.", least=0)
    weight_decay: float = _key(0.1, "Decoupled weight decay, times the learning rate.", least=0)
    decay: str = _key(
        "all",
        "Parameters that decay. matrices excludes norms and biases; HLAT decays all.",
        choices=("all", "matrices"),
    )
    clip_norm: float = _key(1.0, "Maximum global gradient norm. 0 turns clipping off.", least=0)
    muon_beta: float = _key(0.95, "Decay of Muon's Nesterov momentum.")
    muon_lr_ratio: float = _key(1.0, "Learning rate of Muon's matrices relative to the others.", least=0)

    @property
    def decay_start(self) -> float:
        """The step of the first update of the decay, which has the peak rate, or infinity for a constant schedule."""
        if self.schedule == "constant":
            return math.inf
        if self.schedule == "wsd":
            return self.horizon_steps - self.cooldown_steps
        return self.warmup_steps


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Sources of text, and how text becomes batches."""

    train: str = _key(
        "", "Training text: PATHS, or NAME=PATHS;NAME=PATHS. PATHS are files, folders or globs, by commas."
    )
    validation: str = _key("", "Held-out text like data.train, or a share of data.train such as 5%. Empty means none.")
    mixture: str = _key("", "Shares of sources by stage: 'A=3,B=1 until_step=9;A=1,B=1'. until_tokens= works too.")
    text_field: str = _key("text", "Column or JSONL key (no comma) of text. For JSONL also PROMPT,ANSWER or messages.")
    tokenizer: str = _key(
        "", "A SentencePiece .model or a tokenizer.json. 'package:NAME' ships with hlat_jax.", is_path=True
    )
    batch_size: int = _key(8, "Sequences in a step of the whole job.", least=1)
    seq_len: int = _key(256, "Tokens per sequence.", least=2)
    packing: str = _key("concat", "How documents fill rows.", choices=("concat", "documents"))
    window_documents: int = _key(256, "Documents that packing=documents packs together.", least=1)
    prepend_bos: bool = _key(False, "Begin every document with BOS, in evaluation and generation too.")
    max_document_chars: int = _key(500_000, "Longer documents are cut into pieces of this many characters.", least=1)
    on_bad_record: str = _key("raise", "Action for a record without usable text.", choices=("raise", "skip"))
    shuffle: bool = _key(True, "Visit documents in a seeded order, another in every epoch.")
    seed: int = _key(1234, "Seed of the document order.")
    num_threads: int = _key(2, "Threads that read and tokenize ahead. Batches do not depend on it.", least=0)
    prefetch_batches: int = _key(4, "Batches prepared ahead. Batches do not depend on it.", least=1)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The training loop: steps, initial weights, loss, evaluation and samples."""

    num_steps: int = _key(100, "The run stops after this many optimizer steps.", least=0)
    seed: int = _key(0, "Seed of the initial weights.")
    init_from: str = _key(
        "",
        "Run, checkpoint or Hugging Face folder with weights, model and tokenizer. Empty means random.",
        is_bucket=True,
    )
    branch_from: str = _key(
        "",
        "RUN@STEP: start from this checkpoint of another run, with optimizer and data position.",
        is_path=True,
    )
    num_microbatches: int = _key(
        1, "Parts of a batch for gradient accumulation. -1 means parts of one row of each replica.", least=-1
    )
    accumulate: str = _key(
        "auto",
        "Run microbatches in a loop of one program, or as one program each. auto uses programs on Neuron.",
        choices=("auto", "scan", "programs"),
    )
    compiler_flags: str = _key("", "Flags for neuronx-cc. NEURON_CC_FLAGS takes precedence.")
    z_loss_weight: float = _key(0.0, "Weight of the squared log-normaliser in the loss.", least=0)
    eval_every_steps: int = _key(0, "Steps between validations, with one at the end. 0 means only the last.", least=0)
    num_eval_batches: int = _key(
        8, "Batches of a validation of each source, spread over its documents. 0 means all text.", least=0
    )
    early_stop_evals: int = _key(
        0, "Validations in a row without a lowest loss that end training. 0 means never.", least=0
    )
    eval_tasks: str = _key("", "Tasks of the LM Evaluation Harness, NAME,NAME. They need the eval extra.")
    eval_tasks_every_steps: int = _key(
        0, "Steps between runs of the tasks, which also run before the first step and at the end.", least=0
    )
    eval_tasks_limit: int = _key(0, "Number of questions of each task, from the first. 0 means all.", least=0)
    eval_tasks_folder: str = _key("", "Folder with your tasks, as YAML files.", is_path=True)
    max_nonfinite_steps: int = _key(3, "Steps in a row, not finite or without targets, that end the run.", least=1)
    check_devices_every_steps: int = _key(
        0,
        "Steps between checks for silent corruption: replicas compared, a microbatch computed twice. 0 means none.",
        least=0,
    )
    spikes: str = _key(
        "off",
        "Reaction to a loss or gradient norm far above the steps before. skip masks the update.",
        choices=("off", "warn", "skip"),
    )
    spike_sigmas: float = _key(6.0, "A spike is this many standard deviations above the mean of earlier steps.")
    spike_window: int = _key(128, "Earlier steps that count. Half of them must exist.", least=2)
    skip_steps: str = _key(
        "",
        "Batches to leave out, FIRST:LAST,FIRST:LAST, numbered as in a run that leaves none out.",
    )
    eval_loss_low: float = _key(0.0, "Lower end of the expected final validation loss in nats.")
    eval_loss_high: float = _key(0.0, "Upper end of the expected final validation loss in nats. 0 means none.")
    sample_prompt: str = _key("", "Text that the model continues before and after training. Empty means no sample.")
    sample_every_steps: int = _key(0, "Steps between further samples. 0 means none.", least=0)
    sample_tokens: int = _key(64, "Tokens of each sample.", least=0)
    profile_steps: str = _key("", "Steps to trace, FIRST:LAST, such as 10:13 for four.")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints and exports are written, and how many are kept."""

    every_steps: int = _key(
        0, "Steps between saves. A run also saves for exports and at its end. 0 means no others.", least=0
    )
    every_minutes: float = _key(0.0, "Minutes between saves. 0 means none by time.", least=0)
    keep_last: int = _key(3, "Number of newest checkpoints to keep, permanent ones included.", least=1)
    keep_every_steps: int = _key(
        0, "Save at multiples of this too, and keep these saves permanently. 0 means none.", least=0
    )
    keep_best: bool = _key(False, "Save at each lowest validation loss, and keep the last of these as RUN/best.")
    export_every_steps: int = _key(0, "Steps between exports for transformers, one at the end. 0 means none.", least=0)
    copy_to: str = _key(
        "", "Bucket, such as s3://BUCKET/RUN, or folder to copy each checkpoint to. Empty means none.", is_bucket=True
    )


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """Progress lines and records, without influence on training."""

    log_every_steps: int = _key(
        0,
        "Steps between progress lines, one a minute at least. 0 means 10, or 10% of a run without a terminal.",
        least=0,
    )
    console: str = _key("auto", "Progress lines. on prints to a file as to a terminal.", choices=("auto", "on", "off"))
    tensorboard: bool = _key(True, "Write TensorBoard event files into the run folder.")
    wandb_project: str = _key("", "Weights & Biases project. Empty turns it off.")
    plot: bool = _key(True, "Draw loss.png at the end.")
    layer_norms: bool = _key(False, "Record the norms of the gradient and of the update of every layer.")
    source_losses_every_steps: int = _key(
        0, "Steps between losses of each source of data.train, by a forward pass of each. 0 means none.", least=0
    )
    neuron_monitor: str = _key(
        "auto",
        "Record utilization and memory of devices with neuron-monitor. auto does so on Neuron.",
        choices=("auto", "on", "off"),
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run. `name` is the name of the config module. The others are sections."""

    name: str
    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    data: DataConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig

    @property
    def has_eval_step(self) -> bool:
        """Whether the run compiles the loss without gradients."""
        return bool(self.data.validation or self.metrics.source_losses_every_steps)

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain dicts of scalars and strings, for JSON."""
        return dataclasses.asdict(self)


SECTIONS: dict[str, type] = {name: kind for name, kind in get_type_hints(Config).items() if name != "name"}
# Keys with one path of this machine. data.train and data.validation, which hold several, have checks of their own.
PATH_KEYS = tuple(
    f"{section}.{field.name}"
    for section, cls in SECTIONS.items()
    for field in dataclasses.fields(cls)
    if field.metadata["is_path"]
)


def default() -> Any:
    """Returns an `ml_collections.ConfigDict` with every key at its default. `resolve` rejects other keys."""
    import ml_collections  # here, so that models can be imported without it

    tree = {name: {f.name: f.default for f in dataclasses.fields(cls)} for name, cls in SECTIONS.items()}
    return ml_collections.ConfigDict({"name": "custom", **tree})


def check_section(name: str, values: Any) -> None:
    """Raises ValueError unless `name` is a section and its values are a dict."""
    if name not in SECTIONS:
        raise ValueError(f"config has no section {name!r}. {nearest(name, SECTIONS)}")
    if not isinstance(values, dict):
        raise ValueError(f"config.{name}={values!r:.100} is a section. Set its keys one by one.")


def field_of(section: str, key: str) -> dataclasses.Field:
    """Returns the field of a key. If it does not exist, raises ValueError with the nearest key."""
    fields = {field.name: field for field in dataclasses.fields(SECTIONS[section])}
    if key not in fields:
        raise ValueError(f"config has no key {section}.{key}. {nearest(key, fields)}")
    return fields[key]


def convert_value(path: str, field: dataclasses.Field, value: Any) -> Any:
    """Returns the value of a key converted to the type of its default, and a path without `file://`.

    Raises:
      ValueError: the type is wrong, the value is not among the choices, or a path is a URL. The message has `path`.
    """
    kind = type(field.default)
    if kind is float and type(value) is int and abs(value) < 1 << 1023:  # within the range of float
        value = float(value)
    if type(value) is not kind:
        raise ValueError(
            f"{path}={repr(value)[:100]} has type {type(value).__name__}, but must have type {kind.__name__}."
        )
    check_choice(path, field, value)
    use = "bucket" if field.metadata["is_bucket"] else "read"
    return check_local(str(value), key=path, use=use) if field.metadata["is_path"] else value
