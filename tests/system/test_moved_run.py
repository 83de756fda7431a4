"""A run folder is whole: moved, with the file of its tokenizer gone, it generates, evaluates, exports and resumes."""

import json

import micro
import pytest

from hlat_jax.data.formats.paths import asset_path
from hlat_jax.hf import __main__ as hf

PATHS = """
    c.data.train = "texts/train.jsonl"
    c.data.validation = "texts/train.jsonl"
    c.data.tokenizer = "texts/mine.model"
    c.model.vocab_size = 0
    return c
"""


@pytest.mark.slow
def test_a_moved_run_folder_generates_evaluates_exports_and_resumes(
    tmp_path, monkeypatch, train_here, generate_here, evaluate_here, data_here
):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "texts").mkdir(parents=True)
    elsewhere.mkdir()
    lines = asset_path("austen_train.jsonl").read_text().splitlines()[:60]
    (project / "texts" / "train.jsonl").write_text("\n".join(lines) + "\n")
    (elsewhere / "page.txt").write_text(json.loads(lines[0])["text"][:500])
    tokenizer = project / "texts" / "mine.model"
    tokenizer.write_bytes(asset_path("austen_2k.model").read_bytes())
    (project / "mine.py").write_text(micro.CONFIG.replace("    return c\n", PATHS.lstrip("\n")))

    monkeypatch.chdir(tmp_path)
    short = ("--config=project/mine.py", "--config.train.num_steps=6", "--config.train.num_eval_batches=2")
    assert train_here(*short, "--workdir=run")[0] == 0
    texts = [evaluate_here("--checkpoint=run", "--text=elsewhere/page.txt")[1]]
    texts.append(generate_here("--checkpoint=run", "--prompt=It is", "--max_tokens=8")[1])

    (tmp_path / "run").rename(elsewhere / "moved")
    tokenizer.unlink()
    monkeypatch.chdir(elsewhere)
    code, out, err = generate_here("--checkpoint=moved", "--prompt=It is", "--max_tokens=8")
    assert (code, out) == (0, texts[1]), err
    code, out, err = evaluate_here("--checkpoint=moved", "--text=page.txt")
    assert code == 0, err
    assert out.splitlines()[-3:] == texts[0].splitlines()[-3:]  # loss, perplexity, bits per byte
    assert evaluate_here("--checkpoint=moved", "--validation")[0] == 0  # the text is where it was
    assert hf.main(["export", "moved", "--out=exported"]) == 0
    assert (elsewhere / "exported" / "tokenizer.model").read_bytes() == asset_path("austen_2k.model").read_bytes()
    again = ("--config=../project/mine.py", "--config.train.num_eval_batches=2", "--workdir=moved")
    for step in (7, 8):  # and again, as the record of the run still names the file that is gone
        code, out, err = train_here(*again, f"--config.train.num_steps={step}")
        assert code == 0, err
        assert f"resuming from step {step - 1} of {step}" in out
        assert f"tokenizer        {elsewhere}/moved/tokenizer/tokenizer.model: {tokenizer} is missing" in out
    code, _, err = train_here(*again, "--config.data.tokenizer=other.model")
    assert (code, err.startswith(f"error: data.tokenizer={elsewhere}/other.model: no such file")) == (2, True)
    given = data_here("peek", *again, "--step=1", "--config.data.tokenizer=other.model")
    assert (given[0], "data.tokenizer=other.model: no such file" in given[2]) == (2, True)
    assert [row["step"] for row in micro.rows(elsewhere / "moved") if "loss" in row] == list(range(1, 9))
    assert data_here("peek", "--config=../project/mine.py", "--workdir=moved", "--step=2")[0] == 0

    # a run of a version that kept none: its tokenizer is missed, and can be given
    (elsewhere / "moved" / "tokenizer" / "tokenizer.model").rename("spare.model")
    code, _, err = train_here(*again, "--config.train.num_steps=10")
    assert (code, f"error: data.tokenizer={tokenizer}: no such file" in err) == (2, True)
    with pytest.raises(ValueError, match="no such file"):
        hf.main(["export", "moved", "--out=exported2"])
    assert hf.main(["export", "moved", "--out=exported2", "--tokenizer=spare.model"]) == 0
    code, _, err = train_here(*again, "--config.train.num_steps=10", "--config.data.tokenizer=spare.model")
    assert code == 0, err
    assert (elsewhere / "moved" / "tokenizer" / "tokenizer.model").is_file()
