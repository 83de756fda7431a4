"""The sweep: operations of a step run on eight devices and compared with one CPU; planted wrong ones are named."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hlat_jax.cli import config_files
from hlat_jax.facts.core_groups import Server
from hlat_jax.neuron import doctor, exercises, partitioned, step_operations, sweep
from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED, Outcome
from hlat_jax.neuron.sweep import Limits
from hlat_jax.parallel.virtual_devices import PlannedClient, planned_layout
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve

DEVICES = 8


@functools.cache
def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))


@functools.cache
def mixed_operations():
    """Returns operations of a program with those that public reports name: by mask, by index, across devices."""

    def local(x, table, ids, mask):
        rows = table.at[ids].get(mode="clip")
        rows = jnp.where(mask[:, None], rows[:, ::-1], rows)
        table = table.at[ids].add(rows.astype(table.dtype))
        y = jax.lax.psum(x @ rows.T.astype(x.dtype), "tensor")
        y = jax.lax.all_gather(y, ("data", "tensor"), axis=0, tiled=True)
        y = jax.lax.psum_scatter(y, "data", scatter_dimension=0, tiled=True)
        y = jax.lax.ppermute(jnp.exp(y) / (1 + y * y), "tensor", [(i, (i + 1) % 4) for i in range(4)])
        return y.sum() + jax.lax.sort(table[:, 0])[0] + jax.lax.axis_index("data")

    step = jax.jit(jax.shard_map(local, mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False))
    shapes = [((4, 16), "float32"), ((32, 16), "bfloat16"), ((8,), "int32"), ((8,), "bool")]
    traced = step.trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes))
    return step_operations.operations([traced.jaxpr.jaxpr], {})


def on_devices(operations, operands):
    return exercises.run_operations(operations, operands, mesh=mesh(), devices=jax.devices())


def on_cpu(operations, operands):
    return exercises.operations_on_cpu(operations, operands, axes=dict(mesh().shape))


def swept(operations, *, run=on_devices, reference=on_cpu, limits=sweep.DEFAULT_LIMITS, **options):
    counts = {"num_devices": DEVICES, "num_in_mesh": DEVICES, "share_memory": True}
    return sweep.sweep(operations, run=run, reference=reference, limits=limits, **counts, **options)


def planted(name, change, *, devices=range(DEVICES)):
    """Returns `run` with one kind of operation changed: `change` is applied to results on some devices."""

    def run(operations, operands):
        found = on_devices(operations, operands)
        for one, results in zip(operations, found, strict=True):
            for result in results if one.name == name else ():
                for device in devices:
                    result[device] = change(np.asarray(result[device]))
        return found

    return run


def test_operations_of_eight_devices_agree_with_one_cpu():
    outcome = swept(mixed_operations())
    assert outcome.verdict == PASSED, outcome
    count = len(mixed_operations())
    assert f"{count} of {count} operations of the step" in outcome.found
    assert "not compared" not in outcome.found
    kinds = {one.name for one in mixed_operations()}
    assert kinds >= {"gather", "scatter-add", "select_n", "psum", "all_gather", "reduce_scatter", "ppermute", "sort"}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gather", lambda x: np.roll(x, 1, 0), "gather of bfloat16[32, 16], int32[8, 1]"),  # each row is the next one's
        ("select_n", lambda x: x[::-1], "select_n of bool[8], int32[8], int32[8]"),
        ("scatter-add", np.zeros_like, "scatter-add of bfloat16[32, 16]"),
        ("dot_general", lambda x: x + np.eye(*x.shape, dtype=x.dtype), "dot_general"),
        ("psum", lambda x: x / 2, "psum of float32[4, 8]"),
        ("reduce_scatter", lambda x: np.flip(x, 0), "reduce_scatter"),
        ("ppermute", lambda x: 0 * x, "ppermute"),
        ("exp", lambda x: x * 1.01, "exp of float32"),
        ("sort", lambda x: x[..., ::-1], "sort"),
    ],
)
def test_a_planted_wrong_operation_is_named_with_its_shapes_and_line(name, change, words):
    operations = [one for one in mixed_operations() if one.name in (name, "reshape", "transpose")]
    outcome = swept(operations, run=planted(name, change))
    assert outcome.verdict == FAILED
    assert outcome.found.startswith(words)
    assert "test_sweep.py:" in outcome.found
    assert "on all devices" in outcome.found
    assert "on the CPU" in outcome.found


def test_a_single_wrong_device_is_named():
    operations = [one for one in mixed_operations() if one.name in ("gather", "psum")]
    outcome = swept(operations, run=planted("gather", lambda x: -x, devices=[5]))
    assert outcome.verdict == FAILED
    assert "on device 5 " in outcome.found
    outcome = swept(operations, run=planted("psum", lambda x: x + 1, devices=[2, 6]))
    assert "on device 2 and 1 more" in outcome.found


def test_the_first_that_differs_comes_first_and_the_others_are_counted():
    def run(operations, operands):
        wrong = planted("psum", lambda x: x + 1), planted("select_n", lambda x: -x)
        return wrong[operations[0].name == "select_n"](operations, operands)

    names = [one.name for one in mixed_operations() if one.name in ("select_n", "psum")]
    assert names.index("select_n") < names.index("psum")
    outcome = swept([one for one in mixed_operations() if one.name in names], run=run)
    assert outcome.found.startswith("select_n of")
    assert "; also " in outcome.found
    assert "psum x1" in outcome.found


def test_a_kind_that_does_not_compile_is_run_one_by_one_and_named():
    (gather,) = (one for one in mixed_operations() if one.name == "gather")
    smaller = dataclasses.replace(
        gather, operands=(jax.ShapeDtypeStruct((32, 16), "float32"), *gather.operands[1:]), position=gather.position + 1
    )

    def run(operations, operands):
        if any(one.operands[0].dtype == np.float32 for one in operations):
            raise RuntimeError("permutation.size() == data.size() (1 vs. 2)")
        return on_devices(operations, operands)

    outcome = swept([gather, smaller], run=run)
    assert outcome.verdict == FAILED
    assert outcome.found.startswith("gather of float32[32, 16]")
    assert "does not run: RuntimeError: permutation.size()" in outcome.found
    assert "2 of 2 operations" in outcome.found

    def only_alone(operations, operands):
        if len(operations) > 1:
            raise RuntimeError("too large")
        return on_devices(operations, operands)

    outcome = swept([gather, smaller], run=only_alone)
    assert outcome.verdict == PASSED
    assert "only one by one: gather x2 (RuntimeError: too large)" in outcome.found


def test_operations_that_the_cpu_cannot_run_are_counted():
    def reference(operations, operands):
        if operations[0].name == "sort":
            raise NotImplementedError("no lowering for cpu")
        return on_cpu(operations, operands)

    operations = [one for one in mixed_operations() if one.name in ("sort", "gather")]
    outcome = swept(operations, reference=reference)
    assert outcome.verdict == PASSED
    reason = "NotImplementedError: no lowering for cpu"
    assert f"not compared: 1 that the CPU cannot run ({reason}); no sort at all" in outcome.found


def test_an_operation_without_a_lowering_for_the_devices_fails():
    def run(operations, operands):
        raise NotImplementedError("no lowering for neuron")

    (gather,) = (one for one in mixed_operations() if one.name == "gather")
    outcome = swept([gather], run=run)
    assert outcome.verdict == FAILED
    assert "does not run: NotImplementedError: no lowering for neuron" in outcome.found


def test_limits_of_memory_and_time_leave_operations_out_and_say_so():
    operations = mixed_operations()
    (gather,) = (one for one in operations if one.name == "gather")
    outcome = swept([gather], limits=Limits(60, DEVICES * gather.num_bytes - 1))
    assert outcome.verdict == NOT_HERE
    assert "1 larger than --sweep_gib; no gather at all" in outcome.found
    assert swept([gather], limits=Limits(60, DEVICES * gather.num_bytes)).verdict == PASSED
    (psum,) = (one for one in operations if one.name == "psum")
    assert swept([psum], limits=Limits(60, DEVICES * psum.num_bytes - 1)).verdict == NOT_HERE
    times = iter([0.0, 0.0, 100.0, 100.0])
    outcome = swept([gather, psum], limits=Limits(60), clock=lambda: next(times))
    assert "1 of 2 operations" in outcome.found
    assert "1 after --sweep_s" in outcome.found


def test_batches_hold_every_kind_first_and_keep_to_the_limits():
    sizes = [("exp", 10), ("gather", 40), ("gather", 60), ("psum", 9), ("gather", 50), ("psum", 9)]
    made = [
        dataclasses.replace(operation(name), num_bytes=size, position=position)
        for position, (name, size) in enumerate(sizes)
    ]
    batches = sweep._batches(made, per_device=100, together=10)
    # the largest of each kind, those in public reports first, and then the others
    assert [[one.position for one in batch] for batch in batches] == [[2], [3], [0], [1, 4], [5]]
    many = [dataclasses.replace(operation("add"), position=position) for position in range(20)]
    assert [len(batch) for batch in sweep._batches(many, per_device=100, together=10)] == [16, 4]


# what counts as a difference


def operation(name, *operands, **params):
    kinds = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands)
    return step_operations.Operation(name, kinds, params, None, 0, "", 0)


@pytest.mark.parametrize(
    ("name", "dtype", "error", "is_wrong"),
    [
        ("gather", "float32", 2.0**-23, True),  # what is only moved is equal
        ("add", "float32", 2.0**-23, False),
        ("add", "float32", 2.0**-18, True),
        ("exp", "float32", 2.0**-13, False),
        ("exp", "float32", 2.0**-7, True),
        ("dot_general", "float32", 2.0**-23, True),  # sums of small integers are exact
        ("dot_general", "bfloat16", 2.0**-7, False),  # the device may round stochastically
        ("dot_general", "bfloat16", 2.0**-5, True),
        ("mul", "bfloat16", 2.0**-7, False),
    ],
)
def test_errors_are_allowed_by_the_kind_of_operation(name, dtype, error, is_wrong):
    want = np.asarray(np.linspace(1, 2, 8, endpoint=False), dtype)
    got = want.copy()
    got[3:4] = np.asarray(want[3:4].astype(np.float64) * (1 + error), dtype)
    found = sweep.difference(operation(name, ((8,), dtype)), got, want)
    assert bool(found) == is_wrong
    if is_wrong:
        assert found.startswith("1 of 8 elements differ, of which the first is at [3]: ")


def test_nan_and_infinity_must_be_where_the_cpu_has_them():
    want = np.array([np.nan, np.inf, -np.inf, 0.0], np.float32)
    assert sweep.difference(operation("exp"), want.copy(), want) is None
    for place, value in ((0, 0.0), (1, 1e38), (2, np.inf), (3, np.nan)):
        got = want.copy()
        got[place] = value
        assert sweep.difference(operation("exp"), got, want).startswith("1 of 4")


def test_integers_and_types_must_be_equal():
    want = np.arange(4)
    assert sweep.difference(operation("add"), want + (want == 2), want).startswith("1 of 4")
    assert "int64[4], on the CPU int32[4]" in sweep.difference(operation("add"), want, want.astype(np.int32))


# operands


def drawn(found):
    return step_operations.sample(found, np.random.default_rng(0))


def only(name, fn, *shapes):
    traced = jax.jit(fn).trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes))
    (found,) = (one for one in step_operations.operations([traced.jaxpr.jaxpr], {}) if one.name == name)
    return found


def test_indices_are_in_range_and_written_once():
    gather = only("gather", lambda x, i: x.at[i].get(mode="promise_in_bounds"), ((50, 3), "float32"), ((40,), "int32"))
    rows = drawn(gather)[1]
    assert rows.min() >= 0
    assert rows.max() < 50
    assert len(np.unique(rows)) > 10
    scatter = only("scatter", lambda x, i, y: x.at[i].set(y), ((50,), "float32"), ((40,), "int32"), ((40,), "float32"))
    assert len(np.unique(drawn(scatter)[1])) == 40
    twice = only("scatter", lambda x, i, y: x.at[i].set(y), ((30,), "float32"), ((40,), "int32"), ((40,), "float32"))
    assert len(np.unique(drawn(twice)[2])) == 1  # whichever write is the last
    cut = only("dynamic_slice", lambda x, i: jax.lax.dynamic_slice(x, (i, 0), (8, 2)), ((10, 2), "int8"), ((), "int32"))
    assert 0 <= drawn(cut)[1] <= 2
    assert drawn(cut)[2] == 0


def test_random_numbers_are_not_compared_because_backends_draw_others():
    def draw(seed):
        return jax.random.normal(jax.random.wrap_key_data(jnp.full(4, seed), impl="rbg"), (8,)) + 1

    traced = jax.jit(draw).trace(jax.ShapeDtypeStruct((), "uint32"))
    names = {one.name for one in step_operations.operations([traced.jaxpr.jaxpr], {})}
    assert "add" in names
    assert not [name for name in names if name.startswith(("random", "rng"))]


def test_operands_are_where_operations_are_defined():
    x = ((1000,), "float32")
    assert drawn(only("log", jnp.log, x))[0].min() > 0
    assert np.abs(drawn(only("div", jnp.divide, x, x))[1]).min() > 0
    assert drawn(only("div", jax.lax.div, ((99,), "int32"), ((99,), "int32")))[1].min() > 0
    low, _, high = drawn(only("clamp", jax.lax.clamp, x, x, x))
    assert (low <= high).all()
    terms = drawn(only("reduce_sum", jnp.sum, x))[0]
    assert set(np.unique(terms)) == {-3, -2, -1, 0, 1, 2, 3}
    bits = drawn(only("xor", jnp.bitwise_xor, ((1000,), "uint32"), ((1000,), "uint32")))[0]
    assert bits.max() > 2**31
    choice = drawn(only("select_n", lambda i, *xs: jax.lax.select_n(i, *xs), ((1000,), "int32"), x, x, x))[0]
    assert set(np.unique(choice)) == {0, 1, 2}


# the step of a config


def small_config(**parallel):
    mutable = config_files.load("tiny")
    mutable.data.batch_size = 8
    mutable.train.num_microbatches = 2
    mutable.model.num_layers = 2
    mutable.model.layer_loop = "scan"
    mutable.parallel.update({"data": 2, "fsdp": 1, "tensor": 2} | parallel)
    return resolve(mutable)


def test_operations_of_a_step_have_the_shapes_of_one_device_and_the_slices_of_its_loops():
    config = small_config()
    program = make_program(config, planned_layout(config, 4, platform="neuron"))
    found = step_operations.step_operations(program)
    model, data = config.model, config.data
    rows = data.batch_size // 2 // 2
    lookup = [one for one in found if one.name == "gather" and one.operands[0].shape[1:] == (model.embed_dim,)]
    assert [one.operands[0].shape[0] for one in lookup] == [model.vocab_size // 2]
    assert [one.operands[1].shape[:2] for one in lookup] == [(rows, data.seq_len)]
    assert any(one.name == "dynamic_slice" and one.operands[0].shape[0] == 2 for one in found)
    assert {"psum", "all_gather", "reduce_scatter"} & {one.name for one in found}
    # the optimizer runs outside `shard_map`, on shards
    roots = [one for one in found if one.name == "sqrt" and len(one.operands[0].shape) > 1]
    shards = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(program.abstract_state["opt_state"])}
    assert roots
    assert {one.operands[0].shape for one in roots} <= shards
    assert len({(one.name, one.operands, str(one.params)) for one in found}) == len(found)


def test_operations_are_those_of_the_programs_that_the_run_dispatches():
    config = small_config()

    def kinds(accumulate):
        train = dataclasses.replace(config.train, accumulate=accumulate)
        program = make_program(dataclasses.replace(config, train=train), planned_layout(config, 4, platform="neuron"))
        assert program.accumulate == accumulate
        return {(one.name, one.operands) for one in step_operations.step_operations(program)}

    scanned, dispatched = kinds("scan"), kinds("dispatch")
    microbatches = jax.ShapeDtypeStruct((2, 2, config.data.seq_len), "int32")  # [M, B, T], sliced by the scan
    assert any(name == "dynamic_slice" and operands[0] == microbatches for name, operands in scanned)
    assert not any(name == "dynamic_slice" and operands[0] == microbatches for name, operands in dispatched)
    assert len(scanned & dispatched) > 100


def test_doctor_names_a_planted_operation_of_the_step_at_its_line(monkeypatch, tmp_path):
    run = exercises.run_operations

    def wrong_lookup(operations, operands, **devices):
        found = run(operations, operands, **devices)
        for one, results in zip(operations, found, strict=True):
            if one.name == "gather":
                results[0][3] = np.roll(np.asarray(results[0][3]), 1)
        return found

    monkeypatch.setattr(exercises, "run_operations", wrong_lookup)
    listed = step_operations.step_operations
    kept = ("gather", "psum")
    monkeypatch.setattr(doctor, "step_operations", lambda program: [o for o in listed(program) if o.name in kept])
    outcome = doctor._operations(small_config(), doctor.CheckedMachine("", 0, tmp_path), sweep.DEFAULT_LIMITS)
    assert outcome.verdict == FAILED
    assert outcome.found.startswith("gather of ")
    assert "hlat_jax/" in outcome.found
    assert "on device 3 " in outcome.found


def test_collectives_in_groups_that_the_node_does_not_have_are_left_out(monkeypatch, tmp_path):
    swept = []
    monkeypatch.setattr(doctor, "sweep", lambda found, **_: swept.extend(found) or Outcome(PASSED, "compared"))
    machine, refused = doctor.CheckedMachine("", 0, tmp_path), Server("trn1", 32)
    monkeypatch.setattr(doctor, "passes", lambda config, count, server: server is not refused)
    assert doctor._operations(small_config(), machine, sweep.DEFAULT_LIMITS).found == "compared"
    assert any(one.is_collective for one in swept)
    swept.clear()
    monkeypatch.setattr(doctor, "server_of", lambda devices: refused)
    outcome = doctor._operations(small_config(), machine, sweep.DEFAULT_LIMITS)
    assert outcome.found.startswith("compared; no collectives: this node has no groups for ")
    assert swept
    assert not any(one.is_collective for one in swept)


def test_collectives_of_a_replica_larger_than_the_node_are_those_of_one_stage():
    config = small_config(pipe=2)
    assert doctor._reduced(config, 8, max_devices=4)[1] == 4  # two stages, tensor 2
    staged, count = doctor._reduced(config, 8, max_devices=2)
    assert count == 2
    assert staged.parallel.pipe == staged.parallel.data == 1
    assert staged.model.num_layers == config.model.num_layers // 2

    def summed_along_tensor(config, count):
        program = make_program(config, planned_layout(config, count, platform="cpu"))
        found = step_operations.step_operations(program)
        return {one.operands for one in found if one.name == "psum" and "tensor_kv" in str(one.axes())}

    shared = summed_along_tensor(config, 8) & summed_along_tensor(staged, count)
    assert any(len(kinds[0].shape) == 3 for kinds in shared)  # activations [B, T, D]
    assert doctor._reduced(small_config(), 4, max_devices=1)[1] == 2  # tensor alone is larger


def test_sweep_needs_more_than_the_cpu_it_compares_with(monkeypatch, tmp_path):
    machine = doctor.CheckedMachine("", 0, tmp_path)
    assert "--sweep_s=0" in doctor._operations(small_config(), machine, Limits(0.0)).found
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "local_devices", lambda: first)
    outcome = doctor._operations(small_config(), machine, sweep.DEFAULT_LIMITS)
    assert outcome.verdict == NOT_HERE
    assert "xla_force_host_platform_device_count" in outcome.advice


def test_permutes_between_unlinked_devices_of_a_node_are_left_out():
    (permute,) = (one for one in mixed_operations() if one.name == "ppermute")
    assert doctor._permute_problem(permute, mesh(), "trn1") is None
    far = dataclasses.replace(permute, params={"axis_name": "ring", "perm": [(0, 31), (31, 0)]})
    node = PlannedClient("neuron", 32).devices()
    fake = jax.sharding.Mesh(np.array(node), ("ring",))
    assert doctor._permute_problem(far, fake, "") is None
    far = dataclasses.replace(far, params={"axis_name": ("ring",), "perm": [(i, (i + 12) % 32) for i in range(32)]})
    assert "without a link" in doctor._permute_problem(far, fake, "trn1")
    order = partitioned.linked_ring(32, target="trn1")
    next_place = dataclasses.replace(far, params={"axis_name": "ring", "perm": [(i, (i + 1) % 32) for i in range(32)]})
    assert "without a link" in doctor._permute_problem(next_place, fake, "trn1")
    placed = jax.sharding.Mesh(np.array([node[number] for number in order]), ("ring",))
    assert doctor._permute_problem(next_place, placed, "trn1") is None, "devices as they are placed in the mesh"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"pipe": 2, "data": 2}])
def test_whole_step_of_a_small_config_agrees_on_eight_devices(parallel, tmp_path):
    outcome = doctor._operations(small_config(**parallel), doctor.CheckedMachine("", 0, tmp_path), Limits(600))
    assert outcome.verdict == PASSED, outcome
    assert "not compared" not in outcome.found
