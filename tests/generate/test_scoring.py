"""Log-likelihoods of continuations against a float64 softmax over the logits of the whole forward pass.

Tolerance 1e-4 in nats on sums of up to 200 tokens: fp32 logits of size 10 differ by 1e-6 between the two programs.
"""

import sys

import jax
import jobs
import micro
import numpy as np
import pytest
from refusals import refused

import configs
from hlat_jax.generate.scoring import Scorer
from hlat_jax.model import apply, init_params

MAX_TOKENS = 300  # more than a chunk of 256, and no multiple of it
SIZES = [(1, 1), (5, 3), (70, 200), (290, 20), (7, 300), (100, 1)]  # context, continuation: two are too long together


@pytest.fixture(scope="module")
def model():
    """(config, parameters with decided logits, pairs of ids), the last of which is continued greedily."""
    cfg = configs.resolved("widths", num_layers=2, max_positions=MAX_TOKENS).model
    params = jax.tree.map(lambda leaf: 3 * leaf, init_params(cfg, jax.random.key(0, impl="rbg")))
    draw = np.random.default_rng(0).integers
    pairs = [(draw(0, 64, size).tolist(), draw(0, 64, more).tolist()) for size, more in SIZES]
    greedy, forward = list(pairs[1][0]), jax.jit(apply, static_argnums=1)
    for _ in range(4):
        logits_BTV = forward(params, cfg, np.array([greedy + [0] * (10 - len(greedy))]))
        greedy.append(int(np.argmax(logits_BTV[0, len(greedy) - 1])))
    return cfg, params, [*pairs, (greedy[:5], greedy[5:])]


def test_scorer_equals_a_float64_softmax(model, one_device):
    cfg, params, pairs = model
    alone = Scorer(cfg, params, layout=one_device, num_rows=3)(pairs)
    kept = [[*context, *continuation][-MAX_TOKENS - 1 :] for context, continuation in pairs]
    padded_BT = np.zeros((len(kept), MAX_TOKENS), np.int32)
    for row, ids in zip(padded_BT, kept, strict=True):
        row[: len(ids) - 1] = ids[:-1]
    logits_BTV = np.asarray(jax.jit(apply, static_argnums=1)(params, cfg, padded_BT), np.float64)
    for (_, continuation), ids, logits_TV, score in zip(pairs, kept, logits_BTV, alone, strict=True):
        places = range(len(ids) - 1 - len(continuation), len(ids) - 1)
        expected = sum(logits_TV[i, ids[i + 1]] - np.logaddexp.reduce(logits_TV[i]) for i in places)
        assert score.log_likelihood == pytest.approx(expected, abs=1e-4)
        assert score.is_greedy == all(logits_TV[i].argmax() == ids[i + 1] for i in places)
    assert [score.is_greedy for score in alone][-2:] == [False, True]


@pytest.mark.slow
def test_scorer_counts_ties_as_greedy(model, one_device):
    cfg, params, pairs = model
    scorer = Scorer(cfg, params, layout=one_device, num_rows=1)
    for pair, *facts in [
        (([], [1]), "0 tokens", "1 "),
        (([1], []), "1 token", "0 "),
        (([1], [1] * 301), "model.max_positions=300"),
    ]:
        with refused("pair 1 ", *facts):
            scorer([pairs[0], pair])

    flat = jax.tree.map(np.zeros_like, params)  # tied tokens all count as greedy
    [score] = Scorer(cfg, flat, layout=one_device, num_rows=1)(pairs[1:2])
    assert score.log_likelihood == pytest.approx(-3 * np.log(64), abs=1e-5)
    assert score.is_greedy


TWO_PROCESSES = """
import sys
import jax, numpy as np
from hlat_jax.host import distributed
from hlat_jax.config import ModelConfig, ParallelConfig
from hlat_jax.parallel.degrees import layout_of_model
from hlat_jax.generate.generator import param_shardings
from hlat_jax.model import init_params
from hlat_jax.generate.scoring import Scorer
job = distributed.resolve_job(sys.argv[1], 2, int(sys.argv[2]), join_timeout_s=60, peer_timeout_s=60)
cfg = ModelConfig(vocab_size=64, num_layers=1, embed_dim=32, mlp_dim=48, num_kv_heads=2, head_dim=8, max_positions=32)
pairs = [([1, 2, 3], [4, 5]), ([6], [7] * 9), ([8] * 20, [9])]
with distributed.join(job):
    def draw():
        return jax.tree.map(lambda leaf: 3 * leaf, init_params(cfg, jax.random.key(0, impl="rbg")))
    found = []
    one_device = ParallelConfig(), jax.local_devices()[:1]
    for parallel, devices in (one_device, (ParallelConfig(data=2, tensor=2), jax.devices())):
        layout = layout_of_model(cfg, parallel, devices)
        params = jax.jit(draw, out_shardings=param_shardings(cfg, layout))()
        found.append(Scorer(cfg, params, layout=layout, num_rows=1)(pairs))
    one, both = found
    np.testing.assert_allclose([score[0] for score in both], [score[0] for score in one], atol=1e-4)
    assert len({score[0] for score in one}) == 3
    print("equal", file=sys.stderr)
"""


@pytest.mark.slow
def test_scores_over_two_processes_equal_one_device(tmp_path):
    address = jobs.free_address()
    commands = [[sys.executable, "-c", TWO_PROCESSES, address, str(index)] for index in range(2)]
    with jobs.run_job(commands, [micro.environment(num_devices=2)] * 2, tmp_path) as job:
        assert job.wait() == [0, 0], job.err(0) + job.err(1)
    assert "equal" in job.err(0)
