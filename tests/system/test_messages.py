"""The errors that people meet first, word for word. Other tests match classes, keys, files and figures."""

import json
import os

import pytest

TINY = ("train", "--config=tiny", "--workdir=FOLDER/run")
# The words of a command -> what it says. FOLDER has files, RUN is a run of 24 steps, HERE the current folder.
MESSAGES = {
    ("train", "--config=tinny"): (
        "--config=tinny is not a shipped config, nor a path that ends in .py. Did you mean 'tiny'?"
    ),
    (*TINY, "--config.optimizer.peek_lr=1"): (
        "the config has no key --config.optimizer.peek_lr. Did you mean '--config.optimizer.peak_lr'?"
    ),
    (*TINY, "--config.model.attention=chunkd"): (
        "model.attention='chunkd' is not one of auto, einsum, blocked, chunked, cudnn, triton, nki. "
        "Did you mean 'chunked'?"
    ),
    (*TINY, "--config.model.vocab_size=1024"): (
        "data.tokenizer=package:austen_2k.model has 2048 tokens but model.vocab_size=1024. "
        "Set model.vocab_size=2048 or more, or use a tokenizer of at most 1024 tokens."
    ),
    (*TINY, "--config.parallel.tensor=3"): (
        "parallel.tensor=3 must divide model.num_kv_heads=2, or be a multiple of it that divides model.num_heads=6. "
        "Use one of [1, 2, 6]."
    ),
    (*TINY, "--config.data.train=FOLDER/no.jsonl"): "data.train: FOLDER/no.jsonl does not exist (looked from HERE).",
    (*TINY, "--config.data.train=FOLDER/body.jsonl"): (
        "FOLDER/body.jsonl, row 1: no key 'text' among its keys ('body'). Fix or remove it, set data.text_field if the "
        'text is under another name, or skip such records with data.on_bad_record="skip". After changing a file, '
        "start a new run in another --workdir."
    ),
    ("train", "--config=RUN/../micro.py", "--workdir=RUN", "--config.data.validation=", "--config.data.seed=5"): (
        "this run folder was trained with other settings:\n"
        "  data.seed: 1234 in the checkpoint, 5 now\n"
        "Restore these settings, or give the changed run another folder with --workdir."
    ),
    ("generate", "--prompt=a", "--checkpoint=FOLDER"): (
        "FOLDER holds no weights (working directory HERE). Give a run folder, such as runs/tiny, one of its "
        "checkpoints, runs/tiny/checkpoints/STEP, or a Hugging Face folder with config.json and safetensors."
    ),
    ("data", "build", "FOLDER/body.jsonl", "--out=FOLDER"): (
        "--out=FOLDER is a file or is not empty. Give a new or empty folder."
    ),
}


@pytest.fixture
def answer(train_here, generate_here, data_here, trained_run, tmp_path):
    """A function of the words of a command that returns what it says on stderr, with names for the folders."""
    (tmp_path / "body.jsonl").write_text("".join(json.dumps({"body": f"Text {n}."}) + "\n" for n in range(9)))
    rooms = {"train": train_here, "generate": generate_here, "data": data_here}

    def ask(room, *words):
        given = [word.replace("FOLDER", str(tmp_path)).replace("RUN", str(trained_run)) for word in words]
        code, _, error = rooms[room](*given)
        assert code == 2
        for name, folder in (("FOLDER", tmp_path), ("RUN", trained_run), ("HERE", os.getcwd())):
            error = error.replace(str(folder), name)
        return error

    return ask


@pytest.mark.parametrize(("words", "said"), MESSAGES.items(), ids=[words[-1] for words in MESSAGES])
def test_an_error_says_what_was_asked_and_what_to_change(words, said, answer):
    assert answer(*words) == f"error: {said}\n"
