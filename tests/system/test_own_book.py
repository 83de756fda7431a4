"""A person's own book, from one text file to an exported model; from another folder, and after an update."""

import json
import re

import micro
import pytest

from hlat_jax.data.formats.paths import asset_path
from hlat_jax.hf import __main__ as hf

SHORT = ("--config.train.num_steps=6", "--config.train.num_eval_batches=0")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The working directory, with chapters of a novel as my_book.txt and as lines of my_book.jsonl."""
    folder = tmp_path / "home"
    folder.mkdir()
    lines = asset_path("austen_train.jsonl").read_text().splitlines()[:9]
    (folder / "my_book.txt").write_text("\n\n".join(json.loads(line)["text"] for line in lines))
    (folder / "my_book.jsonl").write_text("\n".join(lines) + "\n")
    micro.write_config(folder)
    monkeypatch.chdir(folder)
    return folder


def figures(out):
    """Returns loss, perplexity and bits per byte of what `evaluate` prints."""
    return re.search(r"loss +\S+ nats per token\nperplexity +\S+\nbits per byte +\S+\n", out)[0]


@pytest.mark.slow
def test_an_own_book_is_trained_on_evaluated_exported_and_continued(
    home, tmp_path, monkeypatch, train_here, evaluate_here, generate_here
):
    words = ("--config=micro.py", "--config.data.train=my_book.txt", *SHORT)
    code, out, err = train_here(*words, "--workdir=run")
    assert code == 0, err
    assert "data             source all: cut at paragraphs into" in out
    loss = float(re.search(r"validation loss (\S+) nats per token", out)[1])

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the text is found from here too
    code, out, err = evaluate_here(f"--checkpoint={home / 'run'}", "--validation")
    assert code == 0, err
    assert float(re.search(r"loss +(\S+) nats", figures(out))[1]) == pytest.approx(loss, abs=1e-4)  # printed digits

    assert hf.main(["export", str(home / "run"), "--out=my_book-hf"]) == 0
    prompt = ("--prompt=It is", "--max_tokens=8")
    told = [generate_here(f"--checkpoint={folder}", *prompt)[:2] for folder in (home / "run", "my_book-hf")]
    assert told[0] == told[1]
    assert told[0][1].startswith("It is")
    texts = [evaluate_here(f"--checkpoint={f}", f"--text={home / 'my_book.txt'}") for f in (home / "run", "my_book-hf")]
    assert figures(texts[0][1]) == figures(texts[1][1])
    assert "text             1 document, " in texts[0][1]

    moved = home.rename(tmp_path / "moved")  # the project, with its text
    monkeypatch.chdir(moved)
    code, out, err = evaluate_here("--checkpoint=run", "--validation")
    assert code == 0, err
    assert float(re.search(r"loss +(\S+) nats", figures(out))[1]) == pytest.approx(loss, abs=1e-4)

    code, out, err = train_here(*words, "--workdir=run", "--config.train.num_steps=8")
    assert (code, "resuming from step 6 of 8" in out) == (0, True), err
