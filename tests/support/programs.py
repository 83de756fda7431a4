"""Training programs from one dict of options, of the passes and of the step, and a classifier to train."""

import jax.numpy as jnp
import numpy as np
import optax

from hlat_jax.passes import compile as compile_pass
from hlat_jax.step import StepOptions

PASSES = ("autocast", "kernels", "chunk", "residuals", "only_if_smaller", "memory_budget", "remat")


def training_program(loss_fn, optimizer, *, options=None, **given):
    """Returns the training program; `options` are those of `StepOptions`, and arguments for passes."""
    options = dict(options or {})
    passes = {name: options.pop(name) for name in PASSES if name in options}
    return compile_pass.training_program(loss_fn, optimizer, **passes, options=StepOptions(**options), **given)


def classified(params, batch):
    """Returns (mean cross-entropy, accuracy), of rows that all count."""
    logits = batch["x"] @ params["w"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, jnp.mean(jnp.argmax(logits, -1) == batch["label"])


def labelled():
    """Returns parameters and a batch of 32 rows for `classified`."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)}
    return params, {"x": rng.normal(size=(32, 8)).astype(np.float32), "label": rng.integers(0, 4, 32)}
