"""The command that continues text: what it prints, that batches and meshes change nothing of it, what it refuses."""

import datetime
import io
import json
import subprocess
import sys
import types
from unittest import mock

import hf_models
import pytest
import tokenizers
import torch
import transformers
from refusals import assert_names, assert_refused
from tokenizer_files import train_model, write_tokenizer_json

from hlat_jax.data.chat_template import ChatTemplate
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.generate.chat import chat, ids_that_end_an_answer, open_template
from hlat_jax.generate.generator import Generator, Sampling
from hlat_jax.hf.importing import import_checkpoint
from hlat_jax.weights.hf_reading import open_checkpoint
from hlat_jax.weights.trained import open_weights

WORDS = ["--max_tokens=20", "--temperature=1.5", "--top_k=50", "--top_p=0.95", "--seed=7"]
SAMPLING = Sampling(1.5, 50, 0.95, 7)
PROMPTS = ["It is a truth", "Emma", "She was not"]


@pytest.fixture(scope="module")
def texts(trained_run):
    """What each of PROMPTS becomes, by the generator itself."""
    weights = open_weights(trained_run)
    tokenizer = weights.open_tokenizer()
    generator = Generator(weights.model, weights.restore(None))
    found = []
    for number, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt).tolist()
        options = {"sampling": SAMPLING, "stop_ids": (tokenizer.eos_id,), "first_number": number}
        found.append(tokenizer.decode(ids + generator([ids], max_tokens=20, **options)[0]))
    return found


def test_generated_texts_do_not_depend_on_batching_or_mesh(trained_run, texts, generate_here, tmp_path):
    (tmp_path / "prompts.txt").write_text(f"\ufeff{PROMPTS[1]}\n\n{PROMPTS[2]}\n")
    words = [f"--checkpoint={trained_run / 'checkpoints' / '24'}", f"--prompt={PROMPTS[0]}", *WORDS]
    code, printed, told = generate_here(*words)
    assert (code, printed) == (0, texts[0] + "\n")
    assert_names(told, f"{trained_run}/checkpoints/24", "step 24", "float32", "tensor 1", "cpu", "\n20 ")
    mesh = ["--config.parallel.tensor=2", "--config.parallel.data=-1", "--config.parallel.fsdp=2"]
    for more in (["--batch_size=2"], mesh):
        code, printed, _ = generate_here(*words, f"--prompts_file={tmp_path / 'prompts.txt'}", *more)
        assert code == 0
        assert printed == "".join(f"[{number}] {text}\n" for number, text in enumerate(texts))


def test_generate_refuses_invalid_flags(trained_run, generate_here, tmp_path):
    (tmp_path / "latin").write_bytes("caf\xe9".encode("latin-1"))
    run = f"--checkpoint={trained_run}"
    for words, *facts in [
        ([run], "--prompt=TEXT"),
        ([run, "--prompt="], "prompt 0 ", "''"),
        ([run, "--prompt=" + "it is " * 40], "prompt 0 ", " 31"),
        ([run, "--prompts_file=/no/such/file"], "--prompts_file=/no/such/file"),
        ([run, f"--prompts_file={tmp_path / 'latin'}"], "/latin", "UTF-8"),
        ([run, "--prompt=a\udcff"], r"--prompt='a\udcff'", "UTF-8"),
        ([run, "--prompt=a", "--temperature=-1"], "temperature=-1.0"),
        ([run, "--prompt=a", "--config.parallel.tensor=16"], "16 devices", "8"),
        ([run, "--parallel.tensor=2"], "--parallel.tensor", "--batch_size"),
    ]:
        found = generate_here(*words)
        assert_refused(found, *facts)
        assert found[1] == ""


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """(folder of transformers, the import of it): 384 rows, 320 tokens, two of which end texts."""
    folder = tmp_path_factory.mktemp("padded")
    source = hf_models.save(hf_models.model(hf_models.CONFIGS["gqa"]), folder / "source")
    train_model(source / "tokenizer.model", byte_fallback=True, vocab_size=320)
    ids = Tokenizer(str(source / "tokenizer.model")).encode("the lazy").tolist()
    made = transformers.AutoModelForCausalLM.from_pretrained(source)
    greedy = made.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0].tolist()
    ends = greedy[len(ids) + 3]
    assert ends not in greedy[: len(ids) + 3]
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, ends]}))
    import_checkpoint(open_checkpoint(source), folder / "imported")
    return source, folder / "imported"


@pytest.mark.slow
def test_generation_stops_at_the_same_tokens_as_transformers(padded, generate_here):
    source, imported = padded
    ids = open_weights(imported).open_tokenizer().encode("the lazy").tolist()
    made = transformers.AutoModelForCausalLM.from_pretrained(source)
    theirs = made.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
    assert len(theirs) == 4
    code, _, told = generate_here(f"--checkpoint={imported}", "--prompt=the lazy", "--max_tokens=8", "--nobos")
    assert code == 0
    assert "\n3 " in told  # without the one that ends the text


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_model(folder, kind, **changes):
    """Returns the folder of a model that talks, its tokenizer.json, and both as transformers opens them."""
    config = transformers.LlamaConfig(**hf_models.SMALL | {"vocab_size": 640} | changes)
    source = hf_models.save(hf_models.model(config), folder)
    path = write_tokenizer_json(source, kind, tokenizer_class="PreTrainedTokenizerFast", chat_template=TEMPLATE)
    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.no_truncation()
    made.no_padding()
    made.save(str(path))
    theirs, model = (
        auto.from_pretrained(source) for auto in (transformers.AutoTokenizer, transformers.LlamaForCausalLM)
    )
    return source, path, theirs, model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_control_tokens_in_prompts_give_what_transformers_gives(kind, generate_here, tmp_path):
    """The prompts of apply_chat_template, on the command line and in JSONL with a BOM, then greedy tokens."""
    source, path, theirs, model = chat_model(tmp_path / "hf", kind)
    prompts, expected = [], []
    for content in ("Is it a truth?", "naïve  —\n\n two", "</s>"):
        messages = [{"role": "user", "content": content}]
        prompts.append(theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ours = Tokenizer(str(path)).encode_with_control_tokens(prompts[-1])
        assert ours.tolist() == ids["input_ids"][0].tolist()
        continued = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
        expected.append(theirs.decode(continued, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    (tmp_path / "p.jsonl").write_text("\ufeff" + "\n".join(json.dumps({"text": text}) for text in prompts[1:]))
    words = [f"--checkpoint={source}", f"--prompt={prompts[0]}", f"--prompts_file={tmp_path / 'p.jsonl'}"]
    code, printed, error = generate_here(*words, "--max_tokens=12", "--control_tokens")
    assert code == 0, error
    assert printed == "".join(f"[{number}] {text}\n" for number, text in enumerate(expected))
    assert generate_here(*words, "--max_tokens=12")[1] != printed
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    assert_refused(generate_here(*words), "p.jsonl", "JSON")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_chat_writes_its_prompt_to_a_terminal_only(is_terminal, tmp_path, monkeypatch, capsys):
    path = write_tokenizer_json(tmp_path, tokenizer_class="PreTrainedTokenizerFast", chat_template=TEMPLATE)
    tokenizer = Tokenizer(str(path))
    trained = types.SimpleNamespace(tokenizer=tokenizer, model=types.SimpleNamespace(max_positions=512))
    answers = types.SimpleNamespace(stream=lambda *_, **__: ([token] for token in tokenizer.encode("truth").tolist()))
    monkeypatch.setattr("sys.stdin", io.StringIO("a man\na fortune\n"))
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: is_terminal)
    chat(trained, ChatTemplate(tmp_path), answers, max_tokens=9)
    assert capsys.readouterr().out == ("> truth\n> truth\n> \n" if is_terminal else "truth\ntruth\n")


@pytest.mark.slow
def test_a_chat_keeps_its_turns_and_leaves_out_the_oldest(generate_here, tmp_path, monkeypatch):
    source, _, theirs, model = chat_model(tmp_path / "hf", "bytes", max_position_embeddings=128)
    most, messages, printed = model.config.max_position_embeddings, [], ""
    lines = ["Is it a truth?", "naïve  —", "two" * 20, "and three"]
    for content in lines:
        messages.append({"role": "user", "content": content})
        how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        while len(theirs.apply_chat_template(messages, **how)["input_ids"][0]) + 12 > most and len(messages) > 1:
            del messages[:2]
        ids = theirs.apply_chat_template(messages, **how)
        continued = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
        before, text = (
            theirs.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for tokens in (ids["input_ids"][0], continued)
        )
        printed += text.removeprefix(before) + "\n"
        messages.append({"role": "assistant", "content": text.removeprefix(before).strip()})
    assert len(messages) < 2 * len(lines)
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=[*lines, EOFError]))
    code, said, error = generate_here(f"--checkpoint={source}", "--chat", "--max_tokens=12")
    assert code == 0, error
    assert said == printed
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (source / "model.safetensors").unlink()  # said before the weights are opened
    for words, *facts in (
        (["--chat"], "--chat", source),
        (["--prompt=a", "--repetition_penalty=0"], "repetition_penalty=0.0"),
        (["--prompt=a", "--stop="], "--stop="),
        (["--chat", "--prompt=a"], "--chat", "--prompt"),
    ):
        assert_refused(generate_here(f"--checkpoint={source}", *words), *facts)


@pytest.mark.parametrize(
    ("begin", "answer"),
    [
        ("[A]<think>", "[A]{{ m.content }}<|im_end|>"),  # the text of a past answer is another
        ("[A]", "[A]{% generation %}{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}"),
    ],
)
def test_a_chat_ends_an_answer_at_the_token_after_it(begin, answer, tmp_path):
    source, path, theirs, _ = chat_model(tmp_path / "hf", "bytes")
    (source / "chat_template.jinja").write_text(
        "{{ strftime_now('%Y') }}"
        "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}{% else %}" + answer + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}" + begin + "{% endif %}"
    )
    tokenizer, template = Tokenizer(str(path)), open_template(str(source))
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    assert end not in tokenizer.stop_ids
    assert ids_that_end_an_answer(template, tokenizer) == {*tokenizer.stop_ids, end}
    assert template.render([{"role": "user", "content": "?"}]).startswith(f"{datetime.date.today().year}[U]")


def test_completions_end_at_stop_texts_and_are_lines_of_json(trained_run, texts, generate_here):
    run, stop = f"--checkpoint={trained_run}", texts[0][len(PROMPTS[0]) :].split()[1]
    words = [run, *WORDS, *(f"--prompt={prompt}" for prompt in PROMPTS), f"--stop={stop}", "--stop=\n\n\n", "--json"]
    code, printed, error = generate_here(*words)
    assert code == 0, error
    for number, (line, whole) in enumerate(zip(printed.splitlines(), texts, strict=True)):
        row = json.loads(line)
        assert (row["number"], row["prompt"]) == (number, PROMPTS[number])
        completion = whole.removeprefix(PROMPTS[number])
        assert row["completion"] == completion.partition(stop)[0]
        assert row["ended"] == ("stop" if stop in completion else "length")
        assert (row["num_tokens"] == 20) == (row["ended"] == "length")


def test_control_tokens_of_a_native_model_are_those_of_transformers(tmp_path):
    for number, options in enumerate(({}, {"add_dummy_prefix": False})):
        folder = tmp_path / str(number)
        folder.mkdir()
        lossless = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
        path = train_model(folder / "tokenizer.model", byte_fallback=True, vocab_size=320, **lossless, **options)
        ours = Tokenizer(path)
        (folder / "tokenizer_config.json").write_text(json.dumps(ours.transformers_config()))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        for text in ("<s>the lazy dog</s>the  fox <s> jumps</s>", "a<s>b\n\n<s>\nc", "x</s> ", "</s>", "the dog"):
            expected = theirs.encode(text, add_special_tokens=False)
            assert ours.encode_with_control_tokens(text).tolist() == expected
            # the tokens of a tokenizer.json beside it, which an import does not take, are the same
            theirs.backend_tokenizer.save(str(folder / "tokenizer.json"))
            assert Tokenizer(path).encode_with_control_tokens(text).tolist() == expected


def test_a_missing_file_of_hugging_face_is_refused_by_name(padded, generate_here, tmp_path):
    both, given = ["config.json", "model.safetensors"], "--tokenizer=package:austen_2k.model"
    for number, (names, words, *facts) in enumerate([
        (["config.json"], [], "model.safetensors", "model.safetensors.index.json"),
        (["model.safetensors"], [], "config.json"),
        (both, [], "tokenizer.model", "tokenizer.json"),
        (both, ["--tokenizer=no.model"], "--tokenizer=no.model"),
        ([*both, "tokenizer.model"], [given], given),
        (["tokenizer.model"], [], "weights"),
    ]):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in names:
            (folder / name).symlink_to(padded[0] / name)
        found = generate_here(f"--checkpoint={folder}", "--prompt=a", *words)
        assert_refused(found, *facts)
        assert (found[1], found[2].count("\n")) == ("", 1)


@pytest.mark.slow
def test_a_tokenizer_is_given_where_the_folder_has_none(padded, generate_here, evaluate_here, tmp_path):
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(padded[0] / name)
    words = ["--prompt=the lazy", "--max_tokens=8", "--nobos"]
    given = f"--tokenizer={padded[0] / 'tokenizer.model'}"
    own = generate_here(f"--checkpoint={padded[0]}", *words)[:2]
    assert generate_here(f"--checkpoint={tmp_path}", given, *words)[:2] == own
    assert_refused(evaluate_here(f"--checkpoint={tmp_path}", given, "--validation"), f"{tmp_path} holds weights")


def test_closed_stdout_exits_without_a_traceback():
    command = [sys.executable, "-m", "hlat_jax.generate", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, "")
