"""Silent corruption: a flipped bit is named by device, array and step, a wrong computation too, and nothing else is."""

import functools
import shutil
from unittest import mock

import jax
import micro
import numpy as np
import pytest
from refusals import assert_names, refused

from hlat_jax import loop
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run import corruption, digests
from hlat_jax.run.goodput import read_events
from hlat_jax.store.checkpoint_checks import saved_run
from hlat_jax.store.metrics import ROWS_FILE, read_rows

CHECKED = {
    "data__batch_size": 8,
    "train__eval_every_steps": 0,
    "train__num_eval_batches": 1,
    "train__check_devices_every_steps": 4,
    "checkpoint__every_steps": 4,
    "metrics__tensorboard": False,
}
WEIGHT = "params.layers.attention.out"


def train(folder, workdir="run", *, num_devices=4, **settings):
    return micro.train(micro.config(folder, **CHECKED | settings), folder / workdir, num_devices=num_devices)


def leaves_by_name(state):
    return dict(zip(digests.array_names(state), jax.tree.leaves(state), strict=True))


def with_flipped_bit(state, name, device, **place):
    flipped = micro.flip_on_device(leaves_by_name(state)[name], device, **place)
    names = iter(digests.array_names(state))
    return jax.tree.map(lambda leaf: flipped if next(names) == name else leaf, state)


def flipping(step, name, device, **place):
    """A patch of the loop that flips a bit of the state before one step."""
    original = loop._step

    def flip_and_step(run, progress, batch):
        if progress.step + 1 == step:
            progress.state = with_flipped_bit(progress.state, name, jax.devices("cpu")[device], **place)
        original(run, progress, batch)

    return mock.patch.object(loop, "_step", flip_and_step)


def corruptions(workdir):
    return [event for event in read_events(workdir) if event["event"] == "corruption"]


LAYOUTS = {
    "tensor": {"tensor": 2},
    "fsdp": {"fsdp": 2},
    "pipe": {"pipe": 2},
    "context": {"context": 2},
}


@pytest.mark.quick_cases("tensor")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_of_fifty_flipped_bits_is_named_by_device_and_array(tmp_path, layout):
    degrees = {f"parallel__{key}": value for key, value in LAYOUTS[layout].items()}
    config = resolve(micro.config(tmp_path, data__batch_size=8, **degrees))
    program = make_program(config, make_layout(config.parallel, jax.devices()))  # four replicas
    digest = digests.make_state_digest(lambda: program.digest, program)
    state, rng = program.init_state(), np.random.default_rng(7)
    assert digest.replicas.differences(digest(state)) == []
    arrays = leaves_by_name(state)
    for _ in range(50):
        name, place = rng.choice(list(arrays)), int(rng.integers(8))
        device, dtype = program.layout.mesh.devices.flat[place], arrays[name].dtype
        size = arrays[name].addressable_shards[0].data.size
        where = {"word": int(rng.integers(size)), "bit": int(rng.integers(8 * dtype.itemsize))}
        [found] = digest.replicas.differences(digest(with_flipped_bit(state, name, device, **where)))
        assert (found.devices, digest.names[found.array]) == ((place,), name), where


@pytest.mark.slow
def test_a_flipped_bit_ends_the_run_and_leaves_no_trace(tmp_path, capsys):
    assert train(tmp_path, "undisturbed", train__check_devices_every_steps=0) == 0
    with flipping(6, WEIGHT, 2, word=5, bit=3), refused(kind=corruption.CorruptionError) as caught:
        train(tmp_path)
    assert_names(str(caught.value), "after step 8", "persistent", "device 2 ", WEIGHT, "checkpoint of step 4")
    assert micro.saved_steps(tmp_path / "run") == [4]
    [event] = corruptions(tmp_path / "run")
    assert (event["step"], event["kind"], event["array"]) == (8, "persistent", WEIGHT)
    assert train(tmp_path) == 0
    assert "corruption" not in capsys.readouterr().out
    rows = [read_rows(tmp_path / name / ROWS_FILE) for name in ("run", "undisturbed")]
    assert micro.row_differences(*rows) == []


@pytest.mark.slow
def test_no_state_whose_replicas_differ_is_saved(tmp_path):
    """The save compares them too, before the check is due."""
    settings = {"train__check_devices_every_steps": 100, "checkpoint__every_steps": 5}
    with flipping(4, WEIGHT, 1, word=9, bit=20), refused("after step 5", "device 1 ", kind=corruption.CorruptionError):
        train(tmp_path, **settings)
    assert micro.saved_steps(tmp_path / "run") == []


@pytest.mark.slow
def test_a_replica_whose_gradients_are_not_finite_is_named(tmp_path):
    """The all-reduce gives every replica these gradients, so each step is masked; one device holds the cause."""
    settings = {"train__check_devices_every_steps": 100, "train__max_nonfinite_steps": 2}
    name = "params.final_norm.scale"  # of ones: this flip makes one of them infinite
    with flipping(2, name, 3, bit=30), refused("after step 4", "device 3 ", name, kind=corruption.CorruptionError):
        train(tmp_path, **settings)
    assert [row["nonfinite"] for row in read_rows(tmp_path / "run" / ROWS_FILE)] == [0, 1, 1]


@pytest.mark.slow
def test_of_two_replicas_that_differ_both_are_named(tmp_path):
    with flipping(2, WEIGHT, 0), refused("device 0 ", "device 1 ", WEIGHT, kind=corruption.CorruptionError):
        train(tmp_path, num_devices=2)


def changed_once(tries, place=0, array=3):
    """A patch of `gather_digests` that changes one digest of one device in its calls of these numbers."""
    original, calls = digests.gather_digests, iter(range(1 << 30))

    def gather(digests):
        found, call = original(digests), next(calls)
        if call in tries:
            found[place, array] += np.uint32(call + 1)
        return found

    return mock.patch.object(digests, "gather_digests", gather)


@pytest.mark.slow
def test_a_digest_that_is_wrong_once_is_a_warning(tmp_path, capsys):
    with changed_once({1}):
        assert train(tmp_path) == 0
    assert_names(capsys.readouterr().out, "step 4", "transient", "device 0 ")
    [event] = corruptions(tmp_path / "run")
    assert (event["step"], event["kind"]) == (4, "transient")


# two digests of the state, then those of the microbatch
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"parallel__pipe": 2, "train__num_microbatches": 2}], ids=["alone", "pipe"])
def test_a_microbatch_that_does_not_repeat_is_named(tmp_path, capsys, settings):
    num_devices = settings.get("parallel__pipe", 1)
    with changed_once({3}, place=num_devices - 1):
        assert train(tmp_path, "once", num_devices=num_devices, **settings) == 0
    named = f"device {num_devices - 1} "
    assert_names(capsys.readouterr().out, "step 4", "transient", named)
    with changed_once({2, 3, 4}, place=num_devices - 1), refused(kind=corruption.CorruptionError) as caught:
        train(tmp_path, num_devices=num_devices, **settings)
    assert_names(str(caught.value), "after step 4", "persistent", named)


def spoil(workdir, step, name=WEIGHT):
    """Changes the digest of an array in a checkpoint, and its sums with it."""
    folder = workdir / "checkpoints" / str(step)
    micro.reseal(folder, lambda saved: saved["digest"].update({name: saved["digest"][name] ^ 1}))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of eight steps on one device, saved at 4 and 8 without checks."""
    folder = tmp_path_factory.mktemp("trained")
    assert train(folder, **UNCHECKED) == 0
    return folder


@pytest.fixture
def resumed(trained, tmp_path):
    """A function that resumes a copy of that run, `tmp_path/run`, after a change of its checkpoints."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return functools.partial(train, tmp_path, **UNCHECKED)


UNCHECKED = {"num_devices": 1, "train__check_devices_every_steps": 0, "train__num_steps": 8}


def test_a_checkpoint_with_another_digest_is_left_for_the_one_before(resumed, tmp_path, capsys):
    workdir = tmp_path / "run"
    rows = read_rows(workdir / ROWS_FILE)
    spoil(workdir, 8)
    assert resumed() == 0
    printed = capsys.readouterr()
    assert_names(printed.err, "checkpoints/8 is damaged", f"{WEIGHT} has another digest", "going back to step 4")
    assert "resuming from step 4" in printed.out
    assert (workdir / "checkpoints/8.damaged-1").is_dir()
    assert micro.row_differences(read_rows(workdir / ROWS_FILE), rows) == []
    for step in (4, 8):
        spoil(workdir, step)
    with refused("every checkpoint is damaged", "checkpoints/4: ", "checkpoints/8: ", WEIGHT):
        resumed()
    with refused("train.branch_from", "damaged", WEIGHT):
        resumed("branch", train__branch_from=f"{workdir}@4")


@pytest.mark.slow
def test_a_digest_fits_under_another_mesh_and_padding(tmp_path, capsys):
    settings = {"model__vocab_size": 2049, "train__num_steps": 4, "train__check_devices_every_steps": 0}
    assert train(tmp_path, **settings, parallel__tensor=2) == 0  # pads the vocabulary by one row
    saved = saved_run(tmp_path / "run/checkpoints/4")["digest"]
    other = settings | {"parallel__fsdp": 2, "parallel__zero1": True, "train__num_steps": 8}
    assert train(tmp_path, **other) == 0
    printed = capsys.readouterr()
    assert "resuming from step 4" in printed.out
    assert "WARNING" not in printed.err
    assert saved_run(tmp_path / "run/checkpoints/8")["digest"].keys() == saved.keys()
    spoil(tmp_path / "run", 8, "params.embed")
    assert train(tmp_path, **settings | {"train__num_steps": 8}, num_devices=1) == 0
    assert_names(capsys.readouterr().err, "params.embed has another digest", "going back to step 4")


@pytest.mark.slow
def test_replicas_that_divide_nothing_are_checked_and_resume_with_their_digests(tmp_path, capsys):
    settings = {"train__num_microbatches": -1, "parallel__zero1": True, "train__check_devices_every_steps": 2}
    for num_devices, num_steps in ((3, 4), (2, 8), (4, 12)):
        assert train(tmp_path, num_devices=num_devices, train__num_steps=num_steps, **settings) == 0
    printed = capsys.readouterr()
    assert_names(printed.out, "resuming from step 4", "resuming from step 8")
    assert "damaged" not in printed.err
    assert corruptions(tmp_path / "run") == []
    spoil(tmp_path / "run", 12, "opt_state.inner.mu.embed")
    assert train(tmp_path, num_devices=3, train__num_steps=12, **settings) == 0
    assert_names(capsys.readouterr().err, "opt_state.inner.mu.embed has another digest", "going back to step 8")


def test_a_digest_that_is_wrong_once_damages_no_checkpoint(resumed, capsys):
    with changed_once({0}):
        assert resumed() == 0
    assert "damaged" not in capsys.readouterr().err


def test_a_checkpoint_of_an_older_version_has_no_digest(resumed, tmp_path, capsys):
    micro.reseal(tmp_path / "run/checkpoints/8", lambda saved: saved.pop("digest"))
    assert resumed() == 0
    assert_names(capsys.readouterr().out, "complete", "step 8")


def test_no_digest_is_saved_by_devices_that_do_not_add_exactly(tmp_path):
    with mock.patch.object(corruption, "adds_exactly", return_value=False):
        assert train(tmp_path, **UNCHECKED | {"train__num_steps": 4}) == 0
    assert "digest" not in saved_run(tmp_path / "run/checkpoints/4")


def test_a_step_that_does_not_repeat_its_bits_is_refused(tmp_path):
    c = micro.config(tmp_path, train__check_devices_every_steps=2, precision__policy="bf16_sr")
    config = resolve(c)
    with refused("train.check_devices_every_steps=2", "precision.stochastic_rounding='software'"):
        make_program(config, planned_layout(config, 1, platform="neuron"))
    c.precision.update(policy="bf16", simulate="neuron")
    with refused("train.check_devices_every_steps=2", "precision.simulate='neuron'"):
        resolve(c)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_reported_of_devices_without_a_fault(tmp_path, layout, capsys):
    degrees = {f"parallel__{key}": value for key, value in LAYOUTS[layout].items()}
    settings = {"train__num_steps": 40, "train__check_devices_every_steps": 1, "checkpoint__every_steps": 10}
    policy = {"precision__policy": "bf16_sr"} if layout == "context" else {}
    assert train(tmp_path, **settings, **degrees, **policy) == 0
    assert corruptions(tmp_path / "run") == []
