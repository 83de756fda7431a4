"""Tasks with a chat template, against the harness's own backend for Hugging Face on the same folder.

Both compute in fp32: log-likelihoods agree within 1e-3 nats (sums over up to 256 tokens), texts exactly.
"""

import functools
import json
import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

pytest.importorskip("lm_eval", reason="pip install 'hlat_jax[eval]'")
pytest.importorskip("accelerate", reason="the harness's own backend needs it")

import hf_models
import lm_eval
import numpy as np
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from local_tasks import NAMES, YAML, write_tasks
from refusals import assert_refused
from tokenizer_files import write_tokenizer_json

from hlat_jax.config import ParallelConfig
from hlat_jax.evaluate.harness import HarnessModel
from hlat_jax.generate.inference import open_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TURNS = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
# Who writes BOS -> (template, whether the tokenizer does)
CASES = {
    "template": ("{{ bos_token }}" + TURNS, False),
    "tokenizer": (NO_SYSTEM + TURNS, True),
    "both": ("{{ bos_token }}" + TURNS, True),
    "neither": (TURNS, False),
}
PREFIXED = "local_prefixed"  # a task that begins the answers


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of tasks, one of which begins the answer and stops at EOS as the template writes it."""
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    text = (folder / "local_generation.yaml").read_text().replace("local_generation", PREFIXED, 1)
    text = text.replace('until: ["ou", "."]', 'until: ["ou", "</s>"]') + 'gen_prefix: "The answer: "\n'
    (folder / f"{PREFIXED}.yaml").write_text(text)
    assert '"</s>"' in text
    assert 'until: ["ou", "."]' in YAML["local_generation"]
    return folder


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """A function of a case that returns the folder of a small random Llama with its chat template."""

    @functools.cache
    def make(case):
        folder, (template, adds_bos) = tmp_path_factory.mktemp("chat"), CASES[case]
        path = write_tokenizer_json(folder, tokenizer_class="PreTrainedTokenizerFast")
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | ({} if adds_bos else {"post_processor": None}) | {"truncation": None}))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = {"default": template, "loud": template.replace("]", "!]").replace("[0!]", "[0]")}
        tokenizer.save_pretrained(folder)
        sizes = {"vocab_size": 700, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2}
        return hf_models.save(hf_models.model(transformers.LlamaConfig(**hf_models.SMALL | sizes)), folder)

    return make


def ours(folder):
    return HarnessModel(open_model(str(folder), ParallelConfig()), batch_size=2)


def asked(model, tasks, names, **options):
    """Returns (prompt, what was asked, answers) of each request, in order."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    given = {"task_manager": manager, "bootstrap_iters": 0, "apply_chat_template": True} | options
    samples = lm_eval.simple_evaluate(model=model, tasks=names, **given)["samples"]
    rows = [row for name in names for row in sorted(samples[name], key=lambda row: row["doc_id"])]
    return [(row["arguments"], row["resps"]) for row in rows]


def assert_same(found, wanted):
    assert [prompts for prompts, _ in found] == [prompts for prompts, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        for answer, right in zip(np.ravel(np.array(one, object)), np.ravel(np.array(other, object)), strict=True):
            assert answer == (right if isinstance(right, bool | str) else pytest.approx(right, abs=1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_answers_equal_the_hugging_face_backend(case, chat_folder, tasks):
    folder = chat_folder(case)
    model = ours(folder)
    theirs = HFLM(str(folder), device="cpu", batch_size=1, prefix_token_id=model.prefix_token_id)
    options = {"num_fewshot": 1, "system_instruction": "Be terse."}
    for multiturn in (True, False):
        options["fewshot_as_multiturn"] = multiturn
        found, wanted = (asked(each, tasks, [*NAMES, PREFIXED], **options) for each in (model, theirs))
        assert_same(found, wanted)
    texts = [answers[0][0] for prompts, answers in found if "until" in str(prompts)]
    assert len(texts) == 8
    assert len({*texts}) > 4


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_begins_with_bos_at_most_once(case, chat_folder):
    model, tokenizer = ours(chat_folder(case)), transformers.AutoTokenizer.from_pretrained(chat_folder(case))
    text = model.apply_chat_template([{"role": "user", "content": "It is"}])
    ids = model.tok_encode(text)
    assert ids == tokenizer.encode(text, add_special_tokens=case == "tokenizer")
    assert ids.count(tokenizer.bos_token_id) == (case != "neither")
    assert ids[:1] == [tokenizer.bos_token_id] or case == "neither"


def test_a_stop_sequence_may_be_a_control_token(chat_folder):
    model = ours(chat_folder("both"))
    seen = []

    def stream(prompts, *, stop_ids, **_):
        seen.append(stop_ids)
        yield from ()

    model._generator.stream = stream
    model._continue_texts([[5]], {"until": ["<unk>", "It", "</s>x"], "max_gen_toks": 8}, first_number=0)
    assert seen == [{0, 2}]  # 2 is EOS


def test_a_named_template_is_applied(chat_folder):
    model = ours(chat_folder("both"))
    message = {"role": "user", "content": "It is"}
    key = model.tokenizer_name
    assert model.apply_chat_template([message]) == "<s>[user] It is\n[assistant]\n"
    assert model.chat_template("loud") == ("{{ bos_token }}" + TURNS).replace("]", "!]")
    assert model.apply_chat_template([message]) == "<s>[user!] It is\n[assistant!]\n"
    assert model.tokenizer_name != key  # the harness keeps rendered requests under it
    assert model.chat_template(False) is None


def test_a_missing_template_is_refused_before_weights_are_read(chat_folder, tmp_path, evaluate_here, monkeypatch):
    plain = shutil.copytree(chat_folder("both"), tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    shutil.rmtree(plain / "additional_chat_templates")
    monkeypatch.setattr("hlat_jax.weights.trained.open_weights", lambda *_, **__: pytest.fail("opened"))
    monkeypatch.setattr(TaskManager, "__init__", lambda *_, **__: pytest.fail("listed"))
    monkeypatch.setattr("sys.argv", [])
    for folder, words, *facts in [
        (plain, [], "--apply_chat_template", plain),
        (chat_folder("both"), ["tool_use"], "'tool_use'", "default, loud"),
        (tmp_path / "none", [], "model_args: "),
    ]:
        words = ["--model", "hlat_jax", "--apply_chat_template", *words, "--model_args", f"checkpoint={folder}"]
        assert_refused(evaluate_here("lm_eval", *words, "--tasks", "local_choice"), *facts)


@pytest.mark.slow
def test_the_command_applies_the_template(chat_folder, tasks, evaluate_here, monkeypatch, tmp_path):
    folder = chat_folder("both")
    [[_, wanted], *_] = asked(ours(folder), tasks, ["local_generation"])
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))  # slow
    words = f"--model hlat_jax --model_args checkpoint={folder} --include_path {tasks} --tasks local_generation"
    words += f" --apply_chat_template --log_samples --output_path {tmp_path}"
    code, _, error = evaluate_here("lm_eval", *words.split())
    assert code == 0, error
    [path] = tmp_path.rglob("samples_*.jsonl")
    [first, *_] = map(json.loads, path.read_text().splitlines())
    assert first["arguments"]["gen_args_0"]["arg_0"].startswith("<s>[user] It is a truth")
    assert first["resps"] == wanted
