"""Rematerialization under a budget of bytes: names, the recompute graph, the choice, and the loop that measures."""

import dataclasses
import functools
import gc
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreign.measured import step_for_memory
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from losses_over_budget import ARGUMENTS, biased_attention, contrastive, dpo, gru, poisson_residual, retention
from test_segments import mlp_block, unrolled

from hlat_jax.config import parse_remat
from hlat_jax.facts.byte_sizes import parse_bytes
from hlat_jax.passes import naming, recompute, remat_pass
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.naming import RematChoice
from hlat_jax.passes.products import live_jaxpr, total_flops

L, D, F, ROWS = 6, 16, 64, 256  # layers, width, hidden width, rows: temporaries of some 4 MiB
SMALL = remat_pass.RematOptions(min_bytes=1024)


def layer(params, x):
    hidden = jax.nn.gelu(x @ params["up"])
    return x + _squashed(hidden) @ params["down"]


@jax.checkpoint
def _squashed(hidden):
    return jnp.cos(jnp.sin(hidden) * hidden)


def loss(params, x):
    x = jax.lax.scan(lambda carry, one: (layer(one, carry), None), x, params)[0]
    return jnp.mean(jnp.square(x))


@functools.cache
def arguments(dtype="float32"):
    rng = np.random.default_rng(0)
    params = {"up": rng.standard_normal((L, D, F)) / 4, "down": rng.standard_normal((L, F, D)) / 8}
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), (params, rng.standard_normal((ROWS, D))))


def traced(choice, fn=loss):
    planned = fn if choice is None else naming.checkpointed(fn, choice, region="loops")
    return jax.jit(jax.value_and_grad(planned)).trace(*arguments())


@functools.cache
def graph():
    return recompute.recompute_graph(live_jaxpr(traced(RematChoice())), min_bytes=1024)


@functools.cache
def extremes():
    """Bytes of temporaries without rematerialization, and with nothing kept."""
    return remat_pass.temporaries(traced(None)), remat_pass.temporaries(traced(RematChoice()))


def budget_between(share):
    most, least = extremes()
    return int(least + share * (most - least))


@functools.cache
def plain_gradients():
    return jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(*arguments()))


def assert_same_gradients(fn):
    ours_all = jax.tree.leaves(jax.jit(jax.value_and_grad(fn))(*arguments()))
    for ours, plain in zip(ours_all, plain_gradients(), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-7 * float(jnp.max(jnp.abs(plain))))


# Names


def test_every_choice_of_names_keeps_values_and_gradients():
    params, x = arguments()
    for kept in (("scan0.sin.0", "scan0.tanh.0"), tuple(graph().sizes)):
        choice = RematChoice(kept)
        assert parse_remat(str(choice)).saved == choice.saved
        planned = naming.checkpointed(loss, choice, region="auto")
        assert planned.__name__ == "loss"
        assert_same_gradients(planned)
        np.testing.assert_allclose(planned(params, x=x), loss(params, x), rtol=1e-6)


def test_names_are_the_same_in_every_trace_and_do_not_depend_on_the_choice():
    def names(choice):
        return re.findall(
            r"name\[name=(.*)\]", str(jax.make_jaxpr(naming.checkpointed(layer, choice, region="whole"))(*one_layer()))
        )

    assert names(RematChoice()) == names(RematChoice(("dot_general.1",)))
    assert {"dot_general.0", "dot_general.1"} <= set(names(RematChoice()))


def one_layer():
    params, x = arguments()
    return jax.tree.map(lambda leaf: leaf[0], params), x


def test_loops_inside_calls_are_the_first_regions():
    assert naming.regions(jax.make_jaxpr(jax.jit(loss))(*arguments()).jaxpr)[0] == "loops"


def test_saved_value_inside_a_user_checkpoint_is_not_recomputed():
    assert number_of("sin", RematChoice()) == number_of("sin", RematChoice(("scan0.sin.0",))) + 2


def number_of(primitive, choice):
    return len(re.findall(rf"= {primitive}\b", str(live_jaxpr(traced(choice)))))


def test_values_chosen_for_another_function_are_refused():
    with pytest.raises(ValueError, match=r"no values scan0.dot_general.7, which were chosen for another function"):
        naming.checkpointed(loss, RematChoice(("scan0.dot_general.7",)), region="loops")(*arguments())


@jax.custom_vjp
def squared_sine(x):
    return jnp.sin(x) ** 2


def sine_for_backward(x):
    sine = checkpoint_name(jnp.sin(x), "sine")
    return sine * sine, sine


squared_sine.defvjp(sine_for_backward, lambda sine, g: (g * sine,))  # not the derivative, but as much work


def test_values_named_in_a_derivative_rule_can_be_saved():
    def fn(params, x):
        return jnp.mean(jax.lax.scan(lambda carry, one: (squared_sine(layer(one, carry)), None), x, params)[0])

    def num_sines(*saved):
        planned = naming.checkpointed(fn, RematChoice(saved), region="loops")
        return str(live_jaxpr(jax.jit(jax.grad(planned)).trace(*arguments()))).count(" sin ")

    assert num_sines("sine") == num_sines() - 1


# The graph and the choice


def test_graph_predicts_the_matmul_flops_of_every_choice():
    plain = total_flops(live_jaxpr(traced(None)))
    for names in ((), ("scan0.dot_general.0",), ("scan0.mul.3",), tuple(graph().sizes)):
        assert total_flops(live_jaxpr(traced(RematChoice(names)))) - plain == graph().flops(names)
    assert graph().flops(()) == 2 * L * ROWS * D * F


def flops(fn, *args):
    return total_flops(live_jaxpr(jax.jit(fn).trace(*args)))


def convolved(x, w, **options):
    return jax.lax.conv_general_dilated(x, w, padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def test_the_gradients_of_a_product_count_twice_its_own_flops():
    for product, left, right in (
        (jnp.matmul, (12, 4), (4, 5)),
        (lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([2, 7, 3], jnp.int32)), (12, 4), (3, 4, 5)),
        (functools.partial(convolved, window_strides=(1, 1)), (2, 8, 8, 4), (3, 3, 4, 6)),
        (functools.partial(convolved, window_strides=(2, 2)), (2, 8, 8, 4), (3, 3, 4, 6)),
        (functools.partial(convolved, window_strides=(1, 1), feature_group_count=2), (2, 8, 8, 4), (3, 3, 2, 6)),
    ):
        x, w = jnp.ones(left), jnp.ones(right)
        forward = flops(product, x, w)
        assert forward > 0
        gradients = jax.value_and_grad(lambda x, w, product=product: jnp.sum(product(x, w) ** 2), (0, 1))
        assert flops(gradients, x, w) == 3 * forward


def test_pallas_kernel_flops_count_every_grid_program():
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    def product(x, w):
        blocks = [pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 4), lambda i: (0, 0))]
        out = pl.BlockSpec((8, 4), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct((64, 4), x.dtype)
        return pl.pallas_call(kernel, shape, grid=(8,), in_specs=blocks, out_specs=out, interpret=True)(x, w)

    x, w = jnp.ones((64, 16)), jnp.ones((16, 4))
    assert flops(product, x, w) == flops(jnp.matmul, x, w)


def sizes_in(program):
    return recompute.recompute_graph(live_jaxpr(program), min_bytes=1).sizes


def test_a_loop_over_microbatches_keeps_the_values_of_one_microbatch_at_a_time():
    planned = naming.checkpointed(loss, RematChoice(), region="loops")
    params, x = arguments()

    def accumulated(params, x, reverse):
        def turn(total, rows):
            return jax.tree.map(jnp.add, total, jax.grad(planned)(params, rows)), None

        return jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), x.reshape(4, -1, D), reverse=reverse)[0]

    one = sizes_in(jax.jit(jax.grad(planned)).trace(params, x[: ROWS // 4]))
    assert one["scan0.dot_general.0"] == L * ROWS // 4 * F * 4
    for reverse in (False, True):
        assert sizes_in(jax.jit(functools.partial(accumulated, reverse=reverse)).trace(params, x)) == one


def random_graph(seed):
    rng = np.random.default_rng(seed)
    nodes, sizes = [], {}
    for number in range(18):
        parents = tuple(sorted({int(p) for p in rng.integers(0, number, 2)})) if number else ()
        name = f"v{number}" if number % 2 else ""
        if name:
            sizes[name] = int(rng.integers(1, 20))
        cost = float(rng.integers(0, 9))
        nodes.append(recompute.Node(cost, cost, parents, name, bool(rng.random() < 0.4)))
    return recompute.RecomputeGraph(tuple(nodes), sizes)


def test_the_choice_is_the_cheapest_of_all_sets_and_saves_nothing_in_vain():
    for seed, budget in itertools.product(range(4), (0, 7, 20, 45, 1000)):
        g = random_graph(seed)
        sets = [c for n in range(len(g.sizes) + 1) for c in itertools.combinations(g.sizes, n)]
        saved = g.cheapest(budget_bytes=budget)
        assert g.num_bytes(saved) <= budget
        assert g.cost(saved) == min(g.cost(c) for c in sets if g.num_bytes(c) <= budget)
        assert all(g.cost({*saved} - {name}) > g.cost(saved) for name in saved)


# The loop that measures


def test_fit_meets_every_budget_with_equal_gradients_and_recomputes_less_under_larger_ones():
    options = dataclasses.replace(SMALL, max_compilations=5)
    costs = []
    for share in (0.7, 0.15):
        budget = budget_between(share)
        plan = remat_pass.fit(loss, *arguments(), budget_bytes=budget, step=jax.value_and_grad, options=options)
        program = jax.jit(jax.value_and_grad(plan.fn)).trace(*arguments())
        assert plan.measured_bytes == remat_pass.temporaries(program) <= budget
        assert plan.flops == plan.predicted_flops == total_flops(live_jaxpr(program))
        assert plan.choice is not None
        assert plan.predicted_bytes >= extremes()[1] or plan.full is None
        assert plan.recompute_share == plan.flops / plan.plain[1] - 1
        assert plan.compilations <= options.max_compilations
        assert_same_gradients(plan.fn)
        costs.append(graph().cost(plan.choice.saved))
    assert [*costs, graph().cost(())] == sorted({*costs, graph().cost(())})


def test_program_that_fits_is_unchanged():
    plan = remat_pass.fit(loss, *arguments(), budget_bytes="1GiB", options=SMALL)
    assert (plan.choice, plan.fn, plan.recompute_share, plan.compilations) == (None, loss, 0.0, 1)
    assert "everything, since it fits without rematerialization" in plan.report()


def test_a_report_compares_the_measured_bytes_with_the_budget():
    sizes = {"budget_bytes": 3 << 20, "measured_bytes": 2 << 20, "predicted_bytes": 4 << 20, "plain": (5 << 20, 1.0)}
    counts = {"flops": 1.0, "predicted_flops": 1.0, "full": None, "compilations": 3, "seconds": 1.0}
    plan = remat_pass.RematPlan(RematChoice(("a",)), **sizes, **counts)
    assert "2.00 MiB measured, of a budget of 3.00 MiB; 4.00 MiB estimated before compilation" in plan.report()


def shapes_of_six_blocks():
    up, down, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 1024), (1024, 256), (1024, 256)))
    return [{"up": up, "down": down}] * 6, x


def bytes_of_blocks(fn):
    return remat_pass.temporaries(step_for_memory(fn).trace(*shapes_of_six_blocks()))


def fit_blocks(budget, fn=unrolled, region="auto"):
    options = remat_pass.RematOptions(region=region)
    return remat_pass.fit(fn, *shapes_of_six_blocks(), budget_bytes=budget, step=step_for_memory, options=options)


def test_keeping_nothing_is_not_compiled_if_a_choice_fits():
    plan = fit_blocks(int(0.5 * bytes_of_blocks(unrolled)))
    assert plan.choice.saved
    assert plan.full is None
    assert plan.compilations <= 3
    assert bytes_of_blocks(plan.fn) == plan.measured_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_a_first_choice_that_exceeds_its_estimate_is_corrected():
    measured = []

    def twice(traced):
        measured.append(2 * remat_pass.temporaries(traced))
        return measured[-1]

    options = remat_pass.RematOptions(measure=twice)
    budget = int(0.9 * bytes_of_blocks(unrolled))
    plan = remat_pass.fit(unrolled, *shapes_of_six_blocks(), budget_bytes=budget, step=step_for_memory, options=options)
    assert plan.measured_bytes == 2 * bytes_of_blocks(plan.fn) <= budget < measured[1]


def test_blocks_that_just_fit_are_compiled_once():
    plan = fit_blocks(bytes_of_blocks(unrolled))
    assert (plan.choice, plan.compilations) == (None, 1)


@pytest.mark.slow
def test_a_budget_for_blocks_in_a_loop_compiles_few_programs():
    compiled = []

    def measure(traced):
        compiled.append(traced)
        return remat_pass.temporaries(traced)

    blocks = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((32, 32), leaf.dtype), shapes_of_six_blocks()[0]) * 2
    arguments = blocks, jax.ShapeDtypeStruct((256, 32), jnp.float32)
    most = remat_pass.temporaries(step_for_memory(unrolled).trace(*arguments))
    for share in (0.6, 0.75):
        compiled.clear()
        options = remat_pass.RematOptions(measure=measure, min_bytes=1024)
        plan = remat_pass.fit(
            unrolled, *arguments, budget_bytes=int(share * most), step=step_for_memory, options=options
        )
        assert plan.measured_bytes <= share * most
        assert len(compiled) == plan.compilations <= 4


@pytest.mark.slow
def test_unrolled_blocks_meet_the_budgets_of_their_scan_and_recompute_no_more():
    budget = "43MiB"
    blocks, x = shapes_of_six_blocks()
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((6, *leaf.shape), leaf.dtype), blocks[0])

    def rolled(params, x):
        return jnp.mean(jax.lax.scan(lambda carry, one: (mlp_block(one, carry), None), x, params)[0] ** 2)

    ours = fit_blocks(budget)
    scanned = remat_pass.fit(rolled, stacked, x, budget_bytes=budget, step=step_for_memory)
    assert bytes_of_blocks(ours.fn) == ours.measured_bytes <= parse_bytes(budget, name="budget")
    assert ours.flops <= scanned.flops
    assert (ours.region, ours.segments, scanned.region) == ("segments", (5, 1), "loops")
    assert "segments   6 of 2 kinds, a checkpoint around each" in ours.report()


@pytest.mark.slow
def test_a_search_leaves_a_range_of_choices_of_equal_bytes():
    up, down, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 16, 64), (4, 64, 16), (512, 16)))

    def blocks(params, x):
        for index in range(4):
            x = x + jnp.tanh(jax.nn.gelu(x @ params[0][index]) @ params[1][index])
        return jnp.mean(x**2)

    budget = int(0.6 * remat_pass.temporaries(jax.jit(jax.value_and_grad(blocks)).trace((up, down), x)))
    plan = remat_pass.fit(blocks, (up, down), x, budget_bytes=budget, options=SMALL)
    assert plan.recompute_share < 0.1  # 13 % in the choice below the range
    assert plan.compilations <= SMALL.max_compilations


@pytest.mark.slow
def test_unmet_budget_error_has_what_was_measured_and_what_to_change():
    with pytest.raises(remat_pass.BudgetNotMet) as refused:
        fit_blocks("1MiB")
    least = bytes_of_blocks(naming.checkpointed(unrolled, RematChoice(), region="segments"))
    assert f"the program takes {least:,} bytes" in str(refused.value)
    assert re.search(r" [\d.]+ MiB with intermediates above 32.00 KiB in chunks\. ", str(refused.value))
    assert "lax.scan, or put jax.checkpoint around each" in str(refused.value)
    per_block = functools.partial(unrolled, block=jax.checkpoint(mlp_block))
    assert fit_blocks(bytes_of_blocks(per_block), per_block).choice is None  # the function's own checkpoints count


@pytest.mark.slow
def test_a_changed_function_without_the_region_is_not_tried():
    with pytest.raises(remat_pass.BudgetNotMet, match="with nothing kept") as refused:
        fit_blocks("1MiB", region="segments")
    assert "passes.chunk finds nothing" not in str(refused.value)  # chunks leave no segments


@pytest.mark.slow
@pytest.mark.parametrize("fn", [biased_attention, dpo, poisson_residual, contrastive])
def test_a_budget_that_saving_cannot_meet_is_met_in_chunks(fn):
    args = ARGUMENTS[fn]
    plain = remat_pass.temporaries(jax.jit(jax.value_and_grad(fn)).trace(*args))
    plan = remat_pass.fit(fn, *args, budget_bytes=int(0.6 * plain), options=SMALL)
    assert plan.plain[0] == plain
    assert (
        plan.measured_bytes == remat_pass.temporaries(jax.jit(jax.value_and_grad(plan.fn)).trace(*args)) <= 0.6 * plain
    )
    assert list(plan.passes) == ["chunk"]
    assert re.match(r"changed    chunk .*at losses_over_budget.py:\d+ .*float32\[.*\] in \d+ parts", plan.report())
    found, expected = (jax.tree.leaves(jax.jit(jax.value_and_grad(each))(*args)) for each in (plan.fn, fn))
    for ours, plain_one in zip(found, expected, strict=True):  # sums in another order, in fp32
        np.testing.assert_allclose(ours, plain_one, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(plain_one))))


def test_a_scan_over_time_meets_a_budget_as_two_nested_scans():
    plain = remat_pass.temporaries(jax.jit(jax.value_and_grad(retention)).trace(*ARGUMENTS[retention]))
    plan = remat_pass.fit(retention, *ARGUMENTS[retention], budget_bytes=int(0.6 * plain), options=SMALL)
    assert plan.measured_bytes <= 0.6 * plain
    assert (plan.choice, list(plan.passes), plan.compilations) == (None, ["nest"], 3)
    assert re.match(r"changed    scan at losses_over_budget.py:\d+ .*: 256 steps in \d+ segments", plan.report())


def test_a_refusal_has_each_change_that_was_tried_and_advises_no_scan_where_there_is_one():
    with pytest.raises(remat_pass.BudgetNotMet) as refused:
        remat_pass.fit(gru, *ARGUMENTS[gru], budget_bytes=4096, options=SMALL)
    assert re.search(r", about [\d.]+ KiB with long scans split in two\.", str(refused.value))
    assert "passes.chunk finds nothing whose chunks would take fewer bytes." in str(refused.value)
    assert "lax.scan" not in str(refused.value)


def test_changes_far_above_a_budget_are_not_compiled():
    measured = []

    def measure(traced):
        assert not gc.isenabled()  # its collections would take a tenth of the time
        measured.append(remat_pass.temporaries(traced))
        return measured[-1]

    with pytest.raises(remat_pass.BudgetNotMet, match="about"):
        remat_pass.fit(gru, *ARGUMENTS[gru], budget_bytes=4096, options=dataclasses.replace(SMALL, measure=measure))
    assert len(measured) == 2  # with everything and with nothing kept
    assert gc.isenabled()


def test_a_budget_far_below_every_estimate_is_refused_after_two_programs():
    def blocks(weights, x):
        for weight in weights:
            x = x + jnp.tanh(x @ weight) @ weight.T
        return jnp.sum(jnp.sort(x, axis=0) ** 2)  # along which there are no chunks

    weights, x = [jax.ShapeDtypeStruct((64, 256), jnp.float32)] * 6, jax.ShapeDtypeStruct((512, 64), jnp.float32)
    measured = []

    def measure(traced):
        measured.append(remat_pass.temporaries(traced))
        return measured[-1]

    with pytest.raises(remat_pass.BudgetNotMet, match=r"with nothing kept, .* without rematerialization"):
        remat_pass.fit(blocks, weights, x, budget_bytes=65536, options=dataclasses.replace(SMALL, measure=measure))
    assert len(measured) == 2  # everything kept, nothing kept: estimates rule out the stock policies


def test_passes_come_after_the_changes_that_meet_a_budget():
    seen = []

    def later(fn):
        seen.append(fn)
        return autocast(fn, "bf16")

    plan = remat_pass.fit(retention, *ARGUMENTS[retention], budget_bytes="300KiB", options=SMALL, passes=(later,))
    assert list(plan.passes) == ["nest"]
    assert "bf16[" in str(jax.make_jaxpr(plan.fn)(*ARGUMENTS[retention]))
    assert seen[-1].report().replacements


def test_a_search_traces_the_passes_of_a_function_once():
    calls = []

    def later(fn):
        def passed(*args):
            calls.append(args)
            return fn(*args)

        return passed

    plan = remat_pass.fit(loss, *arguments(), budget_bytes=budget_between(0.5), options=SMALL, passes=(later,))
    assert plan.compilations > 2
    assert len(calls) == 1


def test_equal_blocks_in_a_python_loop_are_traced_once(monkeypatch):
    made = []

    def checkpoint(*args, **options):
        made.append(args)
        return in_order(*args, **options)

    in_order = naming.fences.checkpoint_in_order
    monkeypatch.setattr(naming.fences, "checkpoint_in_order", checkpoint)

    def scaled(params, x):  # blocks of one kind that differ in a constant
        for scale, one in enumerate(params):
            x = x + (scale + 0.5) * (mlp_block(one, x) - x)
        return jnp.mean(x**2)

    for fn, most in ((unrolled, 2), (scaled, 7)):
        made.clear()
        jax.eval_shape(naming.checkpointed(fn, RematChoice(), region="segments"), *shapes_of_six_blocks())
        assert most - 1 <= len(made) <= most


def test_a_budget_in_another_unit_or_an_unknown_region_is_refused_with_what_is_taken():
    with pytest.raises(ValueError, match="region='loop' must be auto, loops, segments, whole"):
        remat_pass.RematOptions(region="loop")
    for size in (12, "12", "12 GB/s", "-1GiB", 1.5e9, True, "", None):
        said = r"^memory_budget=.* is not a size in bytes. Give a size with its unit, such as '12GiB'.*an int"
        with pytest.raises(ValueError, match=said):
            remat_pass.fit(loss, *arguments(), budget_bytes=size, name="memory_budget")
