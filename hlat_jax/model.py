"""The Llama decoder: Flax NNX modules that declare the parameters, and the same model as pure functions.

    decoder = Decoder(ModelConfig(...), rngs=nnx.Rngs(0))
    logits_BTV = decoder(tokens_BT)

    params = init_params(cfg, jax.random.key(0))
    logits_BTV = apply(params, cfg, tokens_BT)

It computes in the dtype of the parameters. NNX declares, and every transformation is plain JAX over dicts of arrays.

Shapes: B batch, T time, D embed, N heads, K kv heads, G heads per kv head, H head, F mlp, V vocab, L layers. X = G + 2
counts the heads of a group with its key and value. C = 2 counts key and value, or gate and up.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from hlat_jax import stack
from hlat_jax.config import ROPE_SCALING, ModelConfig
from hlat_jax.facts.names import nearest
from hlat_jax.ops import attention as attention_op
from hlat_jax.ops import cross_entropy as cross_entropy_op
from hlat_jax.ops.embedding import lookup
from hlat_jax.ops.linear import column_parallel, column_parallel_products, materialize, row_parallel
from hlat_jax.ops.norm import rms_norm
from hlat_jax.ops.registry import refusal_here, select_implementations
from hlat_jax.ops.rope import SCALINGS, Scaling, apply_rope, rope_frequencies, rope_tables
from hlat_jax.ops.swiglu import swiglu
from hlat_jax.parallel.collectives import SINGLE_DEVICE, ParallelContext, axis_index
from hlat_jax.parallel.sharding import PARAM_RULES, Layout, spec

# The names of axes of parameters; `parallel.sharding.PARAM_RULES` maps them to the mesh of a run.
LOGICAL_AXES = tuple(PARAM_RULES)
Ids = jax.Array | np.ndarray  # int32
# x_BTNH -> queries or keys rotated to the positions of their tokens.
Rotate = Callable[[jax.Array], jax.Array]
# (q_BTNH, k_BTKH, v_BTKH, *, window) -> (attention [B, T, N, H], aux), with the window of `attention_op.attention`. The
# hook of generation: `cache` attends to cached keys and values too, and returns the new ones as aux.
Attend = Callable[..., tuple[jax.Array, Any]]
# (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT or None) -> [B, T, N, H]: a caller's own attention, see `Decoder.__call__`.
AttentionFn = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


class Decoder(nnx.Module):
    """A Llama-architecture language model. Its layers are one `DecoderLayer` with parameters stacked along an L axis.

    Every parameter names its logical axes in the metadata that `nnx.get_partition_spec` reads, see `param_specs`.

    Args:
      cfg: dimensions, implementations of the ops, layer loop and rematerialization.
      rngs: random streams, such as `nnx.Rngs(0)`. The stream `params` draws the initial weights, fp32.

    Raises:
      ValueError: dimensions that do not fit each other.

    Source: Touvron et al., arXiv 2302.13971 and 2307.09288, and HLAT, arXiv 2404.10630 III-A.
    """

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        cfg.check()
        # Implementations are chosen once, here: nothing below asks for the platform. One that is named may be for a
        # program that is lowered for another platform, so its refusal is kept for a call on this one.
        self.cfg, self.refusal = select_implementations(cfg, jax.default_backend()), refusal_here(cfg)
        self.embed = _normal(rngs, (cfg.vocab_size, cfg.embed_dim), cfg.init_std, axes=("vocab", "embed"))
        self.layers = _stacked_layers(self.cfg, rngs.params())
        self.final_norm = RMSNorm(self.cfg)
        if not cfg.tie_embeddings:
            self.head = _normal(rngs, (cfg.vocab_size, cfg.embed_dim), cfg.init_std, axes=("vocab", "embed"))

    def __call__(
        self,
        tokens_BT: Ids,
        positions_BT: Ids | None = None,
        *,
        segment_ids_BT: Ids | None = None,
        attention: AttentionFn | None = None,
    ) -> jax.Array:
        """Returns fp32 logits [B, T, V]. Logits at position t predict the token at t + 1.

        Args:
          tokens_BT: int32 ids below V.
          positions_BT: int32 positions, 0..T-1 in every row by default.
          segment_ids_BT: int32 ids. A token attends only within its segment. By default a row is one segment.
          attention: function that replaces `cfg.attention` in every layer, attention(q_BTNH, k_BSKH, v_BSKH,
            segment_ids_BT) -> [B, T, N, H] in the dtype of the queries. Queries and keys are rotated, S = T, and N is a
            multiple of K. The function must scale, and mask the future and other segments.

        Raises:
          ValueError: T is above cfg.max_positions, or an id is outside the vocabulary (if `tokens_BT` is not traced).
            An implementation named in `cfg` does not run on the default backend. `attention` returns another shape or
            dtype, or is given for a model with a sliding window.
        """
        if self.refusal:
            raise ValueError(self.refusal)
        _check_tokens(tokens_BT, self.cfg)

        def logits(decoder: Decoder, fields: dict[str, Any]) -> jax.Array:
            hidden_BTD = decoder._hidden(fields, attention=attention, ctx=SINGLE_DEVICE)
            return cross_entropy_op.logits(hidden_BTD, decoder.gather_head())

        fields = {"tokens_BT": tokens_BT, "positions_BT": positions_BT, "segment_ids_BT": segment_ids_BT}
        return _with_auto_axes(logits, self, fields)

    def hidden_states(
        self,
        tokens_BT: Ids,
        positions_BT: Ids | None = None,
        *,
        segment_ids_BT: Ids | None = None,
        attention: AttentionFn | None = None,
        ctx: ParallelContext = SINGLE_DEVICE,
    ) -> jax.Array:
        """Returns the input of the head [B, T, D], in the dtype of the parameters.

        `ctx` has the shardings of the parameters, and of [B, T, D] between blocks, see `collectives`. Other arguments
        and errors are the same as for a call.
        """
        _check_tokens(tokens_BT, self.cfg)
        fields = {"tokens_BT": tokens_BT, "positions_BT": positions_BT, "segment_ids_BT": segment_ids_BT}
        hidden = functools.partial(Decoder._hidden, attention=attention, ctx=ctx)
        return _with_auto_axes(hidden, self, fields)

    def _hidden(self, fields: dict[str, Any], *, attention: AttentionFn | None, ctx: ParallelContext) -> jax.Array:
        """Returns `hidden_states` of the fields of a batch, whose shardings are automatic."""
        fields = jax.tree.map(jnp.asarray, fields)
        tokens_BT = fields.pop("tokens_BT")
        if fields["positions_BT"] is None:
            positions_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
            fields["positions_BT"] = jnp.broadcast_to(positions_T, tokens_BT.shape)
        x_BTD = self.embed_tokens(tokens_BT, ctx=ctx)
        x_BTD = self.apply_layers(x_BTD, **fields, attention=attention, ctx=ctx)
        return self.apply_final_norm(x_BTD)

    def embed_tokens(self, tokens_BT: jax.Array, *, ctx: ParallelContext = SINGLE_DEVICE) -> jax.Array:
        """Returns the token vectors [B, T, D]."""
        return lookup(ctx.gather_weight(self.embed[...], ("vocab", "embed")), tokens_BT, ctx=ctx)

    def apply_layers(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        *,
        segment_ids_BT: jax.Array | None = None,
        attention: AttentionFn | None = None,
        attend: Attend | None = None,
        checkpoint: Callable[..., Callable] | None = None,
        ctx: ParallelContext = SINGLE_DEVICE,
    ) -> jax.Array:
        """Returns [B, T, D] after this device's layers.

        `positions_BT` and `segment_ids_BT` are unsharded over tensor. `attend` replaces the attention, and
        `checkpoint` the rematerialization, see `stack.run_layers`.
        """
        apply_layer, stacked = self.split_layers(positions_BT, ctx=ctx)
        attend = attend or causal_attention(self.cfg, segment_ids_BT)
        if attention is not None:
            if self.cfg.sliding_window:
                raise ValueError(
                    f"attention= is not given the window of model.sliding_window={self.cfg.sliding_window}. Mask by "
                    "the window in that function, and set sliding_window=0 in the ModelConfig."
                )
            attend = _foreign_attention(attention, segment_ids_BT)

        def layer(of_layer: Any, x_BTD: jax.Array) -> jax.Array:
            return apply_layer(of_layer, x_BTD, attend)[0]

        loop, remat = self.cfg.layer_loop, self.cfg.parsed_remat
        return stack.run_layers(layer, stacked, x_BTD, loop=loop, remat=remat, checkpoint=checkpoint)

    def split_layers(
        self, positions_BT: jax.Array, *, num_keys: int | None = None, ctx: ParallelContext
    ) -> tuple[Callable[..., Any], Any]:
        """Returns the function (params of one layer, x_BTD, Attend) -> (x_BTD, aux), and stacked params of all layers.

        Args:
          positions_BT: positions of the queries.
          num_keys: number of keys that a query may attend to, its own included, T by default.
          ctx: shardings, as for `hidden_states`.
        """
        cfg, scaling = self.cfg, _scaling(self.cfg)
        frequencies = rope_frequencies(cfg.head_dim, theta=cfg.rope_theta, scaling=scaling)
        cos, sin = rope_tables(positions_BT, frequencies=frequencies, scaling=scaling)
        rotate = functools.partial(apply_rope, cos=cos, sin=sin)
        graphdef, stacked = nnx.split(self.layers)
        num_keys = num_keys or positions_BT.shape[1] * ctx.context_degree
        common, windows_L = attention_op.common_window(cfg.windows(num_keys), num_keys), None
        if common == attention_op.BY_LAYER:
            num_layers = jax.tree.leaves(stacked)[0].shape[0]  # of this stage
            windows_L = jnp.asarray(cfg.windows(num_keys), jnp.int32)
            windows_L = jax.lax.dynamic_slice_in_dim(windows_L, axis_index(ctx.pipe) * num_layers, num_layers)

        def apply_layer(of_layer: Any, x_BTD: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
            params, window = of_layer
            attend = functools.partial(attend, window=common if window is None else window)
            return nnx.merge(graphdef, params)(x_BTD, rotate, attend, ctx)

        return apply_layer, (stacked, windows_L)

    def apply_final_norm(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the input of the head."""
        return materialize(self.final_norm(x_BTD))

    def gather_head(self, *, ctx: ParallelContext = SINGLE_DEVICE) -> jax.Array:
        """Returns this device's rows of the output projection [V, D], or of the embedding table if they are tied."""
        table = self.embed if self.cfg.tie_embeddings else self.head
        return ctx.gather_weight(table[...], ("vocab", "embed"))


class _Signature:
    """What `help` and editors show of a class and its subclasses; the metaclass of NNX takes (*args, **kwargs)."""

    def __get__(self, decoder: Decoder | None, cls: type) -> inspect.Signature:
        create = cls.__init__.__get__(cls)  # type: ignore[misc]
        return inspect.signature(create if decoder is None else decoder.__call__)


Decoder.__signature__ = _Signature()  # type: ignore[attr-defined]


class DecoderLayer(nnx.Module):
    """Pre-norm block, x += attention(norm(x)) and then x += mlp(norm(x))."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(cfg)
        self.attention = Attention(cfg, rngs=rngs)
        self.mlp_norm = RMSNorm(cfg)
        self.mlp = MLP(cfg, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, rotate: Rotate, attend: Attend, ctx: ParallelContext) -> tuple[jax.Array, Any]:
        """Returns the next [B, T, D], and the auxiliary result of `attend`."""
        normed_BTD = checkpoint_name(self.attention_norm(x_BTD), "attn_norm")
        added_BTD, aux = self.attention(normed_BTD, rotate, attend, ctx)
        x_BTD = checkpoint_name(x_BTD + added_BTD, "residual")
        normed_BTD = checkpoint_name(self.mlp_norm(x_BTD), "mlp_norm")
        return x_BTD + self.mlp(normed_BTD, ctx), aux


class Attention(nnx.Module):
    """Multi-head or grouped-query attention with rotary positions.

    For each kv head, one QKV matrix [D, K, G + 2, H] holds the G query heads, then the key, then the value. So a
    tensor-parallel split over K keeps every group whole. With `fuse_qkv=False`, Q [D, K, G, H] is separate from
    KV [D, 2, K, H]. Query head n is (n // G, n % G), the order of Hugging Face. Biases have the shapes of the matrices
    without D.
    """

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        d, k, h = cfg.embed_dim, cfg.num_kv_heads, cfg.head_dim
        g = cfg.num_heads // k
        if cfg.fuse_qkv:
            self.qkv = _normal(rngs, (d, k, g + 2, h), cfg.init_std, axes=("embed", "kv_heads", "qkv", "head_dim"))
        else:
            self.q = _normal(rngs, (d, k, g, h), cfg.init_std, axes=("embed", "kv_heads", "q_per_kv", "head_dim"))
            self.kv = _normal(rngs, (d, 2, k, h), cfg.init_std, axes=("kv_embed", "qkv", "kv_heads", "head_dim"))
        if cfg.qkv_bias and cfg.fuse_qkv:
            self.qkv_bias = _param(jnp.zeros((k, g + 2, h)), axes=("kv_heads", "qkv", "head_dim"))
        elif cfg.qkv_bias:
            self.q_bias = _param(jnp.zeros((k, g, h)), axes=("kv_heads", "q_per_kv", "head_dim"))
            self.kv_bias = _param(jnp.zeros((2, k, h)), axes=("qkv", "kv_heads", "head_dim"))
        if cfg.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(cfg, of_heads=True), RMSNorm(cfg, of_heads=True)
        self.out = _normal(rngs, (cfg.num_heads, h, d), _output_std(cfg), axes=("heads", "head_dim", "embed"))
        if cfg.out_bias:  # added to the whole sum of the heads, as a norm's scale multiplies it
            self.out_bias = _param(jnp.zeros((d,)), axes=("norm",))

    def __call__(self, x_BTD: jax.Array, rotate: Rotate, attend: Attend, ctx: ParallelContext) -> tuple[jax.Array, Any]:
        """Returns the output of the block [B, T, D], and the auxiliary result of `attend`."""
        q_BTNH, k_BTKH, v_BTKH = self.project(x_BTD, ctx)
        if self.cfg.qk_norm:  # named before the norm: the backward pass needs it, and the rest costs no product
            q_BTNH, k_BTKH = checkpoint_name(q_BTNH, "q"), checkpoint_name(k_BTKH, "k")
            q_BTNH, k_BTKH = rotate(self.q_norm(q_BTNH)), rotate(self.k_norm(k_BTKH))
        else:
            q_BTNH, k_BTKH = checkpoint_name(rotate(q_BTNH), "q"), checkpoint_name(rotate(k_BTKH), "k")
        attended_BTNH, aux = attend(q_BTNH, k_BTKH, checkpoint_name(v_BTKH, "v"))
        attended_BTNH = checkpoint_name(attended_BTNH, "attn_out")
        out_BTD = row_parallel("BTNH,NHD->BTD", attended_BTNH, self.out, ctx)
        return _add_bias(out_BTD, self.out_bias[...]) if self.cfg.out_bias else out_BTD, aux

    def project(self, x_BTD: jax.Array, ctx: ParallelContext) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns this device's queries [B, T, N, H], keys and values [B, T, K, H], before norms and rotation."""
        cfg = self.cfg
        if cfg.fuse_qkv:
            qkv_BTKXH = column_parallel("BTD,DKXH->BTKXH", x_BTD, self.qkv, ctx)
            qkv_BTKXH = _add_bias(qkv_BTKXH, self.qkv_bias[...]) if cfg.qkv_bias else qkv_BTKXH
            q_BTKGH, k_BTK1H, v_BTK1H = jax.lax.split(qkv_BTKXH, (cfg.num_heads // cfg.num_kv_heads, 1, 1), axis=3)
            k_BTKH, v_BTKH = k_BTK1H[:, :, :, 0], v_BTK1H[:, :, :, 0]
        else:
            equations = "BTD,DKGH->BTKGH", "BTD,DCKH->BTCKH"
            q_BTKGH, kv_BTCKH = column_parallel_products(equations, x_BTD, (self.q, self.kv), ctx=ctx)
            if cfg.qkv_bias:
                q_BTKGH, kv_BTCKH = _add_bias(q_BTKGH, self.q_bias[...]), _add_bias(kv_BTCKH, self.kv_bias[...])
            k_BTKH, v_BTKH = kv_BTCKH[:, :, 0], kv_BTCKH[:, :, 1]
        return q_BTKGH.reshape(*q_BTKGH.shape[:2], -1, cfg.head_dim), k_BTKH, v_BTKH


class MLP(nnx.Module):
    """SwiGLU feed-forward, `(silu(x @ gate) * (x @ up)) @ down`. Gate and up are one matrix [D, 2, F]."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        d, f = cfg.embed_dim, cfg.mlp_dim
        self.gate_up = _normal(rngs, (d, 2, f), cfg.init_std, axes=("embed", "gate", "mlp"))
        self.down = _normal(rngs, (f, d), _output_std(cfg), axes=("mlp", "embed"))

    def __call__(self, x_BTD: jax.Array, ctx: ParallelContext) -> jax.Array:
        gate_up_BTCF = column_parallel("BTD,DCF->BTCF", x_BTD, self.gate_up, ctx)
        gate_BTF, up_BTF = (part[:, :, 0] for part in jax.lax.split(gate_up_BTCF, (1, 1), axis=2))
        gate_BTF, up_BTF = checkpoint_name(gate_BTF, "gate"), checkpoint_name(up_BTF, "up")
        hidden_BTF = swiglu(gate_BTF, up_BTF)
        return row_parallel("BTF,FD->BTD", hidden_BTF, self.down, ctx)


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` with fp32 statistics, over the residual stream or over each head."""

    def __init__(self, cfg: ModelConfig, *, of_heads: bool = False):
        self.eps = cfg.norm_eps
        width, axis = (cfg.head_dim, "head_dim") if of_heads else (cfg.embed_dim, "norm")
        self.scale = _param(jnp.ones((width,)), axes=(axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, scale=self.scale[...], eps=self.eps)


def _with_auto_axes(fn: Callable[..., jax.Array], decoder: Decoder, fields: dict[str, Any]) -> jax.Array:
    """Returns fn(decoder, fields), [B, T, ...], also under a mesh with explicit axes.

    Inside these are automatic: XLA chooses shardings. Those of B and T come out as the tokens have them, and the last
    axis unsharded.
    """
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if not explicit:
        return fn(decoder, fields)
    out = PartitionSpec(*jax.typeof(fields["tokens_BT"]).sharding.spec, None)
    return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=out)(decoder, fields)


def causal_attention(cfg: ModelConfig, segment_ids_BT: jax.Array | None) -> Attend:
    """Returns attention of each token to itself and the earlier ones of its segment, with aux None."""

    def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, window: Any) -> tuple[jax.Array, None]:
        options = {"segment_ids_BT": segment_ids_BT, "implementation": cfg.attention, "window": window}
        return attention_op.attention(q_BTNH, k_BSKH=k_BTKH, v_BSKH=v_BTKH, **options), None

    return attend


def _foreign_attention(attention: AttentionFn, segment_ids_BT: jax.Array | None) -> Attend:
    """Returns a caller's attention, with aux None. It raises ValueError where the result is not like the queries."""

    def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, window: None) -> tuple[jax.Array, None]:
        attended_BTNH = attention(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
        wanted, returned = (f"{x.dtype.name}{list(x.shape)}" for x in (q_BTNH, attended_BTNH))
        if wanted != returned:
            raise ValueError(
                f"attention returned {returned}. It must return {wanted}, the shape [B, T, N, H] and dtype of the "
                "queries."
            )
        return attended_BTNH, None

    return attend


def init_params(cfg: ModelConfig, key: jax.Array) -> dict[str, Any]:
    """Returns fp32 parameters as nested dicts of arrays, the same for every layer loop and remat choice.

    Args:
      cfg: the model.
      key: a typed key. On Trainium, use the `rbg` kind, `jax.random.key(seed, impl="rbg")`.
    """
    return nnx.to_pure_dict(nnx.split(Decoder(cfg, rngs=nnx.Rngs(key)))[1])


def init_layer(cfg: ModelConfig, key: jax.Array, layer: Any) -> dict[str, Any]:
    """Returns the fp32 parameters of layer number `layer`, which may be traced, as `init_params` draws them."""
    rngs = nnx.Rngs(key)
    rngs.params()  # the key of the embedding table
    layer_key = jax.random.split(rngs.params(), cfg.num_layers)[layer]
    return nnx.to_pure_dict(nnx.split(DecoderLayer(cfg, rngs=nnx.Rngs(layer_key)))[1])


def bind(params: dict[str, Any], cfg: ModelConfig) -> Decoder:
    """Returns the Decoder that computes with `params`, of any float dtype."""
    graphdef, state = _declaration(cfg)
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy: replacing works in place
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def apply(
    params: dict[str, Any],
    cfg: ModelConfig,
    tokens_BT: Ids,
    *,
    positions_BT: Ids | None = None,
    segment_ids_BT: Ids | None = None,
    attention: AttentionFn | None = None,
) -> jax.Array:
    """Returns fp32 logits [B, T, V] of pure parameters, nested dicts as from `init_params`, of any float dtype.

    The other arguments and the errors are the same as for a call of `Decoder`.
    """
    return bind(params, cfg)(tokens_BT, positions_BT, segment_ids_BT=segment_ids_BT, attention=attention)


def param_axes(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the logical axes of every parameter, with a tuple of names for each array."""
    return jax.tree.map(
        lambda param: param.get_metadata("out_sharding"),
        nnx.to_pure_dict(_declaration(cfg)[1], extract_fn=lambda param: param),
        is_leaf=lambda leaf: isinstance(leaf, nnx.Param),
    )


def param_specs(cfg: ModelConfig, rules: Mapping[str, str | tuple[str, ...] | None]) -> dict[str, Any]:
    """Returns the `PartitionSpec` of every parameter on your own mesh.

    Args:
      cfg: the model.
      rules: logical axis -> the mesh axis, or axes, that split it. Other axes of `LOGICAL_AXES` are not split.

    Raises:
      ValueError: a name that is not in `LOGICAL_AXES`.
    """
    for axis in set(rules) - set(LOGICAL_AXES):
        raise ValueError(f"rules name {axis!r}, not a logical axis of a parameter. {nearest(axis, LOGICAL_AXES)}")
    of_every_axis = {axis: rules.get(axis) for axis in LOGICAL_AXES}
    return jax.tree.map(
        lambda axes: spec(axes, of_every_axis), param_axes(cfg), is_leaf=lambda leaf: isinstance(leaf, tuple)
    )


def abstract_params(cfg: ModelConfig, *, layout: Layout | None = None) -> dict[str, Any]:
    """Returns the shapes and dtypes of the fp32 parameters, padded for `layout` if given. It allocates nothing."""
    params = nnx.to_pure_dict(_declaration(cfg)[1])
    return params if layout is None else jax.eval_shape(lambda params: pad_vocabulary(params, cfg, layout), params)


def pad_vocabulary(params: Any, cfg: ModelConfig, layout: Layout) -> Any:
    """Returns parameters with rows of zeros after the rows of the tokens, as many as `layout` needs for equal parts.

    The zero rows have no part in losses and samples, so their gradients are zeros and they stay zero.
    """
    num_rows = layout.vocab_rows(cfg.vocab_size)
    short = [name for name in ("embed", "head") if name in params and params[name].shape[0] < num_rows]
    return params | {name: jnp.pad(params[name], ((0, num_rows - len(params[name])), (0, 0))) for name in short}


@functools.lru_cache
def _declaration(cfg: ModelConfig) -> tuple[Any, Any]:
    """Returns the static graph of a Decoder and its abstract state."""
    graphs = []

    def build(key):
        graphdef, state = nnx.split(Decoder(cfg, rngs=nnx.Rngs(key)))
        graphs.append(graphdef)
        return state

    state = jax.eval_shape(lambda: build(jax.random.key(0, impl="rbg")))  # inside, so that no key is made
    # without the mesh that is set here: the result is kept for calls under any
    return graphs[0], jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def _stacked_layers(cfg: ModelConfig, key: jax.Array) -> DecoderLayer:
    graphs = []

    def one_layer(layer_key):
        graphdef, state = nnx.split(DecoderLayer(cfg, rngs=nnx.Rngs(layer_key)))
        graphs.append(graphdef)
        return state

    # map, not vmap: under the rbg generator vmap draws every layer from the first key alone
    state = jax.lax.map(one_layer, jax.random.split(key, cfg.num_layers))
    for param in jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Param)):
        param.set_metadata(out_sharding=("layers", *param.get_metadata("out_sharding")))
    return nnx.merge(graphs[0], state)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, *, axes: tuple[str, ...]) -> nnx.Param:
    return _param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def _add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns x + bias in the dtype of x, added in fp32: the gradient of a bias is a sum over all tokens."""
    return (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _param(value: jax.Array, *, axes: tuple[str, ...]) -> nnx.Param:
    """Returns a parameter that names its logical axes as Flax does; the caller's mesh need not have axes so named."""
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def _check_tokens(tokens_BT: Ids, cfg: ModelConfig) -> None:
    """Raises ValueError for rows that are too long, and for ids outside the vocabulary where they are known."""
    length = tokens_BT.shape[-1]
    if length > cfg.max_positions:
        raise ValueError(
            f"tokens have {length} positions, more than model.max_positions={cfg.max_positions}. Shorten the rows, or "
            "raise max_positions in the ModelConfig."
        )
    if isinstance(tokens_BT, jax.core.Tracer) or not tokens_BT.size:
        return
    if isinstance(tokens_BT, jax.Array) and not tokens_BT.is_fully_addressable:
        return
    ids = np.asarray(tokens_BT)  # jax.numpy would be traced where a function closes over the tokens
    low, high = ids.min(), ids.max()
    if low < 0 or high >= cfg.vocab_size:
        raise ValueError(
            f"tokens run from {low} to {high}, but model.vocab_size={cfg.vocab_size} has ids 0 to "
            f"{cfg.vocab_size - 1}. Encode the text with the model's own tokenizer."
        )


def _output_std(cfg: ModelConfig) -> float:
    """Returns the std of projections into the residual stream. Source: HLAT's published modeling code, total depth."""
    return cfg.init_std / math.sqrt(2 * cfg.num_layers) if cfg.depth_scaled_init else cfg.init_std


def _scaling(cfg: ModelConfig) -> Scaling | None:
    values = {key.removeprefix("rope_"): getattr(cfg, key) for key in ROPE_SCALING[cfg.rope_scaling]}
    return SCALINGS[cfg.rope_scaling](**values) if values else None
