"""The passes against the policies of `jax.checkpoint` and PyTorch, as `benchmarks/against.py` compares them."""

import pytest

from benchmarks import against

pytestmark = pytest.mark.slow
SMALL = (2, 64, 128, 2, 512, 32, 8)


def test_programs_of_jax_and_pytorch_compute_the_same_loss(monkeypatch, capsys):
    pytorch = pytest.importorskip("benchmarks.against_torch")
    monkeypatch.setitem(against.MODELS, "llama-160m", SMALL)
    monkeypatch.setattr(against, "CHUNK", "64KiB")
    monkeypatch.setattr(pytorch, "CONTENDERS", {"PyTorch eager": None, "torch.compile, budget 0.5": 0.5})
    table = against.compare("llama-160m", is_run=True, rounds=1)  # raises if a loss or gradient differs
    printed = capsys.readouterr().out
    assert all(f"  {row} " in printed for row in table)
    plain = table["plain"]
    for row, (num_bytes, flops, batch) in table.items():
        assert num_bytes <= 1.01 * plain[0], row
        if row in ("chunk and residuals", "passes.remat"):
            assert num_bytes < 0.95 * plain[0], row
        assert batch >= SMALL[6] - 1, row
        assert 1 <= flops / plain[1] < 1.4, row  # a forward pass is a third of the work


def test_another_loss_in_pytorch_is_refused(monkeypatch):
    pytorch = pytest.importorskip("benchmarks.against_torch")
    monkeypatch.setitem(against.MODELS, "gpt2", SMALL)
    of_wrapper, params, batch = against.transformer("gpt2")
    params, batch_of = against.drawn("gpt2", params, batch)
    monkeypatch.setattr(pytorch, "CONTENDERS", {"PyTorch eager": None})
    monkeypatch.setattr(pytorch, "layer_norm", pytorch.norm)
    contenders = against.torch_contenders("gpt2", params)
    programs = {"plain": of_wrapper(lambda fn: fn)}
    with pytest.raises(ValueError, match="loss and norm of gradients of PyTorch eager"):
        against.times(programs, params, batch_of(2), contenders, rounds=1)
