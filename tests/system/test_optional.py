"""Two steps of a small model derived from `tiny` without each leaf: its modules cannot be imported."""

import json
import sys

import micro
import pytest

LEAVES = ("hf", "evaluate", "plan", "neuron")
# The keys that ask for a leaf.
KEYS = {"hf": ("checkpoint.export_every_steps", 1), "evaluate": ("train.eval_tasks", "arc_easy")}
SCRIPT = """
import contextlib, importlib.abc, io, json, pathlib, sys

leaves, keys, path, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4])


class Blocked(importlib.abc.MetaPathFinder):
    def __init__(self, leaf):
        self.room = f"hlat_jax.{leaf}"

    def find_spec(self, name, path=None, target=None):
        if name == self.room or name.startswith(f"{self.room}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def trained(leaf, **changes):
    for module in [module for module in sys.modules if module.startswith("hlat_jax.")]:
        del sys.modules[module]
    blocked = Blocked(leaf)
    sys.meta_path.insert(0, blocked)
    from hlat_jax import config as config_lib
    from hlat_jax.cli import config_files
    from hlat_jax import loop
    from hlat_jax.resolve import resolve

    c = config_files.load(path)
    c.train.update(num_steps=2, num_eval_batches=1)
    c.update_from_flattened_dict(changes)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            code = loop.train(resolve(c), folder / f"{leaf} {len(changes)}")
        except ValueError as error:
            code = str(error)
    sys.meta_path.remove(blocked)
    return code, printed.getvalue()


without = {leaf: trained(leaf) for leaf in leaves}
asked = {leaf: trained(leaf, **{key: value}) for leaf, (key, value) in keys.items()}
print(json.dumps([without, asked]))
"""


@pytest.mark.slow
def test_run_trains_without_each_leaf_and_refuses_keys_that_need_it(tmp_path):
    words = [json.dumps(LEAVES), json.dumps(KEYS), str(micro.write_config(tmp_path)), str(tmp_path)]
    done = micro.run([sys.executable, "-c", SCRIPT, *words], micro.environment(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr[-3000:]
    without, asked = json.loads(done.stdout.splitlines()[-1])
    assert {leaf: code for leaf, (code, _) in without.items()} == dict.fromkeys(LEAVES, 0)
    assert [leaf for leaf, (_, printed) in without.items() if "memory planned" not in printed] == ["plan"]
    for leaf, (key, value) in KEYS.items():
        assert asked[leaf][0] == (
            f"{key}={value} needs hlat_jax.{leaf}, which is not installed; install all of hlat_jax, or unset this key."
        )
