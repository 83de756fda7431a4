"""The loss and the tokens of each source in the rows of a run, against each token's loss summed by hand."""

import json
import random

import jax
import micro
import numpy as np
import pytest

from hlat_jax.cli.config_files import load
from hlat_jax.data.loader import TrainBatches, make_batch
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.model import apply
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve

LAYOUTS = {
    "one device": {},
    "replicas": {
        "parallel__data": 2,
        "parallel__tensor": 2,
        "train__num_microbatches": 2,
        "data__packing": "documents",
    },
    "stages": {"parallel__pipe": 2, "parallel__data": 2, "train__num_microbatches": 2, "train__accumulate": "programs"},
    "uneven": {"parallel__data": 3, "parallel__zero1": True, "train__num_microbatches": -1},
}
NUM_DEVICES = {"one device": 1, "replicas": 4, "stages": 4, "uneven": 3}


def of_source(row, name):
    return {key.partition("/")[2]: value for key, value in row.items() if key.startswith(f"{name}/")}


@pytest.mark.quick_cases("replicas")
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_of_sources_are_sums_over_their_rows(name, tmp_path):
    rng = random.Random(0)
    lines = ["".join(rng.choice("qxzjkvw#%&@~^ ") for _ in range(rng.randrange(9, 60))) for _ in range(200)]
    (tmp_path / "noise.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    settings = {
        "data__train": f"text={load('tiny').data.train};noise={tmp_path}/noise.jsonl;none={tmp_path}/noise.jsonl"
    }
    settings |= {"data__mixture": "text=1,noise=1,none=0", "data__validation": "", "precision__policy": "fp32"}
    settings |= {"train__num_steps": 4, "metrics__source_losses_every_steps": 3, "checkpoint__every_steps": 0}
    config = micro.config(tmp_path, **settings | LAYOUTS[name])
    assert micro.train(config, tmp_path / "run", num_devices=NUM_DEVICES[name]) == 0
    rows, tokens = micro.rows(tmp_path / "run"), 0
    for row in rows:
        counts = of_source(row, "source_tokens")
        assert list(counts) == ["text", "noise", "none"]
        assert (sum(counts.values()), counts["none"]) == (row["tokens"] - tokens, 0)
        tokens = row["tokens"]
        losses = of_source(row, "source_loss")
        assert losses.keys() == ({"text", "noise"} if row["step"] == 3 else set())  # which both have rows then
        if losses:  # sums of fp32 in another order
            whole = sum(losses[source] * counts[source] for source in losses) / sum(counts.values())
            assert whole == pytest.approx(row["loss"], rel=1e-5)


def test_the_loss_of_a_source_is_that_of_its_tokens(tmp_path):
    (tmp_path / "noise.jsonl").write_text("".join(json.dumps({"text": f"q{n} ~x" * 20}) + "\n" for n in range(40)))
    settings = {"data__train": f"text={load('tiny').data.train};noise={tmp_path}/noise.jsonl", "data__validation": ""}
    settings |= {"data__mixture": "text=1,noise=1", "train__num_steps": 1, "precision__policy": "fp32"}
    config = micro.config(tmp_path, **settings, metrics__source_losses_every_steps=1)
    assert micro.train(config, tmp_path / "run") == 0
    [row] = micro.rows(tmp_path / "run")
    config = resolve(config)
    params = make_program(config, layout_over(config, jax.devices()[:1])).init_state()["params"]
    made = TrainBatches(config.data, tokenizer=Tokenizer(config.data.tokenizer)).next_rows()
    batch = make_batch([packed for _, packed in made])
    logits = np.asarray(apply(params, config.model, batch.tokens), np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0] * batch.weights
    for source, name in enumerate(("text", "noise")):
        own = [index for index, (of, _) in enumerate(made) if of == source]
        assert row[f"source_tokens/{name}"] == batch.weights[own].sum() > 0
        loss = losses[own].sum() / batch.weights[own].sum()
        assert row[f"source_loss/{name}"] == pytest.approx(loss, rel=1e-5)  # fp32
    assert row["source_loss/text"] != row["source_loss/noise"]


def test_losses_of_sources_change_nothing_else(trained_run, tmp_path):
    settings = {"data__validation": "", "train__num_steps": 3, "metrics__source_losses_every_steps": 2}
    assert micro.train(micro.config(tmp_path, **settings), tmp_path / "run") == 0
    rows = micro.rows(tmp_path / "run")
    assert [micro.exact(row) for row in rows] == [micro.exact(row) for row in micro.rows(trained_run)[:3]]
    assert [row.get("source_loss/all") for row in rows] == [None, pytest.approx(rows[1]["loss"], rel=1e-4), None]
