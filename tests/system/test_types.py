"""The types of the public functions: the package passes mypy, and mypy finds mistakes in programs that call it."""

import pathlib
import re
import tomllib

import mypy.api
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
from typing import Any, assert_type

import jax
import numpy as np
import optax
from flax import nnx

import hlat_jax.hf
from hlat_jax.batch import Batch, concat_batch
from hlat_jax.config import ModelConfig
from hlat_jax.generate.generator import Generator
from hlat_jax.generate.sampling import Sampling
from hlat_jax.model import Decoder, apply, init_params, param_specs
from hlat_jax import passes
from hlat_jax.neuron import lint
from hlat_jax.passes import remat_pass
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.precision import POLICIES
from hlat_jax.passes.compile import training_program
from hlat_jax.step import StepOptions

cfg = ModelConfig(vocab_size=64, num_layers=2)
ModelConfig(vocab_size="64")  # arg-type
tokens = np.zeros((2, 8), np.int32)
decoder = Decoder(cfg, rngs=nnx.Rngs(0))
logits: jax.Array = decoder(tokens)
decoder(tokens, segments=tokens)  # call-arg
params = init_params(cfg, jax.random.key(0))
logits = apply(params, cfg, jax.numpy.asarray(tokens), segment_ids_BT=tokens)
apply(cfg, params, tokens)  # arg-type
param_specs(cfg, {"mlp": "tensor", "embed": ("data", "fsdp"), "norm": None})


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: Any) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


apply(params, cfg, tokens, attention=attend)


def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
    return apply(params, cfg, batch.tokens).mean()


batch = concat_batch(tokens)
value: jax.Array = autocast(loss, "bf16")(params, batch)
program = training_program(loss, optax.adam(1e-3), options=StepOptions(POLICIES["mixed"]))
state, metrics = program.step(program.init(params), batch, np.float32(1e-3))
state, metrics = program.step(state, batch)
metrics.los  # attr-defined


plan = remat_pass.fit(loss, params, batch, budget_bytes="1GiB")
plan.fn(params, batch)


@passes.remat(budget="1GiB")
@passes.select_residuals
@passes.chunk(max_bytes="4MiB", rules=["cross_entropy"])
@passes.autocast(policy="bf16")
@passes.kernels
def loss_under_passes(params: dict[str, Any], batch: Batch, *, scale: float = 1.0) -> jax.Array:
    return scale * loss(params, batch)


assert_type(loss_under_passes(params, batch, scale=2.0), jax.Array)
loss_under_passes(params)  # call-arg
loss_under_passes(params, tokens)  # arg-type
assert_type(loss_under_passes.report(), str)
assert_type(passes.chunk(loss)(params, batch), jax.Array)
passes.chunk(loss, max_byte="4MiB")  # call-overload
passes.remat(loss)  # call-overload


class Static:
    '''mypy takes `decorated` for a plain method, see docs/passes.md.'''

    assigned = staticmethod(passes.chunk(loss))

    @staticmethod
    @passes.chunk
    def decorated(batch: Batch) -> jax.Array:
        return batch.tokens.mean()


assert_type(Static().assigned(params, batch), jax.Array)
Static().assigned(params)  # call-arg
Static().decorated(batch)  # call-arg


class Trainer:
    @passes.chunk(max_bytes="4MiB")
    def loss(self, params: dict[str, Any], batch: Batch) -> jax.Array:
        return loss(params, batch)


assert_type(Trainer().loss(params, batch), jax.Array)
Trainer().loss(params)  # call-arg
Trainer().loss.report()
model, loaded = hlat_jax.hf.load("folder", dtype="bfloat16")
apply(loaded, model, tokens)
hlat_jax.hf.load("folder", dtpye="bfloat16")  # call-arg
findings = lint.check(loss, params, batch, target="trn2")
generator = Generator(model, loaded)
[ids] = generator([[1, 2]], max_tokens=4, sampling=Sampling(temperature=0.8, seed=1))
generator(["It is"], max_tokens=4)  # list-item
"""


@pytest.mark.slow
def test_package_and_a_user_of_it_are_checked_by_mypy(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    public = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    out, err, _ = mypy.api.run([*public, str(program), "--cache-dir", str(tmp_path / "cache")])
    found = re.findall(r"^(.*?):(\d+): error: .*\[([\w-]+)\]$", out, re.MULTILINE)
    expected = [
        (str(number), line.split("# ")[1]) for number, line in enumerate(PROGRAM.splitlines(), 1) if "# " in line
    ]
    of_program = [(line, code) for path, line, code in found if path == str(program)]
    assert list(dict.fromkeys(of_program)) == expected, out
    assert not [path for path, *_ in found if path != str(program)], out
    assert not err
