"""The training step of any loss and any Optax optimizer.

    step = train_step(loss, optax.adam(1e-3), options=StepOptions(num_microbatches=4))
    state, metrics = step.step(step.init(params), batch)

`builder` has the order of a step, which is loss -> gradients -> update.
"""

from hlat_jax.step.builder import EvalMetrics, StepFn, TrainStep, Transform, train_step
from hlat_jax.step.loss_signature import LossFn
from hlat_jax.step.microbatches import MicrobatchStep
from hlat_jax.step.options import FP32, StepOptions
from hlat_jax.step.state import State
from hlat_jax.step.update import StepMetrics

__all__ = [
    "FP32",
    "EvalMetrics",
    "LossFn",
    "MicrobatchStep",
    "State",
    "StepFn",
    "StepMetrics",
    "StepOptions",
    "TrainStep",
    "Transform",
    "train_step",
]
