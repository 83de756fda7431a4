"""The pages say what the code says, and every command and example that they show is run here, in the order of the pages
and in one folder, or checked without running it where it takes a cluster, the network, or too long: `CHECKED` has
those, each with the reason. So is every `python ...` that stands in a sentence.

Blocks after the words *Not yet run* are read by bash and not run. Python blocks after the words *Needs `package`* are
run apart from the others, and only if the package is installed.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import local_tasks
import micro
import pytest

from hlat_jax.config import SECTIONS
from tools import command_reference, config_reference

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/passes").glob("*.md"))]
LINKED = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "notebooks" / "README.md"]
NOT_RUN = "*not yet run*"
_TRAIN, _NODE = "python -m hlat_jax.train", "launch/node.sh --dry-run"
_SLURM = "scontrol() { echo n1; echo n2; }; export -f scontrol; SLURM_NNODES=2 SLURM_NODEID=1 SLURM_JOB_NODELIST=n"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
# What is run in place of a command: pattern, replacement, why. The first that fits counts.
CHECKED = (
    (r"^(pip install|git clone|cd|pytest)\b.*", "true", ".ci/run begins with them"),
    (r"^((?:\w+=\S+ )?sbatch .*)", "true", "a cluster"),
    (r"^(?:aws s3 cp|python .*(?<!copy_to=)s3:).*", "true", "a bucket"),
    (r"^srun \S+ launch/node.sh", f"{_SLURM} {_NODE}", "a cluster"),
    (r"^mpirun .*? launch/node.sh", f"OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 {_NODE}", "a cluster"),
    (r"^launch/node.sh (?!--dry-run)", f"{_NODE} ", "several nodes"),
    (rf"^({_TRAIN} .*--config=(?:160m|7b|70b|mine.py)(?!.*--print_config).*)", r"\1 --print_config", "its size"),
    (r"^python ((?:benchmarks|tests|tools)/.*)", rf"python {ROOT}/tests/support/parse_only.py \1", "minutes"),
    (r"^(python -m hlat_jax.neuron doctor.*)", r"\1 --help", "minutes; its parts have tests of their own"),
    (r"^(python -m hlat_jax(?:\.\w+)+(?: [a-z]+)?)$", r"\1 --help", "a name in a sentence, without what it takes"),
)
# What is run is shorter than what is shown.
SHORTER = (
    (rf"^({_TRAIN} --init_from=.*)", r"\1 --config.train.num_steps=2 --config.data.seq_len=64"),
    (r"^(\S+ -m hlat_jax.data peek --init_from=.*)", r"\1 --config.data.seq_len=64"),
    (
        rf"^((?:launch/restart.sh )?{_TRAIN} --config=tiny .*)",
        r"\1 --config.train.num_steps=12 --config.checkpoint.every_steps=6 --config.train.num_eval_batches=2"
        r" --config.model.num_layers=1",
    ),
    (r"(hlat_jax.plan) --config=7b --nodes=64 --search", r"\1 --config=tiny --instance=trn1.2xlarge --search"),
    (r"(hlat_jax.neuron (?:ladder|hlo)) --config=7b", r"\1 --config=tiny"),
    (r"runs/tiny/checkpoints/300 runs/tiny/checkpoints/400", "runs/tiny/checkpoints/6 runs/tiny/checkpoints/12"),
    (r"explain runs/tiny@300", "explain runs/tiny@12"),
    (r"branch_from=runs/tiny@108 (.*)num_steps=288", r"branch_from=runs/tiny@6 \1num_steps=12"),
    (r"branch_from=runs/stable@160 (.*)num_steps=200", r"branch_from=runs/stable@6 \1num_steps=12"),
    (r"runs/70b/checkpoints/415000 runs/70b/checkpoints/429000", "runs/tiny/checkpoints/6 runs/tiny/checkpoints/12"),
)
# Other tasks and another model than those shown, which are fetched or trained for months.
LOCAL = (
    (r"(hlat_jax.evaluate --checkpoint=)\S+ --tasks=\S+", r"\1runs/tiny --tasks=local_choice --tasks_folder=my_tasks"),
    (r"checkpoint=runs/[^ ]+ --tasks \S+", "checkpoint=runs/tiny --tasks local_rolling --include_path my_tasks"),
)


def blocks(page):
    """Returns (commands, whether they are to be run) of each bash block of a page, the lines of a command joined."""
    text, found = page.read_text(), []
    for block in re.finditer(r"```bash\n(.*?)```", text, re.DOTALL):
        before = text[: block.start()].rstrip().rsplit("\n\n", 1)[-1]
        lines = re.sub(r"(^|\s)#.*$", "", block[1].replace("\\\n", " "), flags=re.MULTILINE).splitlines()
        is_run = NOT_RUN not in " ".join(before.lower().split())  # which may stand on two lines
        found.append(([" ".join(line.split()) for line in lines if line.strip()], is_run))
    return found


def inline(page):
    """Returns the commands in a page's sentences; a benchmark or a tool with arguments is one also without `python`."""
    sentences = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", sentences)]
    spans = [re.sub(r"^((?:benchmarks|tools)/\S+\.py) ", r"python \1 ", span) for span in spans]
    return [span for span in spans if span.startswith("python ")]


def as_run(command):
    """Returns what is run for a command that is shown."""
    for pattern, replacement in (*SHORTER, *LOCAL):
        command = re.sub(pattern, replacement, f"{command} ").strip()
    for pattern, replacement, _ in CHECKED:
        if re.match(pattern, command):
            return re.sub(pattern, replacement, command)
    return command


def cases():
    """Returns each different command once; those that use what others made run in one process, in their order."""
    found = {}
    for page in PAGES:
        shown = [command for lines, run in blocks(page) if run for line in lines for command in line.split(" && ")]
        for command in shown + inline(page):
            run = as_run(command)
            alone = re.search(
                r"hlat_jax\.(plan(?! tune)|neuron)|--help|--print_config|--dry-run|parse_only|^true$", run
            )
            marks = () if alone else pytest.mark.xdist_group("commands")
            found.setdefault(run, pytest.param(run, id=f"{page.stem}: {command}", marks=marks))
    return list(found.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a reader has: a checkout, and the files that the pages assume."""
    path = tmp_path_factory.mktemp("reader")
    for name in ("README.md", "benchmarks", "configs", "hlat_jax", "launch", "tests", "tools"):
        (path / name).symlink_to(ROOT / name)
    (path / "my_texts").mkdir()
    lines = (ROOT / "hlat_jax" / "assets" / "austen_train.jsonl").read_text().splitlines()
    for number, line in enumerate(lines[:60]):
        (path / "my_texts" / f"{number}.txt").write_text(json.loads(line)["text"])
    book = "\n\n".join(json.loads(line)["text"] for line in lines[:9])
    (path / "my_book.txt").write_text(book)
    (path / "my_tasks").mkdir()
    local_tasks.write_tasks(path / "my_tasks")
    (path / "prompts.txt").write_text("It is a truth\nEmma\n")
    (path / "SmolLM2-135M").symlink_to("my_book-hf")  # which the README's commands export
    (path / "SmolLM2-135M-Instruct").mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.model"):
        (path / "SmolLM2-135M-Instruct" / name).symlink_to(pathlib.Path("..", "my_book-hf", name))
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE, "tokenizer_class": "LlamaTokenizer"}
    (path / "SmolLM2-135M-Instruct" / "tokenizer_config.json").write_text(json.dumps(settings))
    talk = json.dumps({"messages": [{"role": role, "content": "It is a truth."} for role in ("user", "assistant")]})
    (path / "talks.jsonl").write_text(f"{talk}\n" * 40)
    (path / "runs" / "7b" / "checkpoints" / "1000").mkdir(parents=True)
    for name in ("doctor-7b.json", "runs/7b/config.json"):
        (path / name).write_text("{}")
    (path / "mine.py").write_text((ROOT / "configs" / "tiny.py").read_text())
    return path


@pytest.mark.slow
@pytest.mark.parametrize("command", cases())
def test_commands_of_a_page_run(command, folder):
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    env = micro.environment(folder / "cache") | {"PATH": path}
    if "--instance=" in command:
        del env["JAX_PLATFORMS"]  # a run on Trainium's devices, which it would keep JAX off
    words = ["bash", "-c", command]
    how = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(words, cwd=folder, env=env, check=False, **how)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr


def python_examples():
    """Returns a case for each page, and one for each package that examples need, with the blocks that they continue."""
    found: dict = {}
    for page in PAGES:
        plain = found[page.name, ""] = []
        examples = re.findall(r"(?:\*Needs `(\w+)`[^\n]*\n\n)?```python\n(.*?)```", page.read_text(), re.DOTALL)
        for package, code in examples:
            found.setdefault((page.name, package), plain.copy()).append(code)
    return [pytest.param(*key, codes, id=":".join(filter(None, key))) for key, codes in found.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "package", "codes"), python_examples())
@pytest.mark.xdist_group("commands")
def test_python_examples_of_a_page_run(page, package, codes, folder, monkeypatch, capsys):
    if package:
        pytest.importorskip(package)
    monkeypatch.chdir(folder)
    names: dict = {}  # the blocks of a page may continue one another
    for code in codes:
        exec(compile(code, page, "exec"), names)
    if page == "passes.md":
        lines = capsys.readouterr().out.splitlines()
        # log 4, and 2 of 6 that count
        assert any(re.match(r"1\.386.*'accuracy': Array\(0\.333", line) for line in lines)
        assert any(re.match(r"autocast +\d+ bfloat16", line) for line in lines)
        assert any("all-gather over fsdp" in line for line in lines)


def test_unexecuted_commands_are_valid_bash_on_one_page():
    waiting = {page.name: [lines for lines, run in blocks(page) if not run] for page in PAGES}
    assert [name for name, found in waiting.items() if found] == ["trainium.md"]
    for lines in waiting["trainium.md"]:
        subprocess.run(["bash", "-n", "-c", "\n".join(lines)], check=True)


def test_config_reference_is_what_the_dataclasses_say():
    assert config_reference.PAGE.read_text() == config_reference.reference(), "run python tools/config_reference.py"


def test_command_reference_is_what_the_commands_print():
    assert command_reference.PAGE.read_text() == command_reference.reference(), "run python tools/command_reference.py"


@pytest.mark.parametrize("page", LINKED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_page_links_resolve(page):
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{page.name} links to {target}#{anchor}"


def test_keys_that_other_trainers_settings_are_mapped_to_exist():
    lines = (ROOT / "docs" / "coming-from.md").read_text().splitlines()
    ours = "\n".join(line.split("|")[1] if line.startswith("|") else line for line in lines)
    named = set(re.findall(rf"`({'|'.join(SECTIONS)})\.(\w+)`", ours))
    known = {(name, field.name) for name, cls in SECTIONS.items() for field in dataclasses.fields(cls)}
    assert named <= known, sorted(named - known)
    assert len(named) > 50, "the first column of each table has our keys"
