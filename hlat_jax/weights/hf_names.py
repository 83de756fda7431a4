"""The mapping between our parameters and the tensors of Hugging Face's Llama: names, shapes and layouts.

Rotary pairs are (i, i + H/2) in both, so queries and keys need no permutation. Their matrices are [out, in]; ours are
[in, out], with heads on axes of their own.
"""

from __future__ import annotations

import dataclasses
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
      leaf: its path in our tree, such as `layers.mlp.down`.
      tensors: Hugging Face's name, within the layer where it is stacked -> shape.
      shape: ours, without the axis of layers.
      join: tensors in that order -> our parameter; layout only, for any dtype.
      split: the inverse.
    """

    leaf: str
    tensors: dict[str, tuple[int, ...]]
    shape: tuple[int, ...]
    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    split: Callable[[np.ndarray], Sequence[np.ndarray]]

    @property
    def stacked(self) -> bool:
        return self.leaf.startswith("layers.")

    def names(self, layer: int) -> list[str]:
        """Returns the full names of the tensors; `layer` is that of a stacked parameter."""
        return [f"{_LAYER}{layer}.{name}" if self.stacked else name for name in self.tensors]


def table(m: ModelConfig) -> list[ParamMapping]:
    """Returns an entry for every parameter of a model."""
    d, f, v, n, h = m.embed_dim, m.mlp_dim, m.vocab_size, m.num_heads, m.head_dim
    entries = [
        _same("embed", EMBEDDING, (v, d)),
        _same("layers.attention_norm.scale", "input_layernorm.weight", (d,)),
        *(_fused_qkv(m) if m.fuse_qkv else _q_and_kv(m)),
        ParamMapping(
            "layers.attention.out",
            {"self_attn.o_proj.weight": (d, n * h)},
            (n, h, d),
            lambda tensors: tensors[0].T.reshape(n, h, d),
            lambda out_NHD: [out_NHD.reshape(n * h, d).T],
        ),
        _same("layers.mlp_norm.scale", "post_attention_layernorm.weight", (d,)),
        ParamMapping(
            "layers.mlp.gate_up",
            {"mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d)},
            (d, 2, f),
            lambda tensors: np.stack([tensor.T for tensor in tensors], axis=1),
            lambda gate_up_D2F: [gate_up_D2F[:, 0].T, gate_up_D2F[:, 1].T],
        ),
        ParamMapping(
            "layers.mlp.down",
            {"mlp.down_proj.weight": (d, f)},
            (f, d),
            lambda tensors: tensors[0].T,
            lambda down_FD: [down_FD.T],
        ),
        _same("final_norm.scale", "model.norm.weight", (d,)),
    ]
    if not m.tie_embeddings:
        entries.append(_same("head", HEAD, (v, d)))
    return entries


def expected(m: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of a checkpoint, by name, in the order of the layers."""
    first, layered, last = {}, {}, {}
    for entry in table(m):
        where = layered if entry.stacked else first if entry.leaf == "embed" else last
        where |= entry.tensors
    of_layers = {f"{_LAYER}{i}.{name}": shape for i in range(m.num_layers) for name, shape in layered.items()}
    return first | of_layers | last


def _same(leaf: str, name: str, shape: tuple[int, ...]) -> ParamMapping:
    return ParamMapping(leaf, {name: shape}, shape, lambda tensors: tensors[0], lambda ours: [ours])


def _qkv_tensors(m: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, k, h = m.embed_dim, m.num_kv_heads * m.head_dim, m.num_heads * m.head_dim
    return {
        "self_attn.q_proj.weight": (h, d),
        "self_attn.k_proj.weight": (k, d),
        "self_attn.v_proj.weight": (k, d),
    }


def _fused_qkv(m: ModelConfig) -> list[ParamMapping]:
    d, k, h, g = m.embed_dim, m.num_kv_heads, m.head_dim, m.num_heads // m.num_kv_heads

    def join(tensors: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([tensor.T.reshape(d, k, -1, h) for tensor in tensors], axis=2)

    def split(qkv_DKXH: np.ndarray) -> Sequence[np.ndarray]:
        return [part.reshape(d, -1).T for part in np.split(qkv_DKXH, (g, g + 1), axis=2)]

    return [ParamMapping("layers.attention.qkv", _qkv_tensors(m), (d, k, g + 2, h), join, split)]


def _q_and_kv(m: ModelConfig) -> list[ParamMapping]:
    d, k, h, g = m.embed_dim, m.num_kv_heads, m.head_dim, m.num_heads // m.num_kv_heads
    (q, q_shape), *kv = _qkv_tensors(m).items()
    return [
        ParamMapping(
            "layers.attention.q",
            {q: q_shape},
            (d, k, g, h),
            lambda tensors: tensors[0].T.reshape(d, k, g, h),
            lambda q_DKGH: [q_DKGH.reshape(d, -1).T],
        ),
        ParamMapping(
            "layers.attention.kv",
            dict(kv),
            (d, 2, k, h),
            lambda tensors: np.stack([tensor.T.reshape(d, k, h) for tensor in tensors], axis=1),
            lambda kv_D2KH: [kv_D2KH[:, i].reshape(d, -1).T for i in (0, 1)],
        ),
    ]
