"""A person's own book, from one text file to an exported model; the run folder is whole wherever it is moved."""

import json
import re

import micro
import pytest
from refusals import assert_names, assert_refused

from hlat_jax.data.formats.paths import asset_path
from hlat_jax.hf import __main__ as hf

OWN = """
    c.data.train = "texts/my_book.txt"
    c.data.validation = "5%"
    c.data.tokenizer = "texts/mine.model"
    c.model.vocab_size = 0
    return c
"""
SHORT = ("--config.train.num_steps=6", "--config.train.num_eval_batches=2")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder of a config with its text and tokenizer, beside a folder elsewhere; the current one is above both."""
    project = tmp_path / "project"
    (project / "texts").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    lines = asset_path("austen_train.jsonl").read_text().splitlines()[:9]
    (project / "texts/my_book.txt").write_text("\n\n".join(json.loads(line)["text"] for line in lines))
    (project / "texts/mine.model").write_bytes(asset_path("austen_2k.model").read_bytes())
    (project / "mine.py").write_text(micro.CONFIG.replace("    return c\n", OWN.lstrip("\n")))
    (tmp_path / "elsewhere/page.txt").write_text(json.loads(lines[0])["text"][:500])
    monkeypatch.chdir(tmp_path)
    return project


def figures(out):
    """Returns loss, perplexity and bits per byte of what `evaluate` prints."""
    return re.search(r"loss +\S+ nats per token\nperplexity +\S+\nbits per byte +\S+\n", out)[0]


@pytest.mark.slow
def test_a_run_on_an_own_book_is_whole_wherever_it_is_moved(
    project, tmp_path, monkeypatch, train_here, generate_here, evaluate_here, data_here
):
    code, out, err = train_here("--config=project/mine.py", *SHORT, "--workdir=run")
    assert code == 0, err
    loss = float(re.search(r"validation loss (\S+) nats per token", out)[1])
    prompt = ("--prompt=It is", "--max_tokens=8")
    told = generate_here("--checkpoint=run", *prompt)[1]
    text = figures(evaluate_here("--checkpoint=run", "--text=elsewhere/page.txt")[1])

    (tmp_path / "run").rename(tmp_path / "elsewhere/moved")
    tokenizer = project / "texts/mine.model"
    tokenizer.unlink()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert hf.main(["export", "moved", "--out=exported"]) == 0
    assert (tmp_path / "elsewhere/exported/tokenizer.model").read_bytes() == asset_path("austen_2k.model").read_bytes()
    for folder in ("moved", "exported"):
        code, out, err = generate_here(f"--checkpoint={folder}", *prompt)
        assert (code, out) == (0, told), err
        assert figures(evaluate_here(f"--checkpoint={folder}", "--text=page.txt")[1]) == text
    code, out, err = evaluate_here("--checkpoint=moved", "--validation")  # the text is where it was
    assert code == 0, err
    assert float(re.search(r"loss +(\S+) nats", figures(out))[1]) == pytest.approx(loss, abs=1e-4)  # printed digits

    again = ("--config=../project/mine.py", "--config.train.num_eval_batches=2", "--workdir=moved")
    for step in (7, 8):  # and again, as the record of the run still names the file that is gone
        code, out, err = train_here(*again, f"--config.train.num_steps={step}")
        assert code == 0, err
        assert_names(
            out, f"step {step - 1} of {step}", tmp_path / "elsewhere/moved/tokenizer/tokenizer.model", tokenizer
        )
    given = (*again, "--config.data.tokenizer=other.model")
    for found in (train_here(*given), data_here("peek", *given, "--step=1")):
        assert_refused(found, "other.model")
    assert data_here("peek", "--config=../project/mine.py", "--workdir=moved", "--step=2")[0] == 0
