"""config.json of Hugging Face's Llama family against our ModelConfig, both ways.

Owns which architectures and fields are understood. A field that is not in one of these tables is refused, since what it
changes would be missing in silence. Where a file leaves a field out, its value is transformers' default.
"""

from __future__ import annotations

from typing import Any

from hlat_jax.config import ModelConfig
from hlat_jax.config_checks import check_model

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
# Ours -> theirs, where the value is the same; with transformers' default for what a file may leave out.
_SAME = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_DEFAULTS = {
    "llama": {"max_position_embeddings": 2048, "sliding_window": None},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
}
_DEFAULTS_OF_ALL = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02, "hidden_act": "silu"}
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
# What our model is; another value is another architecture.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "sliding_window": None,
    "quantization_config": None,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "is_encoder_decoder": False,
}
# What changes nothing that the model computes: ids and texts around it, storage, provenance.
_NEUTRAL = {
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "_commit_hash", "max_sequence_length"),
    *("is_llama_config", "transformers.js_config", "return_dict", "output_hidden_states", "output_attentions"),
    *("id2label", "label2id", "problem_type", "chunk_size_feed_forward", "attn_implementation", "_attn_implementation"),
}
_LLAMA3 = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_positions": "original_max_position_embeddings",
}


def model_config(found: dict[str, Any], *, where: str, fuse_qkv: bool = True) -> ModelConfig:
    """Returns the model of a config.json.

    Args:
      found: its content.
      where: the file, for errors.
      fuse_qkv: as ModelConfig's; the file does not say.

    Raises:
      ValueError: another architecture, a field that is missing, unknown or has a value that our model does not
        implement; the message names the field.
    """
    kind = found.get("model_type")
    ours = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    architectures = found.get("architectures") or [ours]
    if ours is None or architectures != [ours]:
        raise ValueError(
            f"{where}: model_type={kind!r}, architectures={architectures} is not supported; supported are "
            f"{', '.join(f'{name} ({arch})' for name, arch in ARCHITECTURES.items())}."
        )
    values = {**_DEFAULTS_OF_ALL, **_DEFAULTS[kind], **{key: v for key, v in found.items() if v is not None}}
    if "sliding_window" in found:  # null says that there is none
        values["sliding_window"] = found["sliding_window"]
    if found.get("num_key_value_heads", 1) is None:  # as many as num_attention_heads, for Mistral too
        values.pop("num_key_value_heads", None)
    _refuse_unsupported(values, where=where)
    missing = [key for key in _SAME.values() if key not in values and key not in ("num_key_value_heads", "head_dim")]
    if missing:
        raise ValueError(f"{where}: {missing[0]} is missing; fetch that file again.")
    typed = {
        theirs: _number(values[theirs], theirs, ours, where=where) for ours, theirs in _SAME.items() if theirs in values
    }
    heads, width = typed["num_attention_heads"], typed["hidden_size"]
    if "head_dim" not in typed and (heads < 1 or width % heads):
        raise ValueError(f"{where}: hidden_size={width} does not divide into num_attention_heads={heads}.")
    typed.setdefault("num_key_value_heads", heads)
    typed.setdefault("head_dim", width // max(heads, 1))
    fields = {ours: typed[theirs] for ours, theirs in _SAME.items()}
    model = ModelConfig(**fields, **_rope(values, where=where), fuse_qkv=fuse_qkv)
    try:
        check_model(model)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return model


def config_json(m: ModelConfig, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """Returns the content of config.json, in the spelling of RoPE that transformers 4 and 5 both read."""
    scaling = None
    if m.rope_scaling == "llama3":
        scaling = {"rope_type": "llama3", **{theirs: getattr(m, ours) for ours, theirs in _LLAMA3.items()}}
    return {
        "architectures": [ARCHITECTURES["llama"]],
        "model_type": "llama",
        **{theirs: getattr(m, ours) for ours, theirs in _SAME.items()},
        "rope_theta": m.rope_theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def architecture(m: ModelConfig) -> dict[str, Any]:
    """Returns what of a model config.json tells: the fields that must survive a way there and back."""
    keys = [*_SAME, "rope_theta", "rope_scaling", *(_LLAMA3 if m.rope_scaling == "llama3" else ())]
    return {key: getattr(m, key) for key in keys}


def _refuse_unsupported(values: dict[str, Any], *, where: str) -> None:
    known = {*_SAME.values(), *_ROPE, *_ONLY, *_NEUTRAL}
    for key, value in values.items():
        if key in _ONLY and value != _ONLY[key]:
            raise ValueError(f"{where}: {key}={value!r} is not supported; our model has {key}={_ONLY[key]!r}.")
        if key not in known:
            raise ValueError(
                f"{where}: {key}={value!r} is not a field that this converter knows, so what it changes would be "
                "missing; if it changes nothing that the model computes, take it out of a copy of that file."
            )


def _number(value: Any, theirs: str, ours: str, *, where: str) -> Any:
    kind = type(getattr(ModelConfig(), ours))
    if kind is float and type(value) is int and abs(value) < 1 << 1023:  # as far as a float reaches
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{where}: {theirs}={value!r} is {type(value).__name__}; it must be {kind.__name__}.")
    return value


def _rope(values: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Returns our rotary fields from either spelling: rope_theta and rope_scaling, or rope_parameters."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(values.get(key, {}), dict):
            raise ValueError(f"{where}: {key}={values[key]!r} must be an object.")
    rope = dict(values.get("rope_parameters", {}))
    for key, value in values.get("rope_scaling", {}).items():
        if rope.setdefault(key, value) != value:
            raise ValueError(f"{where}: rope_scaling has {key}={value!r}, rope_parameters {rope[key]!r}; keep one.")
    theta = values["rope_theta"] if "rope_theta" in values else rope.get("rope_theta", 10000.0)
    if rope.pop("rope_theta", theta) != theta:
        raise ValueError(f"{where}: rope_theta={theta!r} and another one in rope_parameters; keep one.")
    fields = {"rope_theta": _number(theta, "rope_theta", "rope_theta", where=where)}
    kind, *others = [rope.pop(key) for key in ("rope_type", "type") if key in rope] or ["default"]
    if kind not in ("default", "llama3"):
        raise ValueError(f"{where}: rope_type={kind!r} is not supported; supported are 'default' and 'llama3'.")
    if others not in ([], [kind]):
        raise ValueError(f"{where}: rope_type={kind!r} and type={others[0]!r}; keep one.")
    needed = _LLAMA3 if kind == "llama3" else {}
    if needed:
        fields["rope_scaling"] = kind
    for key in rope.keys() ^ set(needed.values()):
        what = "not a field of" if key in rope else "missing in"
        raise ValueError(f"{where}: {key} is {what} rope_type={kind!r}.")
    return fields | {ours: _number(rope[theirs], theirs, ours, where=where) for ours, theirs in needed.items()}
