"""Conversion between config.json of Hugging Face's Llama, Mistral, Qwen 2 and Qwen 3, and our ModelConfig.

A field that is known to change the computation must have a value that our model implements. `unknown_fields` returns
those in no table here. A missing field has transformers' default.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from hlat_jax.config import ROPE_SCALING, ModelConfig, convert_value, field_of

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
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
_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "sliding_window": None},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}
_DEFAULTS_OF_ALL = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02, "hidden_act": "silu"}
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Fields that change the computation in models of these types -> the values that our model implements, besides null.
_SERVED: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0,),
    **dict.fromkeys(("mlp_bias", "qkv_bias", "use_bias"), (False,)),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "no_rope_layers": (1,),
    "no_rope_layer_interval": (0,),  # without no_rope_layers, which overrides it
    "attention_chunk_size": (),
    **dict.fromkeys(("qk_norm", "use_qk_norm", "use_mrope"), (False,)),
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), (1.0,)),
    **dict.fromkeys(("attention_multiplier", "clip_qkv", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), ()),
    "logit_softcap": (0,),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"), (0,)),
    "kv_lora_rank": (),
    "quantization_config": ({},),
}
# Fields of every file that do not change what the model computes, beside token ids.
_DESCRIPTIVE = (
    "_model_name_or_path",
    "_name_or_path",
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "pretraining_tp",
)
_KNOWN = {*_SAME.values(), *_ROPE, *_WINDOW, *_SERVED, *_DESCRIPTIVE, "attention_bias"}
# Ours -> theirs, in the scalings of `ROPE_SCALING` that read them.
_OF_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_positions": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_attention_factor": "attention_factor",
}


def model_config(content: dict[str, Any], *, where: str, fuse_qkv: bool = True) -> ModelConfig:
    """Returns the model of a config.json.

    Args:
      content: content of the file.
      where: the file, for errors.
      fuse_qkv: `fuse_qkv` of the ModelConfig, which the file does not have.

    Raises:
      ValueError: another architecture, a missing field, or a value that our model does not implement. The message
        names the field.
    """
    kind = content.get("model_type")
    ours = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    architectures = content.get("architectures") or [ours]
    if ours is None or architectures != [ours]:
        raise ValueError(
            f"{where}: model_type={kind!r}, architectures={architectures} is not supported. Supported are "
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
        raise ValueError(f"{where}: {missing[0]} is missing. Fetch that file again.")
    fields = {ours: _convert(values, theirs, ours, where=where) for ours, theirs in _SAME.items() if theirs in values}
    heads, width = fields["num_heads"], fields["embed_dim"]
    if "head_dim" not in fields and (heads < 1 or width % heads):
        raise ValueError(f"{where}: hidden_size={width} does not divide into num_attention_heads={heads}.")
    defaults = {"num_kv_heads": heads, "head_dim": width // max(heads, 1)}
    biased = _attention_bias(values, where=where)
    fields |= {"qkv_bias": biased or kind == "qwen2", "out_bias": biased}
    fields |= {"qk_norm": kind == "qwen3", "fuse_qkv": fuse_qkv}
    model = ModelConfig(**defaults | fields | _rope(values, where=where))
    try:
        model.check()
        model = dataclasses.replace(model, **_window(values))
        model.check()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return model


def config_json(m: ModelConfig, *, dtype: str, token_ids: dict[str, int | None]) -> dict[str, Any]:
    """Returns the content of config.json, in the spelling of RoPE that transformers 4 and 5 both read."""
    if m.out_bias:
        kind = "qwen3" if m.qk_norm else "llama"
    else:
        kind = "qwen2" if m.qkv_bias else "qwen3" if m.qk_norm else "mistral" if m.sliding_window else "llama"
    scaling = None
    if m.rope_scaling != "none":
        scaling = {_OF_SCALING[key]: getattr(m, key) for key in ROPE_SCALING[m.rope_scaling]}
        if not scaling.get("attention_factor", 1):  # transformers has null for its default
            del scaling["attention_factor"]
        scaling = {"rope_type": m.rope_scaling} | scaling
    of_kind: dict[str, Any] = {"attention_bias": m.out_bias} if kind in ("llama", "qwen3") else {}
    of_kind |= {"mlp_bias": False} if kind == "llama" else {"sliding_window": m.sliding_window or None}
    if m.sliding_window and kind != "mistral":
        windows = m.windows(m.sliding_window + 1)
        types = [_SLIDING if window == m.sliding_window else _FULL for window in windows]
        of_kind |= {"use_sliding_window": True, "max_window_layers": types.index(_SLIDING), "layer_types": types}
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **{theirs: getattr(m, ours) for ours, theirs in _SAME.items()},
        "rope_theta": m.rope_theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **of_kind,
        "bos_token_id": None,
        "eos_token_id": None,
        **token_ids,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def architecture(m: ModelConfig) -> dict[str, Any]:
    """Returns the fields of a model that config.json holds, which an export and import must preserve."""
    keys = [
        *_SAME,
        "qkv_bias",
        "out_bias",
        "qk_norm",
        "sliding_window",
        "sliding_window_layers",
        "rope_theta",
        "rope_scaling",
    ]
    return {key: getattr(m, key) for key in (*keys, *ROPE_SCALING[m.rope_scaling])}


def unknown_fields(content: dict[str, Any]) -> list[str]:
    """Returns the fields of a config.json that have a value and are unknown here, so may change the computation."""
    return [key for key, value in content.items() if value is not None and key not in _KNOWN and "token_id" not in key]


def _attention_bias(values: dict[str, Any], *, where: str) -> bool:
    """Returns whether all projections of the attention have biases; transformers reads the field in two families.

    Raises:
      ValueError: it is no bool, or true in another family.
    """
    value, kind = values.get("attention_bias", False), values["model_type"]
    allowed = (False, True) if kind in ("llama", "qwen3") else (False,)
    if type(value) is not bool or value not in allowed:
        supported = " or ".join(map(repr, allowed))
        raise ValueError(f"{where}: attention_bias={value!r} is not supported in a {kind}. Use {supported}.")
    return value


def _refuse_unsupported(values: dict[str, Any], *, where: str) -> None:
    for key, served in _SERVED.items():
        if key not in values or (key == "no_rope_layer_interval" and values.get("no_rope_layers")):
            continue
        value = values[key]
        each = value if key == "no_rope_layers" and isinstance(value, list) else [value]  # one for each layer
        if not all(item is None or item in served for item in each):
            supported = ", ".join(map(repr, served)) or "null"
            raise ValueError(f"{where}: {key}={value!r} is not supported. Supported are {supported}.")


def _window(values: dict[str, Any]) -> dict[str, Any]:
    """Returns our fields of the sliding window: in transformers Mistral has one for all layers, and Qwen by layers.

    Raises:
      ValueError: fields that contradict each other, or a window of a Llama, which transformers ignores.
    """
    kind, window, is_on = values["model_type"], values["sliding_window"], values.get("use_sliding_window")
    num_layers, limit = values["num_hidden_layers"], values["max_position_embeddings"]
    if kind == "llama":
        if (is_on or (is_on is None and window is not None)) and not (type(window) is int and window >= limit):
            raise ValueError(
                f"sliding_window={window!r} must be null, or an int of at least max_position_embeddings={limit}, since "
                "a Llama has no sliding window. For one, set model_type to mistral."
            )
        window = None
    by_layers = kind in ("qwen2", "qwen3")
    if by_layers and not is_on:
        window = None
    if window is not None and not (type(window) is int and window > 0):
        raise ValueError(f"sliding_window={window!r} must be null, or an int above 0.")
    first = values["max_window_layers"] if by_layers else 0
    if type(first) is not int:
        raise ValueError(f"max_window_layers={first!r} must be an int.")
    types = [_SLIDING if window and layer >= first else _FULL for layer in range(num_layers)]
    given = values.get("layer_types", types)
    allowed = [_FULL, _SLIDING] if window and by_layers else types[:1]
    if not isinstance(given, list) or len(given) != num_layers or not all(each in allowed for each in given):
        raise ValueError(
            f"layer_types={given!r:.200} must have {num_layers} values, each {' or '.join(map(repr, allowed))}, for a "
            f"{kind} with sliding_window={window}."
        )
    if _SLIDING not in given:
        return {}
    layers = "" if _FULL not in given else ",".join(_ranges(given))
    return {"sliding_window": window, "sliding_window_layers": layers}


def _ranges(types: Sequence[str]) -> list[str]:
    """Returns FIRST:LAST, from 1, of each run of layers with a window."""
    ranges, layer = [], 1
    for kind, run in itertools.groupby(types):
        last = layer + len(list(run)) - 1
        ranges += [f"{layer}:{last}"] if kind == _SLIDING else []
        layer = last + 1
    return ranges


def _convert(values: dict[str, Any], theirs: str, ours: str, *, where: str) -> Any:
    return convert_value(f"{where}: {theirs}", field_of("model", ours), values[theirs])


def _rope(values: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Returns our rotary fields from either spelling: rope_theta and rope_scaling, or rope_parameters.

    Raises:
      ValueError: an unknown scaling, fields that it lacks or does not have, or two values of one field.
    """
    rope: dict[str, Any] = {}
    named: dict[str, str] = {}

    def take(name: str, key: str, value: Any) -> None:
        if rope.setdefault(key, value) not in (value,):  # NaN is itself
            raise ValueError(f"{where}: {name}={value!r} differs from {named[key]}={rope[key]!r}. Keep one of them.")
        named.setdefault(key, name)

    for spelling in ("rope_parameters", "rope_scaling"):
        given = values.get(spelling, {})
        if not isinstance(given, dict):
            raise ValueError(f"{where}: {spelling}={given!r} must be an object.")
        given = {key: value for key, value in given.items() if value is not None}
        if given and given.keys().isdisjoint(("rope_type", "type")):
            given["rope_type"] = "default"
        for key, value in given.items():
            take(f"{spelling}.{key}", "rope_type" if key == "type" else key, value)
    kind = rope.pop("rope_type", "default")
    kinds = {"default": "none"} | {kind: kind for kind in ROPE_SCALING if kind != "none"}
    if kind not in tuple(kinds):  # it may be unhashable
        raise ValueError(f"{where}: rope_type={kind!r} is not supported. Supported are {', '.join(map(repr, kinds))}.")
    of_scaling = ROPE_SCALING[kinds[kind]]
    for key in ("rope_theta", *("original_max_position_embeddings" for key in of_scaling if key.endswith("positions"))):
        if key in values:
            take(key, key, values[key])
    fields = {"rope_theta": _convert({"rope_theta": 10000.0} | rope, "rope_theta", "rope_theta", where=where)}
    _refuse_unsupported({key: rope[key] for key in rope if key == "partial_rotary_factor"}, where=where)
    given = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if kind == "yarn":
        given = _with_yarn_defaults(given, values["max_position_embeddings"], where=where)
    for key in given.keys() ^ {_OF_SCALING[key] for key in of_scaling}:
        problem = "not a field of" if key in given else "missing in"
        raise ValueError(f"{where}: {key} is {problem} rope_type={kind!r}.")
    fields |= {ours: _convert(given, _OF_SCALING[ours], ours, where=where) for ours in of_scaling}
    return fields | {"rope_scaling": kinds[kind]}


def _with_yarn_defaults(rope: dict[str, Any], max_positions: int, *, where: str) -> dict[str, Any]:
    """Returns the fields of YaRN as transformers completes them; `mscale` and `mscale_all_dim` give the factor."""
    defaults = {"original_max_position_embeddings": max_positions, "beta_fast": 32.0, "beta_slow": 1.0}
    rope = defaults | {"attention_factor": 0.0} | rope
    if rope.pop("truncate", True) is not True:
        raise ValueError(f"{where}: truncate=false is not supported in rope_type='yarn'. Use true.")
    factor = _convert(rope, "factor", "rope_factor", where=where) if "factor" in rope else 1.0
    scales = {
        key: _convert(rope, key, "rope_factor", where=where) for key in ("mscale", "mscale_all_dim") if key in rope
    }
    if len(scales) == 2 and all(scales.values()) and not rope["attention_factor"] and factor > 1:
        above, below = (0.1 * scale * math.log(factor) + 1 for scale in scales.values())
        rope["attention_factor"] = above / below
    return {key: value for key, value in rope.items() if key not in scales}
