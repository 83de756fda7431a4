"""The passes in the trainers and models of others: temporaries, FLOPs and differences, before each pass and after it.

    python benchmarks/elsewhere.py [NAME...]

Each case takes the model and the loss of a package as they are, and skips packages that are not installed. MaxText and
google-tunix need Python 3.12. `pip install --no-deps maxtext==0.2.5` and the packages that its import asks for are
enough. Temporaries are XLA's allocation for the loss and its gradients on one CPU device, at the same batch. FLOPs are
of the products in the trace, since XLA's cost analysis counts the body of a loop once. The first difference is of the
loss. The second is of all gradients, by the norm of the difference. Both are relative. The last rows have whole steps:
one that is written in Optax, and `training_program` with all passes. Their second difference is of all updates.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import AxisType

from hlat_jax import passes
from hlat_jax.passes.products import live_jaxpr, total_flops

B, T, V, D = 4, 256, 32768, 128
LIMIT = "16MiB"
SHARE = 0.6  # of plain's temporaries, for the budget
OPTIMIZER = optax.adamw(1e-3)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, V, (B, T + 1)), jnp.int32)


class Case(NamedTuple):
    """A loss of a package.

    Attributes:
      loss: the loss.
      args: its arguments; the first one has the parameters.
      mesh: the mesh that it needs.
      theirs: the same loss by the package's own tiling of the vocabulary, if it has one.
      grad: the package's function to the value and gradients.
      split: function from the first argument to its parameters, and to a function that puts them back.
      rules: functions with a derivative rule that is the derivative of their body.
    """

    loss: Callable
    args: tuple
    mesh: Any = None
    theirs: Callable | None = None
    grad: Callable = jax.value_and_grad
    split: Callable = lambda params: (params, lambda new: new)
    rules: tuple[str, ...] = ()


def _split(model: nnx.Module) -> tuple[Any, Callable]:
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return params, lambda new: nnx.merge(graph, new, rest, copy=True)


def optax_loop() -> Case:
    """Returns a loss in plain JAX."""
    keys = jax.random.split(jax.random.key(0))
    params = {"embed": jax.random.normal(keys[0], (V, D)), "head": jax.random.normal(keys[1], (D, V)) / D}

    def loss(params, tokens):
        logits = jnp.tanh(params["embed"][tokens[:, :-1]]) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return Case(loss, (params, TOKENS))


class _Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.up, self.down = nnx.Linear(D, 4 * D, rngs=rngs), nnx.Linear(4 * D, D, rngs=rngs)
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


def _nnx_loss(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def flax_nnx() -> Case:
    """Returns the loss of a Flax NNX model."""
    return Case(_nnx_loss, (_Model(nnx.Rngs(0)), TOKENS), grad=nnx.value_and_grad, split=_split)


class _Block(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        y = linen.LayerNorm()(x)
        y = linen.SelfAttention(8, use_bias=False, dropout_rate=0.1, broadcast_dropout=False, deterministic=False)(
            y, mask
        )
        x = x + linen.Dropout(0.1, deterministic=False)(y)
        y = linen.relu(linen.Dense(4 * D)(linen.LayerNorm()(x)))
        y = linen.Dense(D)(linen.Dropout(0.1, deterministic=False)(y))
        return x + linen.Dropout(0.1, deterministic=False)(y)


class _LanguageModel(linen.Module):
    vocab_size: int

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(self.vocab_size, D)(jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1])
        x = linen.Dropout(0.1, deterministic=False)(x)
        for _ in range(3):
            x = _Block()(x, linen.make_causal_mask(tokens))
        return linen.Dense(self.vocab_size)(linen.LayerNorm()(x))


def flax_linen() -> Case:
    """Returns the loss of a language model as in Flax's `examples/lm1b`, with its dropout and one-hot cross-entropy."""
    model, tokens, key = _LanguageModel(V // 8), TOKENS[:, :-1] % (V // 8), jax.random.key(1)

    def loss(params, tokens, key):
        logits = model.apply(params, tokens, rngs={"dropout": key})
        weights = jnp.where(tokens > 0, 1.0, 0.0)
        losses = -jnp.sum(jax.nn.one_hot(tokens, V // 8) * linen.log_softmax(logits), axis=-1)
        return jnp.sum(losses * weights) / jnp.sum(weights)

    return Case(loss, (model.init({"params": key, "dropout": key}, tokens), tokens, key))


class _Images(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1, self.conv2 = nnx.Conv(1, 32, (3, 3), rngs=rngs), nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.norm1, self.norm2 = nnx.BatchNorm(32, rngs=rngs), nnx.BatchNorm(64, rngs=rngs)
        self.dropout1, self.dropout2 = nnx.Dropout(0.025, rngs=rngs), nnx.Dropout(0.025, rngs=rngs)
        self.linear1, self.linear2 = nnx.Linear(3136, 256, rngs=rngs), nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm1(self.dropout1(self.conv1(x)))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), (2, 2))
        return self.linear2(nnx.relu(self.dropout2(self.linear1(x.reshape(x.shape[0], -1)))))


def flax_mnist() -> Case:
    """Returns the loss of a convolutional net as in Flax's NNX tutorial on MNIST, with batch norm and dropout."""
    images = jnp.asarray(np.random.default_rng(0).random((128 * B, 28, 28, 1)), jnp.float32)

    def loss(model, images, labels):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    return Case(loss, (_Images(nnx.Rngs(0)), images, jnp.arange(128 * B) % 10), grad=nnx.value_and_grad, split=_split)


def equinox() -> Case:
    """Returns the loss of an Equinox model."""
    import equinox as eqx

    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        mlp: eqx.nn.MLP

        def __call__(self, token):
            return self.mlp(self.embed(token))

    keys = jax.random.split(jax.random.key(0))
    model = Model(eqx.nn.Embedding(V, D, key=keys[0]), eqx.nn.MLP(D, V, 2 * D, 1, key=keys[1]))

    def loss(model, tokens):
        logits = jax.vmap(jax.vmap(model))(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def split(model):
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        return params, lambda new: eqx.combine(new, rest)

    return Case(loss, (model, TOKENS), grad=eqx.filter_value_and_grad, split=split)


def qwix() -> Case:
    """Returns the loss of a model with a quantized MLP, trained by qwix's rules."""
    import qwix as library

    rules = [library.QtRule(module_path="up|down", weight_qtype="int8", act_qtype="int8")]
    model = library.quantize_model(_Model(nnx.Rngs(0)), library.QtProvider(rules), TOKENS[:, :-1])
    return Case(_nnx_loss, (model, TOKENS), grad=nnx.value_and_grad, split=_split)


def tunix() -> Case:
    """Returns the loss of google-tunix's trainer for its Llama."""
    from tunix.models.llama3 import model as llama
    from tunix.sft import peft_trainer

    sizes = {"vocab_size": V, "embed_dim": D, "hidden_dim": 352, "num_heads": 4, "head_dim": 32, "num_kv_heads": 2}
    config = llama.ModelConfig(num_layers=2, rope_theta=10_000, norm_eps=1e-5, weight_tying=True, **sizes)
    tokens, is_earlier = TOKENS[:, :-1], jnp.tril(jnp.ones((T, T), bool))
    args = tokens, jnp.ones((B, T), bool), jnp.tile(jnp.arange(T), (B, 1)), jnp.tile(is_earlier, (B, 1, 1))
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    model = llama.Llama3(config, rngs=nnx.Rngs(0))
    return Case(peft_trainer._default_loss_fn, (model, *args), mesh, grad=nnx.value_and_grad, split=_split)


def maxtext() -> Case:
    """Returns MaxText's loss, and the same loss with its own tiling of the vocabulary."""
    import maxtext as library
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train.train import loss_fn
    from maxtext.utils import maxtext_utils, model_creation_utils

    base = str(pathlib.Path(library.__file__).parent / "configs/base.yml")
    sizes = {"base_emb_dim": D, "base_mlp_dim": 352, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 32}
    sizes |= {"base_num_decoder_layers": 2, "vocab_size": V, "per_device_batch_size": B, "max_target_length": T}
    run = {
        "run_name": "elsewhere",
        "enable_checkpointing": False,
        "base_output_directory": tempfile.gettempdir(),
        "hardware": "cpu",
    }
    run |= {"skip_jax_distributed_system": True, "dataset_type": "synthetic", "enable_dropout": False}
    numerics = {"dtype": "float32", "attention": "dot_product", "remat_policy": "minimal"}

    def of_tiles(num_vocab_tiling: int) -> tuple[Callable, Any, Any]:
        config = pyconfig.initialize(["", base], **sizes, **run, **numerics, num_vocab_tiling=num_vocab_tiling)
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
        model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0, params=0, dropout=1))
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return lambda p, data: loss_fn(nnx.merge(graph, p, rest), config, dict(data), None, None)[0], params, mesh

    loss, params, mesh = of_tiles(1)
    ones, positions = jnp.ones((B, T), jnp.int32), jnp.tile(jnp.arange(T), (B, 1))
    data = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:], "inputs_position": positions}
    data |= {"inputs_segmentation": ones, "targets_segmentation": ones}
    return Case(loss, (params, data), mesh, theirs=of_tiles(8)[0], rules=("cross_entropy_with_logits",))


CASES = {case.__name__: case for case in (optax_loop, flax_linen, flax_nnx, flax_mnist, equinox, qwix, tunix, maxtext)}
PACKAGES = {
    "optax_loop": "optax",
    "tunix": "google-tunix",
    **dict.fromkeys(("flax_linen", "flax_nnx", "flax_mnist"), "flax"),
}


class Measured(NamedTuple):
    """A compiled program: the loss, its gradients or updates, bytes of temporaries, FLOPs of products."""

    loss: float
    grads: list[np.ndarray]
    num_bytes: int
    flops: float

    def difference(self, plain: Measured) -> tuple[float, float]:
        """Returns the relative differences of the loss and of all gradients."""
        pairs = list(zip(self.grads, plain.grads, strict=True))
        norms = [
            np.sqrt(sum(np.sum(np.square(a - b)) for a, b in pairs)),
            np.sqrt(sum(np.sum(b * b) for _, b in pairs)),
        ]
        return abs(self.loss - plain.loss) / abs(plain.loss), norms[0] / norms[1]


def measured(case: Case, loss: Callable) -> Measured:
    """Returns the figures of a loss and its gradients."""
    graph, params = (None, case.args[0])
    if isinstance(params, nnx.Module):
        graph, params = nnx.split(params)
    own = (lambda p, *rest: case.grad(loss)(nnx.merge(graph, p), *rest)) if graph else case.grad(loss)
    arrays, tree = jax.tree.flatten((params, *case.args[1:]))
    places = [at for at, leaf in enumerate(arrays) if hasattr(leaf, "dtype")]

    def flat(*given):
        leaves = list(arrays)
        for at, leaf in zip(places, given, strict=True):
            leaves[at] = leaf
        value, grads = own(*jax.tree.unflatten(tree, leaves))
        return value, [leaf for leaf in jax.tree.leaves(grads) if hasattr(leaf, "dtype")]

    with _mesh(case):
        traced = jax.jit(flat).trace(*(arrays[at] for at in places))
        compiled = traced.lower().compile()
        value, grads = compiled(*(arrays[at] for at in places))
    return _figures(traced, compiled, value, _floats(grads))


def _mesh(case: Case) -> Any:
    return jax.set_mesh(case.mesh or jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,)))


def _floats(arrays: Any) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(arrays) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _figures(traced: Any, compiled: Any, loss: Any, grads: list[np.ndarray]) -> Measured:
    num_bytes = compiled.memory_analysis().temp_size_in_bytes
    return Measured(float(loss), grads, num_bytes, total_flops(live_jaxpr(traced)))


def measured_step(case: Case, step: Any, state: dict[str, Any]) -> Measured:
    """Returns the figures of a jitted step, (state, batch) -> (state, loss or metrics), with updates as gradients."""
    with _mesh(case):
        traced = step.trace(state, case.args[1:])
        compiled, before = traced.lower().compile(), _floats(state["params"])
        state, metrics = compiled(state, case.args[1:])
    updates = list(map(np.subtract, _floats(state["params"]), before))
    return _figures(traced, compiled, getattr(metrics, "loss", metrics), updates)


def step_by_hand(case: Case) -> Measured:
    """Returns the figures of a step that is written in Optax."""
    params, merge = case.split(case.args[0])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: dict[str, Any], batch: tuple) -> tuple[dict[str, Any], jax.Array]:
        value, grads = jax.value_and_grad(lambda params: case.loss(merge(params), *batch))(state["params"])
        updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

    return measured_step(case, step, {"params": jax.tree.map(jnp.copy, params), "opt_state": OPTIMIZER.init(params)})


def program(case: Case, by_hand: Measured, *, autocast: str | None) -> Measured:
    """Returns the figures of the step of `training_program`, within a share of the temporaries of `by_hand`."""
    params, merge = case.split(case.args[0])

    def loss(params: Any, batch: tuple) -> jax.Array:
        return case.loss(merge(params), *batch)

    given: dict[str, Any] = {"autocast": autocast, "chunk": LIMIT}
    if case.rules:  # these are for a decorator only, and casts come before chunks
        loss = passes.chunk(passes.autocast(loss) if autocast else loss, max_bytes=LIMIT, rules=case.rules)
        given = {}
    given |= {"residuals": True, "memory_budget": int(SHARE * by_hand.num_bytes)}
    with _mesh(case):
        made = passes.training_program(loss, OPTIMIZER, **given, params=params, batch=case.args[1:])
    return measured_step(case, made.step, made.init(params))


def variants(case: Case, plain: Measured) -> dict[str, Callable]:
    """Returns the losses that are compared with the plain one."""
    chunk = passes.chunk(max_bytes=LIMIT, rules=case.rules)
    budget = passes.remat(budget=int(SHARE * plain.num_bytes))
    readable = chunk(case.loss) if case.rules else case.loss  # a budget does not reach through derivative rules
    own = {} if case.theirs is None else {"theirs": case.theirs}
    together = passes.select_residuals(chunk(passes.autocast(case.loss)))
    return own | {
        "chunk": chunk(case.loss),
        f"budget {SHARE:.0%}": budget(readable),
        "autocast": passes.autocast(case.loss),
        "autocast, chunk, residuals": together,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    names = parser.parse_args().names
    if unknown := sorted({*names} - {*CASES}):
        parser.error(f"NAME: {', '.join(unknown)}: there are {', '.join(CASES)}")
    print(f"{'case':34} {'pass':26} {'temporaries':>12}       {'GFLOP':>7}       {'loss':>7} {'gradient':>8}")
    for name in names or CASES:
        package = PACKAGES.get(name, name)
        try:
            case, title = CASES[name](), f"{name}, {package} {importlib.metadata.version(package)}"
        except (ImportError, importlib.metadata.PackageNotFoundError) as error:
            print(f"{name:34} not run: {error}", flush=True)
            continue
        plain = measured(case, case.loss)
        print(_row(title, "", plain), flush=True)
        for variant, loss in variants(case, plain).items():
            _print(variant, plain, functools.partial(measured, case, loss))
        by_hand = step_by_hand(case)
        print(_row("", "step with AdamW, by hand", by_hand), flush=True)
        _print("program", by_hand, functools.partial(program, case, by_hand, autocast=None))
        _print("program, autocast", by_hand, functools.partial(program, case, by_hand, autocast="bf16"))


def _row(title: str, variant: str, ours: Measured, plain: Measured | None = None) -> str:
    figures = ours.num_bytes / 2**20, ours.flops / 1e9
    if plain is None:
        return f"{title:34} {variant:26} {figures[0]:8.1f} MiB       {figures[1]:7.2f}"
    of_loss, of_grads = ours.difference(plain)
    return (
        f"{title:34} {variant:26} {figures[0]:8.1f} MiB {ours.num_bytes / plain.num_bytes:5.2f} "
        f"{figures[1]:7.2f} {ours.flops / plain.flops:5.2f} {of_loss:7.0e} {of_grads:8.0e}"
    )


def _print(variant: str, plain: Measured, run: Callable[[], Measured]) -> None:
    try:
        print(_row("", variant, run(), plain), flush=True)
    except passes.BudgetNotMet as error:
        print(f"{'':34} {variant:26} refused: {error}", flush=True)


if __name__ == "__main__":
    main()
