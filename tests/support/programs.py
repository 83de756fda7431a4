"""Training programs from one dict of options, of the passes and of the step."""

from hlat_jax.passes import compile as compile_pass
from hlat_jax.train_step import StepOptions

PASSES = ("autocast", "kernels", "chunk", "residuals", "memory_budget", "remat")


def training_program(loss_fn, optimizer, *, options=None, **given):
    """Returns the training program; `options` are those of `StepOptions`, and arguments for passes."""
    options = dict(options or {})
    passes = {name: options.pop(name) for name in PASSES if name in options}
    return compile_pass.training_program(loss_fn, optimizer, **passes, options=StepOptions(**options), **given)
