"""benchmarks/raf.py compares equal models, and its table of steps is printed."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import raf

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-base", "gpt2"])
def test_models_beside_pytorch_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    model = dataclasses.replace(raf.MODELS[name], layers=2, width=128, vocab=96, positions=32)
    params, (tokens, targets) = raf.weights(model), raf.drawn_batch(model, 3, 32, 0)
    net = raf.torch_model(model, params)
    labels = torch.from_numpy(tokens if model.is_causal else targets).long()
    wanted = net(input_ids=torch.from_numpy(tokens).long(), labels=labels).loss
    wanted.backward()
    loss, grads = jax.value_and_grad(raf.loss_fn)(
        params, (tokens, targets), heads=model.heads, is_causal=model.is_causal
    )
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-6)
    named = (raf.gpt2_names if model.is_causal else raf.bert_names)(jax.tree.map(np.asarray, grads))
    theirs = dict(net.named_parameters())
    assert {*theirs} <= {*named}
    for part, own in named.items():
        apart = np.linalg.norm(theirs[part].grad.numpy() - own)
        assert apart <= 1e-5 * np.linalg.norm(own) + 1e-7, part  # fp32, whose sums have another order


@pytest.mark.slow
def test_table_of_steps_is_printed():
    words = ["step", "--models=bert-base", "--only=plain JAX,residuals", "--batch=2", "--rounds=1"]
    command = [sys.executable, "benchmarks/raf.py", *words, "--seq_len=32", "--layers=2", "--width=64", "--vocab=128"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ")[0] for line in done.stdout.splitlines()]
    assert {"| plain JAX", "| residuals"} <= {*rows}, done.stdout
