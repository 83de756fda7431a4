"""Every setting of a run: frozen dataclasses and their mutable mirror. What they may be is in `config_checks`.

Owns names, types, units, meanings and defaults. Refuses to import JAX: a config is read before JAX may be loaded.
`default()` gives an `ml_collections.ConfigDict` with every key; a config module edits and returns it; `resolve`
turns it into a `Config`, which is the only form the rest of the package sees.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from typing import Any

from hlat_jax.config import check_choice, nearest
from hlat_jax.resolve import check_model, check_parallel, check_run_name, check_training


def _key(default: Any, doc: str, *, choices: tuple = ()) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc, "choices": choices})


_POLICIES = ("fp32", "autocast", "mixed", "bf16_sr", "bf16")
_FUSIBLE = ("auto", "reference", "recomputed")
_ATTENTION = ("auto", "einsum", "blocked", "chunked", "cudnn", "triton", "nki")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-architecture decoder. Complete in itself: `Decoder(ModelConfig(...))` needs nothing else of a run."""

    vocab_size: int = _key(32000, "Token ids run from 0 to vocab_size - 1.")
    num_layers: int = _key(2, "Decoder layers.")
    embed_dim: int = _key(64, "Width of the residual stream.")
    mlp_dim: int = _key(176, "Hidden width of the SwiGLU block.")
    num_heads: int = _key(4, "Query heads.")
    num_kv_heads: int = _key(4, "Key and value heads; divides num_heads.")
    head_dim: int = _key(16, "Width of one head; even.")
    max_positions: int = _key(4096, "Longest sequence the rotary positions are meant for, in tokens.")
    norm_eps: float = _key(1e-5, "Added to the mean square inside RMSNorm.")
    rope_theta: float = _key(10000.0, "Base of the rotary frequencies.")
    rope_scaling: str = _key("none", "Stretching of the rotary frequencies.", choices=("none", "llama3"))
    rope_factor: float = _key(8.0, "llama3 scaling: stretch of the low frequencies.")
    rope_low_freq_factor: float = _key(1.0, "llama3 scaling: original positions / this = longest kept wavelength.")
    rope_high_freq_factor: float = _key(4.0, "llama3 scaling: original positions / this = shortest stretched one.")
    rope_original_positions: int = _key(8192, "llama3 scaling: positions before stretching.")
    tie_embeddings: bool = _key(False, "The output head reuses the embedding table.")
    fuse_qkv: bool = _key(True, "One QKV projection (HLAT-7B); False keeps Q apart from KV (HLAT-70B).")
    init_std: float = _key(0.02, "Standard deviation of initial weights.")
    depth_scaled_init: bool = _key(True, "Output projections start at init_std / sqrt(2 * num_layers).")
    layer_loop: str = _key("scan", "How the equal layers run.", choices=("scan", "unroll"))
    remat: str = _key(
        "auto",
        "Recompute in backward: auto, none, full, selective (HLAT), products, names:A,B to save, budget:12GiB to fit.",
    )
    attention: str = _key("auto", "Attention implementation.", choices=_ATTENTION)
    cross_entropy: str = _key("auto", "Loss from hidden states.", choices=("auto", "dense", "chunked"))
    rms_norm: str = _key("auto", "RMSNorm implementation.", choices=_FUSIBLE)
    swiglu: str = _key("auto", "SwiGLU implementation.", choices=_FUSIBLE)
    rope: str = _key("auto", "Implementation of the rotary embeddings.", choices=("auto", "reference", "paired"))
    tuned: str = _key("", "Table of measured times that auto honours, see hlat_jax.ops tune; empty: levels decide.")


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Degrees of the device mesh, outermost first. At most one may be -1: whatever devices remain."""

    pipe: int = _key(1, "Pipeline stages.")
    data: int = _key(-1, "Replicas of the parameters.")
    fsdp: int = _key(1, "Shards of parameters and optimizer state, gathered for use.")
    tensor: int = _key(1, "Megatron tensor parallel degree.")
    zero1: bool = _key(False, "Shard optimizer state and master weights over data.")
    sequence_parallel: bool = _key(False, "Shard activations between blocks over tensor along the sequence.")
    reduce_gradients: str = _key(
        "step",
        "Sum gradients over data once, after each microbatch (with zero1 that is ZeRO-2), or in the loop over layers.",
        choices=("step", "microbatch", "layer"),
    )
    bucket_bytes: int = _key(0, "Gradients share collectives of up to so many bytes on a device; 0: one each.")


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """What is stored, computed, accumulated and rounded."""

    policy: str = _key("fp32", "Named policy, see hlat_jax.precision.", choices=_POLICIES)
    stochastic_rounding: str = _key(
        "auto",
        "Who rounds, under bf16_sr: Neuron itself, others in software.",
        choices=("auto", "hardware", "software"),
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its learning-rate schedule, clipping. Defaults are HLAT-7B's."""

    peak_lr: float = _key(3e-4, "Learning rate at the end of warm-up.")
    min_lr_ratio: float = _key(0.1, "The cosine runs to zero and is clipped below at this share of the peak.")
    warmup_steps: int = _key(2000, "Steps of linear warm-up from 0.")
    horizon_steps: int = _key(500_000, "Step at which the cosine would reach zero; not where the run stops.")
    beta1: float = _key(0.9, "Decay of the first moment.")
    beta2: float = _key(0.95, "Decay of the second moment.")
    eps: float = _key(1e-8, "Added to the root of the second moment.")
    weight_decay: float = _key(0.1, "Decoupled weight decay, multiplied by the learning rate.")
    decay: str = _key("all", "Parameters that decay: all (HLAT) or matrices (no norms).", choices=("all", "matrices"))
    clip_norm: float = _key(1.0, "Largest global gradient norm; 0 switches clipping off.")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it becomes batches."""

    train: str = _key("", "Training text: PATHS or NAME=PATHS;NAME=PATHS. PATHS: files, folders or globs, by commas.")
    validation: str = _key("", "The same for held-out text; empty: no validation.")
    weights: str = _key("", "Shares of the sources, by stages: 'A=3,B=1 until_step=9;A=1,B=1'. Also until_tokens=.")
    text_field: str = _key("text", "JSONL key or Parquet column that holds the text.")
    tokenizer: str = _key("", "SentencePiece .model, or tokenizer.json. 'package:NAME' ships with hlat_jax.")
    batch_size: int = _key(8, "Sequences per step over the whole job.")
    seq_len: int = _key(256, "Tokens per sequence.")
    packing: str = _key("concat", "How documents fill rows.", choices=("concat", "documents"))
    window_documents: int = _key(256, "Packing documents: so many documents of a row are packed at a time.")
    max_document_chars: int = _key(500_000, "Longer documents are cut into pieces of this many characters, in order.")
    on_bad_record: str = _key("raise", "What a record without usable text does.", choices=("raise", "skip"))
    shuffle: bool = _key(True, "Visit documents in a seeded order that is new in every epoch.")
    seed: int = _key(1234, "Seed of the document order.")
    num_threads: int = _key(2, "Threads that read and tokenize ahead; 0: in the loop. No influence on the batches.")
    prefetch_batches: int = _key(4, "Batches kept ready. No influence on the batches.")
    position_every_steps: int = _key(1000, "Keep the data position every so many steps, for peek; 0: never.")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    num_steps: int = _key(100, "The run stops after this many optimizer steps.")
    seed: int = _key(0, "Seed of the initial weights.")
    init_from: str = _key("", "Weights to begin with: a run folder, a checkpoint or an import; empty: by train.seed.")
    num_microbatches: int = _key(1, "Gradient accumulation: parts that a batch is split into, run one after another.")
    z_loss_weight: float = _key(0.0, "Weight of the squared log-normaliser in the loss.")
    eval_every_steps: int = _key(0, "Validate every so many steps and at the end; 0: at the end only.")
    num_eval_batches: int = _key(
        8, "Batches of one validation, of each source, spread evenly over its documents; 0: all of the text."
    )
    eval_tasks: str = _key("", "Tasks of the LM Evaluation Harness, NAME,NAME; needs the eval extra; empty: none.")
    eval_tasks_every_steps: int = _key(
        0, "Run them every so many steps, before the first and at the end; 0: these two."
    )
    eval_tasks_limit: int = _key(0, "Questions of each task, the first ones; 0: all.")
    eval_tasks_folder: str = _key("", "Folder with tasks of one's own, as YAML; empty: none.")
    max_nonfinite_steps: int = _key(3, "The run stops after this many steps in a row without a finite loss and norm.")
    eval_loss_low: float = _key(0.0, "Lower end of the expected final validation loss in nats; see eval_loss_high.")
    eval_loss_high: float = _key(0.0, "Upper end of the expected final validation loss in nats; 0: no expectation.")
    sample_prompt: str = _key("", "Text continued before and after training; empty: no sample.")
    sample_tokens: int = _key(64, "Tokens of that sample.")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved and how long it is kept."""

    every_steps: int = _key(0, "Save every so many steps; 0: by time and at the end only.")
    every_minutes: float = _key(0.0, "Save when this much time has passed since the last one; 0: never by time.")
    keep_last: int = _key(3, "Rolling checkpoints kept, newest first.")
    keep_every_steps: int = _key(0, "Save at multiples of this too, and keep those for ever; 0: none.")
    export_every_steps: int = _key(0, "Export for transformers every so many steps and at the end, kept; 0: never.")


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """What a person sees and what is written; nothing here touches the training."""

    log_every_steps: int = _key(10, "Steps between lines on the console.")
    console: str = _key("auto", "Progress lines; auto: fewer when not a terminal.", choices=("auto", "on", "off"))
    tensorboard: bool = _key(True, "Write TensorBoard event files into the run folder.")
    wandb_project: str = _key("", "Weights & Biases project; empty: not used.")
    plot: bool = _key(True, "Draw loss.png at the end.")


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run. `name` is that of the config module; the rest are its sections."""

    name: str
    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    data: DataConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain dicts of scalars and strings, fit for JSON."""
        return dataclasses.asdict(self)


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "precision": PrecisionConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "metrics": MetricsConfig,
}


def default() -> Any:
    """Returns an `ml_collections.ConfigDict` with every section and key at its default; `resolve` refuses new keys."""
    import ml_collections  # here, so that importing a model needs none of it

    tree = {name: {f.name: f.default for f in dataclasses.fields(cls)} for name, cls in SECTIONS.items()}
    return ml_collections.ConfigDict({"name": "custom", **tree})


def load(name_or_path: str) -> Any:
    """Returns the ConfigDict of a shipped config (`tiny`) or of a file (`path/to/run.py`), its `name` filled in.

    Raises:
      ValueError: no such name or file, or a file without `get_config`; the message has the nearest name.
    """
    names = shipped()
    is_path = name_or_path.endswith(".py")
    path = pathlib.Path(name_or_path) if is_path else names.get(name_or_path)
    if path is None:
        raise ValueError(f"--config={name_or_path}: no such config. {nearest(name_or_path, names)} Paths end in .py.")
    if not path.is_file():
        raise ValueError(f"--config={name_or_path}: no such file. Shipped configs: {', '.join(names)}.")
    spec = importlib.util.spec_from_file_location(f"hlat_jax_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{path} defines no get_config(); write one that edits and returns hlat_jax.config.default().")
    try:
        config = module.get_config()
    except (AttributeError, KeyError, TypeError) as error:  # what a ConfigDict says to an unknown key or a wrong type
        raise ValueError(f"{path}: {' '.join(str(error.args[0] if error.args else error).split())}") from error
    config.name = path.stem
    return config


def shipped() -> dict[str, pathlib.Path]:
    """Returns the file of every shipped config by its name."""
    return {path.stem: path for path in sorted(config_folder().glob("*.py")) if not path.stem.startswith("_")}


def config_folder() -> pathlib.Path:
    """Returns the folder of the shipped configs: inside an installed package, or beside it in a checkout."""
    package = pathlib.Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def resolve(mutable: Any) -> Config:
    """Returns the frozen Config of a ConfigDict (or of a nested dict) after every check that needs no file or device.

    Raises:
      ValueError: an unknown or missing key, a wrong type, a value outside its choices, or values that do not fit
        each other; the message has the path, the numbers and what to change.
    """
    tree = mutable if isinstance(mutable, dict) else mutable.to_dict()
    unknown = set(tree) - set(SECTIONS) - {"name"}
    if unknown:
        raise ValueError(f"config has no section {min(unknown)!r}. {nearest(min(unknown), SECTIONS)}")
    sections = {name: _section(name, cls, tree.get(name, {})) for name, cls in SECTIONS.items()}
    config = Config(name=tree.get("name", "custom"), **sections)
    check_run_name(config.name)
    check_model(config.model)
    check_parallel(config.parallel, config.model)
    check_training(config)
    return config


def _section(name: str, cls: type, values: dict[str, Any]) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise ValueError(f"config has no key {name}.{key}. {nearest(key, fields)}")
    missing = sorted(set(fields) - set(values))
    if missing:
        raise ValueError(f"config lacks {name}.{missing[0]}; start from hlat_jax.config.default().")
    return cls(**{key: typed(f"{name}.{key}", fields[key], value) for key, value in values.items()})


def typed(path: str, field: dataclasses.Field, value: Any) -> Any:
    """Returns the value of a key in the key's type.

    Raises:
      ValueError: a wrong type, or a value outside the key's choices; the message begins with `path`.
    """
    kind = type(field.default)
    if kind is float and type(value) is int and abs(value) < 1 << 1023:  # as far as a float reaches
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{path}={repr(value)[:100]} is {type(value).__name__}; it must be {kind.__name__}.")
    check_choice(path, field, value)
    return value
