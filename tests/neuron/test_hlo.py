"""HLO modules for Neuron's compiler: small ids, the same program, and what one device of a mesh runs."""

import dataclasses
import json
import os
import re
import subprocess
from collections import Counter

import jax
import pytest
from planned import small_config
from refusals import assert_names

from hlat_jax.neuron import hlo, hlo_command, hlo_proto
from hlat_jax.neuron.programs import layout_for_neuron
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.parallel.virtual_devices import fewer_replicas
from hlat_jax.program import make_program
from hlat_jax.run.compilation import traced_programs

ID_LIMIT = 2**31


@pytest.fixture(scope="module")
def lowered():
    """A step lowered for Neuron: loops, calls, tuples, donation."""
    config = small_config(m=2)
    layout = layout_for_neuron(config, 1)
    return traced_programs(make_program(config, layout))["train"]().lower(lowering_platforms=("neuron",))


@pytest.fixture(scope="module")
def computation(lowered):
    """The class that parses a serialized module with XLA's own code."""
    return type(lowered.compiler_ir("hlo"))


def assert_ids_are_small_and_whole(module):
    found = hlo_proto.parse(module).computations
    instructions = [instruction.id for one in found for instruction in one.instructions]
    assert sorted(instructions) == list(range(1, len(instructions) + 1))
    assert max(instructions) < ID_LIMIT
    computations = [one.id for one in found]
    assert computations == list(range(1, len(found) + 1))
    for one in found:
        own = {instruction.id for instruction in one.instructions}
        assert one.root_id in own
        for instruction in one.instructions:
            assert {*instruction.operand_ids, *instruction.control_predecessor_ids} <= own
            assert set(instruction.called_computation_ids) <= set(computations)


@pytest.mark.parametrize(("num_devices", "most", "data"), [(96, 64, 12), (96, 8, 2), (96, 2, 1), (8, 64, 2)])
def test_a_module_is_partitioned_for_a_divisor_of_the_replicas(num_devices, most, data):
    config = small_config(data=-1, tensor=4, rows=96)
    small, count = fewer_replicas(config, num_devices, max_devices=most)
    assert (small.parallel.data, count) == (data, 4 * data)
    assert small.data.batch_size == 96 * 4 // num_devices * data  # as many rows on each device


def test_a_renumbered_step_is_the_same_program(lowered, computation):
    original = lowered.compiler_ir("hlo")
    before = hlo_proto.parse(original.as_serialized_hlo_module_proto())
    ids = [instruction.id for one in before.computations for instruction in one.instructions]
    assert max(ids) >= ID_LIMIT, "these are too large for the compiler"
    module = hlo.whole_module(lowered)
    assert_ids_are_small_and_whole(module)
    assert computation(module).as_hlo_text() == original.as_hlo_text()
    assert len(ids) > 1000


def test_ids_are_renumbered_in_their_order():
    large = 2**33
    module = hlo_proto._classes()["HloModuleProto"](id=7, entry_computation_id=large + 1)
    module.computations.add(id=large, root_id=5).instructions.add(id=5)
    entry = module.computations.add(id=large + 1, root_id=large + 1)
    entry.instructions.add(id=large + 7)
    entry.instructions.add(id=large + 9, operand_ids=[large + 7], control_predecessor_ids=[large + 7])
    entry.instructions.add(id=large + 1, operand_ids=[large + 7, large + 9], called_computation_ids=[large])
    parsed = hlo_proto.parse(hlo_proto.renumber(module.SerializeToString()))
    inner, outer = parsed.computations
    assert (inner.id, inner.root_id, outer.id, outer.root_id, parsed.entry_computation_id) == (1, 1, 2, 2, 2)
    assert [one.id for one in outer.instructions] == [3, 4, 2]
    assert [list(one.operand_ids) for one in outer.instructions] == [[], [3], [3, 4]]
    assert [list(one.control_predecessor_ids) for one in outer.instructions] == [[], [3], []]
    assert [list(one.called_computation_ids) for one in outer.instructions] == [[], [], [1]]


@pytest.mark.slow
def test_single_device_module_has_per_device_shapes_and_collectives(computation):
    """Its parameters are the shards of JAX's own shardings; bf16 values are reduced as bf16."""
    config = small_config(data=4, tensor=2, policy="mixed")
    module, degrees = hlo.device_module("train", config, 8, max_devices=8)
    assert degrees == {"pipe": 1, "data": 4, "fsdp": 1, "context": 1, "tensor": 2}
    assert_ids_are_small_and_whole(module)
    text = computation(module).as_hlo_text()
    assert text.startswith("HloModule jit_train_step")
    parameters = re.findall(r" = (?:s32|f32|bf16)\[([\d,]*)\]\S* parameter", text[text.index("\nENTRY") :])
    found = Counter(tuple(map(int, filter(None, dims.split(",")))) for dims in parameters)
    arguments = jax.tree.leaves(make_program(config, layout_over(config, jax.devices())).step_arguments)
    whole = Counter(leaf.shape for leaf in arguments)
    expected = Counter(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape for leaf in arguments)
    dropped = expected - found  # fields of the batch that nothing reads
    assert not found - expected
    assert dropped.total() <= 2
    assert expected != whole
    assert re.search(r"bf16\[[\d,]*\]\S* all-reduce", text)
    assert not re.search(r'custom_call_target="(Sharding|SPMD\w+)"', text)


@pytest.mark.slow
def test_fewer_replicas_keep_the_rows_of_a_device(computation):
    module, degrees = hlo.device_module("train", small_config(data=8, policy="bf16_sr"), 8, max_devices=2)
    assert degrees["data"] == 2
    tokens = re.findall(r"s32\[(\d+),16\]\S* parameter", computation(module).as_hlo_text().split("ENTRY")[1])
    assert set(tokens) == {"1"}
    module, degrees = hlo.device_module("train", small_config(data=4), 4, max_devices=1)
    assert set(degrees.values()) == {1}
    assert_ids_are_small_and_whole(module)
    assert "all-reduce" not in computation(module).as_hlo_text()


@pytest.mark.slow
def test_command_writes_modules_and_a_compile_script(tmp_path, monkeypatch, neuron_here):
    out = tmp_path / "hlo"
    words = ["hlo", "--config=tiny", "--devices=2", "--program=eval", "--instance=trn2.48xlarge", f"--out={out}"]
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    code, printed, _ = neuron_here(*words)
    assert (code, "eval" in printed) == (0, True)
    assert sorted(path.name for path in out.iterdir()) == ["compile.sh", "eval.hlo"]
    assert_ids_are_small_and_whole((out / "eval.hlo").read_bytes())
    script = out / "compile.sh"
    assert "NOT YET RUN" in script.read_text()
    subprocess.run(["shellcheck", script], check=True)
    compiler = tmp_path / "bin" / "neuronx-cc"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\ntest -f "$2" && echo "$PWD" "$@"\n')
    compiler.chmod(0o755)
    env = os.environ | {"PATH": f"{compiler.parent}:{os.environ['PATH']}"}
    called = subprocess.run([script], env=env, cwd="/", capture_output=True, text=True, check=True).stdout.split()
    assert called[:5] == [str(out / "eval"), "compile", "../eval.hlo", "--framework", "XLA"]
    assert {"--target=trn2", "--logical-nc-config=1", "--auto-cast=none"} <= set(called)
    assert not any(word.startswith(("--cache_dir", "--retry")) for word in called)
    called = subprocess.run([script, "eval.hlo"], env=env, capture_output=True, text=True, check=True).stdout
    assert called.count("compile ") == 1
    counts = [f"[NCC_EBVF030] Instructions generated by compiler {n} exceeds the limit" for n in ("7,123", "99")]
    compiler = "\n".join(["#!/bin/sh", "echo $* > called", *(f"echo '{line}' >&2" for line in counts), "exit 70"])
    (tmp_path / "bin" / "neuronx-cc").write_text(compiler)
    done = subprocess.run([script, "--count"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:2] == ["eval.hlo  7,123", "eval.hlo  99"]
    assert (out / "eval" / "called").read_text().endswith(" --internal-max-instruction-limit=1\n")
    (tmp_path / "bin" / "neuronx-cc").write_text("#!/bin/sh\necho other >&2\nexit 1\n")
    done = subprocess.run([script, "--count", "eval.hlo"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert_names(done.stderr, "error: eval/count.log")


def test_the_command_lists_what_changed_since_the_last_run(tmp_path, capsys):
    words = ["--config=tiny", "--devices=1", "--program=eval", f"--workdir={tmp_path}"]
    entry = {"platform": "neuron"}

    def since(*more, record=None):
        if record is not None:
            (tmp_path / "programs.json").write_text(json.dumps(record))
        assert hlo_command.main([*words, *more]) == 0
        [(sha256, said)] = re.findall(r"^eval +([0-9a-f]{16}) +(.+)$", capsys.readouterr().out, re.MULTILINE)
        return sha256, said

    sha256, said = since()
    first = said
    assert since(record={"eval": entry | {"sha256": sha256}}) == (sha256, "the same")
    others = [
        since("--config.model.rope_theta=500.0")[1],
        since(record={"eval": entry | {"sha256": sha256, "platform": "cpu"}})[1],
        since(record={"init": entry | {"sha256": sha256}})[1],
    ]
    assert len({first, "the same", *others}) == 5


def test_module_of_a_device_has_the_implementations_of_its_target():
    config = small_config(m=2)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="nki"))
    with pytest.raises(ValueError, match="attention='nki'"):
        hlo.device_module("train", config, 1, max_devices=1, target="trn1")
    with pytest.raises(ValueError, match="attention='nki'"):
        hlo.partition("train", config, 2, target="trn1")
