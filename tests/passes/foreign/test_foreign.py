"""The passes on models that are not ours: styles of public code, and whole models of packages as they are."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foreign import equinox_styles
from foreign.measured import distance, residual_bytes, rounded, step_for_memory, total_product_flops
from foreign.models import MODELS
from foreign.plain_styles import conformer
from foreign.unchanged import UNCHANGED
from hlat_jax.passes import kernels_pass, remat_pass
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.chunk_pass import chunk
from hlat_jax.passes.jaxpr import equations
from hlat_jax.passes.kernels_pass import kernels
from hlat_jax.passes.products import PRODUCTS, product_flops
from hlat_jax.passes.residuals import select_residuals

BF16_STEP = 2.0**-8
ALL = MODELS | UNCHANGED
QUICK = ("moe", "gnn")  # little to initialize; the other cases are slow
# Residual bytes under autocast, relative to fp32, at the small sizes: most of what each may keep. Where parameters are
# as large as activations, their narrow copies count.
KEPT = {
    "nanodo": 0.79,
    "lm1b": 0.93,
    "gemma": 0.83,
    "haiku_transformer": 0.88,
    "haiku_lstm": 1.12,
    "vit": 0.79,
    "resnet": 0.80,
    "unet": 0.66,
    "moe": 0.91,
    "gnn": 0.83,
    "ctc": 1.01,
    "odeint": 1.25,
    "haiku ResNet18": 0.80,
    "penzai Llama": 0.85,
    "equimo ViT": 0.78,
    "flax attention": 0.82,
}
BUDGETED = ("nanodo", "unet", "moe", "gnn")  # blocks in loops, a bottleneck, products of groups, a graph
# Attentions that cuDNN would take. Those of lm1b have dropout, those of gemma a softcap.
ATTENTIONS = {"nanodo": 2, "haiku_transformer": 2, "vit": 2, "penzai Llama": 2, "equimo ViT": 2, "flax attention": 1}
# Models with intermediates that are large next to what loops would keep, also at the small sizes.
IN_CHUNKS = {"nanodo", "lm1b", "gemma", "haiku_transformer", "vit", "resnet", "ctc"}


@functools.cache
def model(name):
    return ALL[name](small=True)


@functools.cache
def gradients(name):
    """(loss, gradients) of the model in fp32."""
    loss, params, batch = model(name)
    return jax.jit(jax.value_and_grad(loss))(params, batch)


def narrow_share(fn, *args):
    """The share of the FLOPs of all products of a trace whose operands are bf16."""
    found = [eqn for eqn, _ in equations(jax.make_jaxpr(fn)(*args).jaxpr) if eqn.primitive.name in PRODUCTS]
    narrow = [eqn for eqn in found if {var.aval.dtype for var in eqn.invars[:2]} == {jnp.dtype("bfloat16")}]
    return sum(map(product_flops, narrow)) / sum(map(product_flops, found))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ALL)[::2])
def test_gradients_under_autocast_and_selection_are_within_the_rounding_of_bf16(name):
    loss, params, batch = model(name)
    wanted, grads = gradients(name)
    low = autocast(loss, "bf16")
    narrow, selected = (jax.jit(jax.value_and_grad(fn))(params, batch) for fn in (low, select_residuals(low)))
    assert all(grad.dtype == np.float32 for grad in jax.tree.leaves(narrow[1]))
    np.testing.assert_allclose(narrow[0], wanted, rtol=BF16_STEP)
    # eight roundings in the norm of all gradients; where batch norm or routing makes more of one, what rounding the
    # weights and the batch once makes of it in fp32
    away = distance(narrow[1], grads)
    if away > 8 * BF16_STEP:
        once = jax.jit(jax.grad(loss))(rounded(params), rounded(batch))
        assert away <= 3 * distance(once, grads)
    np.testing.assert_allclose(selected[0], narrow[0], rtol=BF16_STEP)
    assert distance(selected[1], grads) <= 1.1 * away + BF16_STEP


@pytest.mark.quick_cases(*QUICK)
@pytest.mark.parametrize("name", ALL)
def test_passes_keep_fewer_bytes_narrow_the_products_and_repeat_none(name):
    loss, params, batch = model(name)
    low = autocast(loss, "bf16")
    selected = select_residuals(low)
    # the steps of the solver of odeint are fp32
    assert (narrow_share(low, params, batch) > 0.97) == (name != "odeint")
    plain, by_autocast, alone, both = (
        residual_bytes(form, params, batch) for form in (loss, low, select_residuals(loss), selected)
    )
    assert KEPT[name] - 0.1 < by_autocast / plain <= KEPT[name]
    assert both <= min(by_autocast, alone, 0.45 * plain)
    assert total_product_flops(selected, params, batch) <= 1.0001 * total_product_flops(loss, params, batch)


@pytest.mark.slow
def test_residuals_in_the_trace_are_those_that_xla_allocates():
    loss, params, batch = model("nanodo")
    counted = residual_bytes(loss, params, batch)
    assert counted <= residual_bytes(loss, params, batch, by_xla=True) <= 1.02 * counted  # a table of the results


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_kernels_and_chunks_of_foreign_models_change_no_gradient(name, monkeypatch):
    cudnn = kernels_pass._CUDNN
    without = cudnn._replace(run=cudnn.on_cpu, refusals=lambda *args, **call: [])
    monkeypatch.setitem(kernels_pass._KERNELS, "cuda", without)
    loss, params, batch = model(name)
    called = kernels(loss, platform="cuda")
    ours = chunk(called, max_bytes="4KiB")
    value, grads = jax.jit(jax.value_and_grad(ours))(params, batch)
    assert sum(one.count for one in called.report().replacements) == ATTENTIONS.get(name, 0)
    assert ours.report().replacements or name not in IN_CHUNKS, ours.report()
    wanted, wanted_grads = gradients(name)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert distance(grads, wanted_grads) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BUDGETED, "conformer"])
def test_a_budget_of_bytes_is_met_with_equal_gradients(name):
    loss, params, batch = conformer() if name == "conformer" else model(name)
    plain = remat_pass.temporaries(step_for_memory(loss).trace(params, batch))
    budget = int((0.6 if name == "conformer" else 0.8) * plain)
    options = remat_pass.RematOptions(min_bytes=1024)
    plan = remat_pass.fit(loss, params, batch, budget_bytes=budget, step=step_for_memory, options=options)
    assert plan.measured_bytes <= budget
    value, grads = step_for_memory(plan.fn)(params, batch)
    wanted, wanted_grads = jax.jit(jax.value_and_grad(loss))(params, batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert distance(grads, wanted_grads) <= 1e-5  # fusions differ, so that sums round otherwise


@pytest.mark.slow
def test_a_unet_is_refused_below_what_checkpoints_by_hand_take(monkeypatch):
    loss, params, batch = model("unet")
    plain = remat_pass.temporaries(step_for_memory(loss).trace(params, batch))
    options = remat_pass.RematOptions(min_bytes=1024)
    with pytest.raises(remat_pass.BudgetNotMet) as refused:
        remat_pass.fit(loss, params, batch, budget_bytes=int(0.6 * plain), step=step_for_memory, options=options)
    block = equinox_styles.Convolutions.__call__
    monkeypatch.setattr(equinox_styles.Convolutions, "__call__", jax.checkpoint(block))
    by_hand = remat_pass.temporaries(step_for_memory(loss).trace(params, batch))
    least = int(re.search(r"takes ([\d,]+) bytes", str(refused.value))[1].replace(",", ""))
    assert 0.6 * plain < least <= by_hand < plain
