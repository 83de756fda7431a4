"""Documents of which only answers are trained on: prompts with answers, and conversations."""

import json

import micro
import numpy as np
import pytest
import tokenizers
import transformers
from refusals import assert_refused, refused
from test_chat_template import CHATML, MARKED, TALK, folder_with

import configs
from hlat_jax.cli import config_files
from hlat_jax.data.answers import AnswerTokens
from hlat_jax.data.formats import records
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer

PAIRS = [(f"It is a truth number {n}, ", f"that a man {n * n} must want.") for n in range(12)]
NATIVE = "package:austen_2k.model"


def write_records(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def data_config(path, field, *, tokenizer=NATIVE, **changes):
    small = {"batch_size": 2, "seq_len": 48}
    return configs.resolved(data__train=path, text_field=field, tokenizer=tokenizer, **small | changes).data


@pytest.mark.parametrize("packing", ["concat", "documents"])
@pytest.mark.parametrize("bos", [False, True])
def test_only_answers_and_their_end_are_targets(packing, bos, tmp_path):
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in PAIRS]
    data = data_config(write_records(tmp_path / "pairs.jsonl", rows), "prompt,answer", packing=packing, prepend_bos=bos)
    rows = [{"text": prompt + answer} for prompt, answer in PAIRS]
    plain = data_config(write_records(tmp_path / "texts.jsonl", rows), "text", packing=packing, prepend_bos=bos)
    tokenizer, counted = Tokenizer(NATIVE), set()
    marked, whole = (TrainBatches(each, tokenizer=tokenizer) for each in (data, plain))
    for step in range(6):
        if step == 3:
            marked.set_state(marked.get_state())
        (ours, _), (theirs, _) = next(marked), next(whole)
        for name in ("tokens", "targets", "positions", "segment_ids"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert (ours.weights <= theirs.weights).all()
        for targets, weights in zip(ours.targets, ours.weights, strict=True):
            for part in np.split(targets, np.flatnonzero(np.diff(weights)) + 1)[:-1]:
                counted.add(tokenizer.decode(part).strip())
    assert {answer for _, answer in PAIRS} < counted
    assert any("a truth number" in text for text in counted)  # between two answers
    marked.close()
    whole.close()


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_a_conversation_has_the_answers_of_transformers(template, tmp_path):
    folder = folder_with(tmp_path, template)
    theirs, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer(str(folder / "tokenizer.json"))
    line = json.dumps({"messages": TALK}).encode()
    document = records.json_text(line, field="messages", where="a.jsonl", row=1)
    tokens = AnswerTokens(tokenizer, bos=False)(document)
    ids, is_target = tokens.ids, tokens.is_target
    made = theirs.apply_chat_template(TALK, return_assistant_tokens_mask=template == MARKED, return_dict=True)
    assert ids.tolist() == made["input_ids"]
    if template == MARKED:
        assert is_target.tolist() == list(map(bool, made["assistant_masks"]))
    answers = "".join(message["content"] for message in TALK[1::2])
    assert tokenizer.decode(ids[is_target]).replace("<|im_end|>\n", "") == answers


@pytest.mark.slow
def test_a_run_resumes_only_with_its_chat_template(tmp_path):
    folder = folder_with(tmp_path, CHATML)
    path, settings = tmp_path / "chat_template.jinja", json.loads((folder / "tokenizer_config.json").read_text())
    texts = write_records(tmp_path / "text.jsonl", [{"messages": "no conversation"}] * 8)
    talks = write_records(tmp_path / "talks.jsonl", [{"messages": 3}, *[{"messages": TALK}] * 8])  # the first is bad

    def train(workdir, data, **settings):
        path.write_text(settings.pop("template", CHATML))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        c = micro.config(tmp_path, data__validation="", data__train=data, data__text_field="messages")
        c.data.tokenizer = str(folder / "tokenizer.json")
        c.data.update(on_bad_record="skip", mixture="a=1,b=1" if ";" in data else "")
        c.train.update(num_steps=len(micro.saved_steps(workdir)) + 1, eval_every_steps=0)
        return micro.train(c, workdir)

    marked = CHATML.replace("<|im_start|>", "<|begin|>")
    for data in (f"{texts},{talks}", f"a={texts};b={talks}"):
        run = tmp_path / f"run {len(data)}"
        assert train(run, data, **settings) == 0
        for changed in (settings | {"template": marked}, settings | {"unk_token": "<s>"}):
            with refused("data.train", "data.tokenizer"):
                train(run, data, **changed)
        assert (run / "tokenizer" / path.name).read_text() == CHATML
    assert train(run, data, **settings) == 0
    assert train(tmp_path / "plain", texts, **settings) == 0
    assert train(tmp_path / "plain", texts, template=marked, **settings) == 0  # no conversation depends on it
    with refused("tokenizer.eos_id"):
        train(tmp_path / "plain", texts, **settings | {"eos_token": "<s>"})


def open_batches(path, field, *, tokenizer=NATIVE, **changes):
    data = data_config(path, field, tokenizer=tokenizer, **changes)
    return TrainBatches(data, tokenizer=Tokenizer(tokenizer))


def test_conversations_without_a_fitting_template_are_refused(tmp_path, data_here):
    no_role = [*TALK[:1], {"role": "tool", "content": "3"}, *TALK[1:]]
    folder = folder_with(tmp_path, MARKED)
    path = write_records(tmp_path / "talks.jsonl", [{"messages": no_role}] * 4)
    with refused("talks.jsonl, row 1", folder, "no role tool"):  # when opened, in the words of the template
        open_batches(path, "messages", tokenizer=str(folder / "tokenizer.json"))
    with refused("chat_template.jinja"):
        open_batches(path, "messages")
    built = data_here("build", path, f"--out={tmp_path / 'built'}", "--text_field=messages")
    assert_refused(built, "talks.jsonl, row 1")


@pytest.mark.parametrize(
    ("record", "field", "names"),
    [
        ({"messages": [{"role": "user"}]}, "messages", ("message 1", "'messages'")),
        ({"messages": ["Hello"]}, "messages", ("message 1", "'messages'")),
        ({"messages": TALK[:1]}, "messages", ("'messages'", "assistant")),
        ({"messages": 3}, "messages", ("'messages'", "int")),
        ({"prompt": "a"}, "prompt,answer", ("'answer'", "'prompt'")),
    ],
)
def test_a_record_without_an_answer_is_bad(record, field, names):
    with refused("a, row 7", *names, kind=records.BadRecord):
        records.json_text(json.dumps(record).encode(), field=field, where="a", row=7)


def test_a_text_field_of_three_keys_is_refused(tmp_path):
    path = write_records(tmp_path / "three.jsonl", [{"q": "a", "a": "b", "x": "c"}] * 4)
    with refused("three.jsonl", "'q,a,x'", "PROMPT,ANSWER"):
        open_batches(path, "q,a,x", on_bad_record="skip")


def test_a_wrong_text_field_is_found_at_row_1_of_the_file(tmp_path):
    rows = [{"text": f"It is a truth {number}"} for number in range(40)]
    path, tokenizer = write_records(tmp_path / "a.jsonl", rows), Tokenizer(NATIVE)
    with refused("a.jsonl, row 1", "'body'", "'text'", kind=records.BadRecord):
        TrainBatches(data_config(path, "body"), tokenizer=tokenizer)
    TrainBatches(data_config(path, "body", on_bad_record="skip"), tokenizer=tokenizer).close()
    rows[0] = {"body": "It is"}  # one bad record is found as it is read
    TrainBatches(data_config(write_records(tmp_path / "b.jsonl", rows), "text"), tokenizer=tokenizer).close()


def test_peek_spells_control_tokens_as_the_tokenizer_does(tmp_path, data_here):
    folder = folder_with(tmp_path, CHATML)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|im_end|>"}))
    talk = [{"role": "user", "content": "A man?"}, {"role": "assistant", "content": "A truth."}]
    path = write_records(tmp_path / "talks.jsonl", [{"messages": talk}] * 4)
    data = {"train": path, "text_field": "messages", "validation": "", "tokenizer": folder / "tokenizer.json"}
    words = ["--config=tiny", *(f"--config.data.{key}={value}" for key, value in data.items())]
    code, printed, error = data_here("peek", *words, "--step=1", "--row=0", f"--workdir={tmp_path / 'run'}")
    assert code == 0, error
    whole = "[[<|im_start|>user\nA man?<|im_end|>\n<|im_start|>assistant\n]]A truth.<|im_end|>\n"
    assert whole in printed
    assert "</s>" not in printed


def test_peek_and_stats_show_what_is_trained_on(tmp_path, data_here):
    path = write_records(tmp_path / "pairs.jsonl", [{"q": prompt, "a": answer} for prompt, answer in PAIRS])
    data = {"train": path, "text_field": "q,a", "validation": ""}
    words = ["--config=tiny", *(f"--config.data.{key}={value}" for key, value in data.items())]
    code, printed, error = data_here("peek", *words, "--step=1", "--row=0", f"--workdir={tmp_path / 'run'}")
    assert code == 0, error
    assert "[[It is a truth number 6,]] that a man 36 must want.</s>" in printed
    code, printed, error = data_here("stats", *words)
    assert code == 0, error
    tokenizer = Tokenizer(NATIVE)
    whole = sum(len(tokenizer.encode(prompt + answer)) + 1 for prompt, answer in PAIRS)
    share = 1 - sum(len(tokenizer.encode(prompt.rstrip())) for prompt, _ in PAIRS) / whole  # the space is the answer's
    assert f"{share:.1%}" in printed
    assert config_files.load("tiny").data.text_field == "text"
