"""The mapping between our parameters and the tensors of Hugging Face's Llama, Mistral and Qwen: names, shapes, layouts.

Rotary pairs are (i, i + H/2) in both, so queries and keys need no permutation. Their matrices are [out, in]. Ours are
[in, out], with separate axes for heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from hlat_jax.config import ModelConfig

# Tables of fp32 rotary frequencies in old checkpoints; they follow from config.json.
DERIVED = "rotary_emb.inv_freq"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = "model.layers."


@dataclasses.dataclass(frozen=True)
class ParamMapping:
    """One of our parameters (one layer of it, if stacked) and the tensors it consists of.

    Attributes:
      leaf: path of the parameter in our tree, such as `layers.mlp.down`.
      tensors: Hugging Face's name -> shape. If the parameter is stacked, the name is the name within a layer.
      shape: shape of our parameter, without the axis of layers.
      join: function from the tensors, in that order, to our parameter. It only changes the layout, for any dtype.
      split: inverse of `join`.
    """

    leaf: str
    tensors: dict[str, tuple[int, ...]]
    shape: tuple[int, ...]
    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    split: Callable[[np.ndarray], Sequence[np.ndarray]]

    @property
    def is_stacked(self) -> bool:
        return self.leaf.startswith("layers.")

    def names(self, layer: int) -> list[str]:
        """Returns the full names of the tensors, for this layer if the parameter is stacked."""
        return [f"{_LAYER}{layer}.{name}" if self.is_stacked else name for name in self.tensors]


def table(m: ModelConfig) -> list[ParamMapping]:
    """Returns an entry for every parameter of a model."""
    d, f, v, h = m.embed_dim, m.mlp_dim, m.vocab_size, m.head_dim
    attention = _attention(m, ".weight", (d,), leaf="")
    if m.qkv_bias:
        attention += _attention(m, ".bias", (), leaf="_bias")
    if m.qk_norm:
        attention += [
            _same(f"layers.attention.{name}_norm.scale", f"self_attn.{name}_norm.weight", (h,)) for name in "qk"
        ]
    if m.out_bias:
        attention.append(_same("layers.attention.out_bias", "self_attn.o_proj.bias", (d,)))
    entries = [
        _same("embed", EMBEDDING, (v, d)),
        _same("layers.attention_norm.scale", "input_layernorm.weight", (d,)),
        *attention,
        _matrices("layers.attention.out", {"self_attn.o_proj.weight": (m.num_heads, h, d)}, num_inputs=2),
        _same("layers.mlp_norm.scale", "post_attention_layernorm.weight", (d,)),
        _matrices(
            "layers.mlp.gate_up",
            dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), (d, 1, f)),
            axis=1,
        ),
        _matrices("layers.mlp.down", {"mlp.down_proj.weight": (f, d)}),
        _same("final_norm.scale", "model.norm.weight", (d,)),
    ]
    if not m.tie_embeddings:
        entries.append(_same("head", HEAD, (v, d)))
    return entries


def _attention(m: ModelConfig, kind: str, inputs: tuple[int, ...], *, leaf: str) -> list[ParamMapping]:
    """Returns the entries of the projections to queries, keys and values: of matrices, or of biases, without inputs."""
    k, h, g, num = m.num_kv_heads, m.head_dim, m.num_heads // m.num_kv_heads, len(inputs)
    q, *kv = (f"self_attn.{name}_proj{kind}" for name in "qkv")
    if m.fuse_qkv:
        parts = {q: (*inputs, k, g, h)} | dict.fromkeys(kv, (*inputs, k, 1, h))
        return [_matrices(f"layers.attention.qkv{leaf}", parts, axis=num + 1, num_inputs=num)]
    return [
        _matrices(f"layers.attention.q{leaf}", {q: (*inputs, k, g, h)}, num_inputs=num),
        _matrices(f"layers.attention.kv{leaf}", dict.fromkeys(kv, (*inputs, 1, k, h)), axis=num, num_inputs=num),
    ]


def expected_shapes(m: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of a checkpoint, by name, in the order of the layers."""
    first, layered, last = {}, {}, {}
    for entry in table(m):
        where = layered if entry.is_stacked else first if entry.leaf == "embed" else last
        where |= entry.tensors
    of_layers = {f"{_LAYER}{i}.{name}": shape for i in range(m.num_layers) for name, shape in layered.items()}
    return first | of_layers | last


def _same(leaf: str, name: str, shape: tuple[int, ...]) -> ParamMapping:
    return ParamMapping(leaf, {name: shape}, shape, lambda tensors: tensors[0], lambda ours: [ours])


def _matrices(leaf: str, parts: dict[str, tuple[int, ...]], *, axis: int = 0, num_inputs: int = 1) -> ParamMapping:
    """Returns the entry of a parameter with parts along `axis` that are transposed matrices, or vectors.

    `parts` has the shape of the part of each tensor. The first `num_inputs` axes are the input, 0 for a vector.
    """
    shapes = list(parts.values())
    ends = np.cumsum([shape[axis] for shape in shapes])

    def join(tensors: Sequence[np.ndarray]) -> np.ndarray:
        shaped = [tensor.T.reshape(shape) for tensor, shape in zip(tensors, shapes, strict=True)]
        return shaped[0] if len(shaped) == 1 else np.concatenate(shaped, axis)

    def split(ours: np.ndarray) -> Sequence[np.ndarray]:
        widths = (math.prod(ours.shape[:num_inputs]),) if num_inputs else ()
        return [part.reshape(*widths, -1).T for part in np.split(ours, ends[:-1], axis)]

    inputs = (math.prod(shapes[0][:num_inputs]),) if num_inputs else ()
    tensors = {name: (math.prod(shape[num_inputs:]), *inputs) for name, shape in parts.items()}
    whole = (*shapes[0][:axis], int(ends[-1]), *shapes[0][axis + 1 :])
    return ParamMapping(leaf, tensors, whole, join, split)
