"""A vocabulary that the degrees do not divide: its rows of padding are in no loss, sample, checkpoint or export."""

import jax
import numpy as np
import pytest
import steps

import hlat_jax.hf
from hlat_jax.batch import concat_batch
from hlat_jax.config import ParallelConfig, default
from hlat_jax.generate.generator import Generator, Sampling
from hlat_jax.generate.scoring import Scorer
from hlat_jax.model import init_params, pad_vocabulary
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.resolve import resolve
from hlat_jax.store.checkpoint import Checkpointer, read_checkpoint


def configured(vocab_size, **parallel):
    c = default()
    c.model.update(vocab_size=vocab_size, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8)
    c.data.update(batch_size=4, seq_len=16)
    c.parallel.update(data=1, **parallel)
    return resolve(c)


def trained(config, num_steps=3):
    """Returns the program, losses and gradient norms of a few steps, and the state after them."""
    draws = [np.random.default_rng(step).integers(0, config.model.vocab_size, (4, 16)) for step in range(num_steps)]
    program, state, rows = steps.trained(config, [concat_batch(tokens) for tokens in draws], rate=1e-2)
    return program, [[row.loss, row.grad_norm] for row in rows], state


@pytest.mark.slow
def test_a_checkpoint_opens_under_the_padding_of_any_layout(tmp_path):
    found = [trained(configured(61, **degrees), num_steps=2) for degrees in ({}, {"pipe": 2, "tensor": 2})]

    def of_tokens(state):
        """Returns the state without padding, which must be zeros: the only arrays of 61 to 64 rows."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
        assert not any(leaf[61:].any() for leaf in leaves if leaf.ndim and 61 <= len(leaf) <= 64)
        return [leaf[:61] if leaf.ndim else leaf for leaf in leaves]

    for number, (program, _, state) in enumerate(found):
        kept = of_tokens(state)
        checkpointer = Checkpointer(tmp_path / str(number), config=program.config.checkpoint)
        checkpointer.save(1, state, position=np.zeros((1, 2), np.int64), metadata={}, norms={})
        checkpointer.wait()
        for other, _, _ in found:
            restored = read_checkpoint(tmp_path / str(number) / "checkpoints" / "1", other.abstract_state)
            jax.tree.map(np.testing.assert_array_equal, of_tokens(restored.state), kept)
        checkpointer.close()


@pytest.mark.slow
def test_padding_is_never_sampled_or_scored_whatever_it_holds():
    cfg = configured(61).model
    params = init_params(cfg, jax.random.key(0, impl="rbg"))
    layout = make_layout(ParallelConfig(data=1, pipe=2, tensor=2), jax.devices()[:4])
    padded = pad_vocabulary(params, cfg, layout)
    padded |= {name: padded[name].at[61:].set(9.0) for name in ("embed", "head")}
    prompts, wanted = [[1, 2, 3], [60]], {"max_tokens": 24, "sampling": Sampling(temperature=5.0, seed=2)}
    assert Generator(cfg, padded, layout=layout)(prompts, **wanted) == Generator(cfg, params)(prompts, **wanted)
    scores = [
        Scorer(cfg, each, layout=on, num_rows=2)([([1, 2], [60, 4]), ([5], [7])])
        for each, on in ((padded, layout), (params, make_layout(ParallelConfig(), jax.devices()[:1])))
    ]
    np.testing.assert_allclose(*([score.log_likelihood for score in each] for each in scores), rtol=1e-5)


def test_padding_is_not_saved_and_rows_that_are_none_are_refused(tmp_path):
    cfg = configured(61).model
    params = init_params(cfg, jax.random.key(0, impl="rbg"))
    padded = pad_vocabulary(params, cfg, make_layout(ParallelConfig(data=1, tensor=2), jax.devices()[:2]))
    assert padded["embed"].shape == padded["head"].shape == (62, 32)
    hlat_jax.hf.save(padded, cfg, "", tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, hlat_jax.hf.load(tmp_path / "out")[1], params)
    padded["head"] = padded["head"].at[61].set(1e-9)
    with pytest.raises(
        ValueError, match=r"head of params has 62 rows, and rows from model.vocab_size=61 on are not zeros"
    ):
        hlat_jax.hf.save(padded, cfg, "", tmp_path / "other")
    with pytest.raises(ValueError, match=r"final_norm.scale .*\(33,\), .*\(32,\) in the model"):
        hlat_jax.hf.save(params | {"final_norm": {"scale": np.zeros(33)}}, cfg, "", tmp_path / "other")
