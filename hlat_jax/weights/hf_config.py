"""Conversion between config.json of Hugging Face's Llama family and our ModelConfig.

A field that is known to change the computation must have a value that our model implements. `unknown_fields` returns
those in no table here. A missing field has transformers' default.
"""

from __future__ import annotations

from typing import Any

from hlat_jax.config import ModelConfig, convert_value, field_of

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
# Ours -> theirs, with equal values; below, transformers' defaults for fields that a file may leave out.
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
# Fields that change the computation in models of these types -> the values that our model implements, besides null.
_SERVED: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0,),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_bias"), (False,)),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "no_rope_layers": (1,),
    "no_rope_layer_interval": (0,),  # without no_rope_layers, which overrides it
    "use_sliding_window": (False,),  # sliding_window has a check of its own
    "layer_types": ("full_attention",),
    "attention_chunk_size": (),
    **dict.fromkeys(("qk_norm", "use_qk_norm"), (False,)),
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), (1.0,)),
    **dict.fromkeys(("attention_multiplier", "clip_qkv", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), ()),
    "logit_softcap": (0,),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"), (0,)),
    "kv_lora_rank": (),
    "quantization_config": ({},),
}
_PER_LAYER = ("layer_types", "no_rope_layers")  # lists with a value for each layer
# Fields of every file that do not change what the model computes, beside token ids.
_DESCRIPTIVE = (
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "pretraining_tp",
)
_KNOWN = {*_SAME.values(), *_ROPE, *_SERVED, *_DESCRIPTIVE, "sliding_window"}
_LLAMA3 = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_positions": "original_max_position_embeddings",
}


def model_config(content: dict[str, Any], *, where: str, fuse_qkv: bool = True) -> ModelConfig:
    """Returns the model of a config.json.

    Args:
      content: its content.
      where: the file, for errors.
      fuse_qkv: as ModelConfig's; not in the file.

    Raises:
      ValueError: another architecture, a missing field, or a value that our model does not implement; the message
        names the field.
    """
    kind = content.get("model_type")
    ours = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    architectures = content.get("architectures") or [ours]
    if ours is None or architectures != [ours]:
        raise ValueError(
            f"{where}: model_type={kind!r}, architectures={architectures} is not supported; supported are "
            f"{', '.join(f'{name} ({arch})' for name, arch in ARCHITECTURES.items())}."
        )
    values = {**_DEFAULTS_OF_ALL, **_DEFAULTS[kind], **{key: v for key, v in content.items() if v is not None}}
    if "sliding_window" in content:  # null means none
        values["sliding_window"] = content["sliding_window"]
    if content.get("num_key_value_heads", 1) is None:  # as many as num_attention_heads, for Mistral too
        values.pop("num_key_value_heads", None)
    _refuse_unsupported(values, where=where)
    missing = [key for key in _SAME.values() if key not in values and key not in ("num_key_value_heads", "head_dim")]
    if missing:
        raise ValueError(f"{where}: {missing[0]} is missing; fetch that file again.")
    fields = {ours: _typed(values, theirs, ours, where=where) for ours, theirs in _SAME.items() if theirs in values}
    _refuse_window(values, where=where)
    heads, width = fields["num_heads"], fields["embed_dim"]
    if "head_dim" not in fields and (heads < 1 or width % heads):
        raise ValueError(f"{where}: hidden_size={width} does not divide into num_attention_heads={heads}.")
    defaults = {"num_kv_heads": heads, "head_dim": width // max(heads, 1)}
    model = ModelConfig(**defaults | fields | _rope(values, where=where), fuse_qkv=fuse_qkv)
    try:
        model.check()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return model


def config_json(m: ModelConfig, *, dtype: str, token_ids: dict[str, int | None]) -> dict[str, Any]:
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
        "bos_token_id": None,
        "eos_token_id": None,
        **token_ids,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def architecture(m: ModelConfig) -> dict[str, Any]:
    """Returns the fields of a model that config.json holds: those that an export and import must preserve."""
    keys = [*_SAME, "rope_theta", "rope_scaling", *(_LLAMA3 if m.rope_scaling == "llama3" else ())]
    return {key: getattr(m, key) for key in keys}


def unknown_fields(content: dict[str, Any]) -> list[str]:
    """Returns the fields of a config.json that have a value and are unknown here: they may change the computation."""
    return [key for key, value in content.items() if value is not None and key not in _KNOWN and "token_id" not in key]


def _refuse_unsupported(values: dict[str, Any], *, where: str) -> None:
    for key, served in _SERVED.items():
        if key not in values or (key == "no_rope_layer_interval" and values.get("no_rope_layers")):
            continue
        value = values[key]
        each = value if key in _PER_LAYER and isinstance(value, list) else [value]
        if not all(one is None or one in served for one in each):
            supported = ", ".join(map(repr, served)) or "null"
            raise ValueError(f"{where}: {key}={value!r} is not supported; supported: {supported}.")


def _refuse_window(values: dict[str, Any], *, where: str) -> None:
    """Raises ValueError for a sliding window that hides keys within the model's positions."""
    window, limit = values["sliding_window"], values["max_position_embeddings"]
    # transformers' Llama has no window, its Mistral has one whatever use_sliding_window says
    is_off = values["model_type"] == "llama" and not values.get("use_sliding_window", True)
    if window is not None and not is_off and not (type(window) is int and window >= limit):
        raise ValueError(
            f"{where}: sliding_window={window!r} must be null, or an int of at least max_position_embeddings={limit}: "
            "our model has no sliding window."
        )


def _typed(values: dict[str, Any], theirs: str, ours: str, *, where: str) -> Any:
    return convert_value(f"{where}: {theirs}", field_of("model", ours), values[theirs])


def _rope(values: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Returns our rotary fields from either spelling: rope_theta and rope_scaling, or rope_parameters."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(values.get(key, {}), dict):
            raise ValueError(f"{where}: {key}={values[key]!r} must be an object.")
    rope = values.get("rope_scaling", {}) | values.get("rope_parameters", {})
    theta = {"rope_theta": values.get("rope_theta", 10000.0)} | rope
    if values.get("rope_theta", theta["rope_theta"]) != theta["rope_theta"]:
        raise ValueError(f"{where}: rope_theta={values['rope_theta']!r} differs from rope_parameters; keep one.")
    fields = {"rope_theta": _typed(theta, "rope_theta", "rope_theta", where=where)}
    _refuse_unsupported({key: rope[key] for key in rope if key == "partial_rotary_factor"}, where=where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"{where}: rope_type={kind!r} is not supported; supported are 'default' and 'llama3'.")
    needed = _LLAMA3 if kind == "llama3" else {}
    for key in (rope.keys() - {"rope_theta", "rope_type", "type", "partial_rotary_factor"}) ^ set(needed.values()):
        what = "not a field of" if key in rope else "missing in"
        raise ValueError(f"{where}: {key} is {what} rope_type={kind!r}.")
    if needed:
        fields["rope_scaling"] = kind
    return fields | {ours: _typed(rope, theirs, ours, where=where) for ours, theirs in needed.items()}
