"""The package's shape: who may import whom, what importing costs, and how functions take arguments."""

import ast
import functools
import graphlib
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from data_files import write_built

from hlat_jax.cli.path_checks import fetch_first
from hlat_jax.data.formats.paths import asset_path
from hlat_jax.data.kept_tokenizer import keep_tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hlat_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# The one module that is about a library which brings torch or its relatives along; nothing imports it at its top.
ADAPTERS = ("evaluate.harness", "evaluate.lm_eval_compat", "evaluate.model_type")

# Products that read as an einsum: the equation, its operands, the context.
PRODUCTS = ("column_parallel", "row_parallel")

# Functions whose arguments are for others to say: Optax, a command line, files, the evaluation harness.
OF_OTHERS = ("update", "parse", "seek", "create_from_arg_string", "create_from_arg_obj")
OF_OTHERS += ("chat_template", "apply_chat_template")

# From the ground up, as docs/design.md has them: its table is the only list. A room is a folder, or a single module of
# the spine; data/ is four rooms. A module imports rooms of lower floors, and modules of its own room.
_PAGE = (ROOT / "docs" / "design.md").read_text()
_ROWS = _PAGE.partition("| floor | contents |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
FLOORS = [re.findall(r"`([\w.]+)`", row.split("|")[1]) for row in _ROWS]
LEAVES = ("hf", "evaluate", "plan", "neuron")
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The one module that imports leaves: lazily, each under the config key that asks for it.
OPTIONAL = "run.optional"


# `a.b` of hlat_jax/a/b.py; "" of the package itself
_NAMES = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in FILES]
MODULES = {name.removesuffix("__init__").removesuffix("."): path for name, path in zip(_NAMES, FILES, strict=True)}


@functools.cache
def nodes_of(path: pathlib.Path) -> list[ast.AST]:
    """Returns all nodes of the syntax tree of a file."""
    return list(ast.walk(ast.parse(path.read_text())))


def imported(path: pathlib.Path) -> set[str]:
    """Returns the modules and names that a file imports, those inside functions too."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_of(path: pathlib.Path) -> set[str]:
    """Returns the modules of this package that a file imports: anywhere, for types only, and by name in a string."""
    texts = {node.value for node in nodes_of(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found = imported(path) | texts & {f"hlat_jax.{name}" for name in MODULES}  # by name, as import_module takes it
    names = {name.removeprefix("hlat_jax.") for name in found if name.startswith("hlat_jax.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names} - {""}


GRAPH = {name: imports_of(path) - {name} for name, path in MODULES.items()}


def room(module: str) -> str:
    first_two = ".".join(module.split(".")[:2])
    return first_two if first_two in FLOOR_OF else module.split(".")[0]


def reached_from(module: str) -> set[str]:
    """Returns the modules that importing one may import, now or when a function runs; not those of `OPTIONAL`."""
    found, waiting = set(), [module]
    while waiting:
        for imported in GRAPH[waiting.pop()] - found:
            found.add(imported)
            waiting += [imported] if imported != OPTIONAL else []
    return found


def test_modules_import_lower_floors_or_their_own_room_and_every_room_is_on_a_floor():
    assert {room(module) for module in MODULES if module} == set(FLOOR_OF)
    for module in set(MODULES) - {""}:
        for imported in GRAPH[module]:
            is_inside = room(imported) == room(module)
            is_asked_for = module == OPTIONAL and room(imported) in LEAVES
            is_below = FLOOR_OF[room(imported)] < FLOOR_OF[room(module)]
            assert is_inside or is_asked_for or is_below, f"{module} imports {imported}"


def test_every_folder_of_modules_is_a_package_of_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in FILES}
    assert folders <= set(settings["packages"])


def test_no_circular_imports():
    graphlib.TopologicalSorter(GRAPH).prepare()  # raises an error that has the cycle


def test_optional_module_imports_leaves_only_inside_functions():
    tree = ast.parse(MODULES[OPTIONAL].read_text())
    at_top = [ast.unparse(node) for node in tree.body if isinstance(node, ast.ImportFrom | ast.Import)]
    assert not [line for line in at_top for leaf in LEAVES if f"hlat_jax.{leaf}" in line]


def test_loop_imports_no_leaf_and_no_data_build():
    found = reached_from("loop")
    assert not [module for module in found if room(module) in LEAVES or module.startswith("data.build")]


def functions() -> list[tuple[str, ast.FunctionDef]]:
    return [(m, node) for m, path in MODULES.items() for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]


def test_public_functions_have_few_positional_parameters():
    for module, node in functions():
        if node.name.startswith("_") or node.name in OF_OTHERS:
            continue
        positional = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
        with_default = positional[len(positional) - len(node.args.defaults) :] if node.args.defaults else []
        assert len(positional) <= 3 or node.name in ("step", "save", *PRODUCTS), f"{module}: {node.name}{positional}"
        assert set(with_default) <= {"positions_BT", "learning_rate", "fn"}, (
            f"{module}: {node.name}: {with_default} must be keyword-only"
        )


def test_only_the_model_imports_nnx_and_only_to_declare():
    allowed = {"Module", "Param", "Rngs", "split", "merge", "to_pure_dict", "replace_by_pure_dict"}
    of_callers = {"Pytree", "Variable", "State", "split", "merge", "state", "update"}  # modules that passes are given
    for module, path in MODULES.items():
        nodes = nodes_of(path)
        uses_nnx = any(isinstance(node, ast.ImportFrom) and node.module == "flax" for node in nodes)
        assert uses_nnx == (module == "model"), module
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nnx":
                names = of_callers if module == "passes.module_state" else allowed
                assert node.attr in names, f"{module}: {node.attr}"


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


BEFORE_JAX = """
config facts.hardware facts.sdk_releases resolve train weights.init_model cli.flags host.process host.neuron_env
host.neuron_topology neuron.env_command neuron.doctor_command neuron.lint_command neuron.ladder_command
"""


def test_modules_used_before_environment_setup_do_not_import_jax():
    assert "jax" not in loaded_after("import " + ", ".join(f"hlat_jax.{module}" for module in BEFORE_JAX.split()))


def errors_without_jax(asked, *, cwd):
    """Returns the error of each command, in one line, after a check that none of them has imported JAX."""
    code = """
import importlib, sys
for area, *words in (line.split() for line in sys.stdin):
    module = importlib.import_module(f"hlat_jax.{area}" if area == "train" else f"hlat_jax.{area}.__main__")
    try:
        module.main(words)
    except ValueError as error:
        print(*str(error).split())
    assert "jax" not in sys.modules, (area, words)
"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, input="\n".join(asked), capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_wrong_path_is_answered_before_jax_is_imported(tmp_path):
    (tmp_path / "config.json").touch()  # of a Hugging Face folder
    run = tmp_path / "runs" / "tiny"  # of the same name, with a tokenizer and a checkpoint of its own
    (run / "checkpoints" / "2").mkdir(parents=True)
    (run / "config.json").write_text('{"data": {"tokenizer": "package:austen_2k.model"}, "train": {"init_from": ""}}')
    keep_tokenizer(asset_path("austen_2k.model"), run)
    asked = {
        "train --config=tiny --config.data.train=/no/a.txt,/no/b": "data.train: /no/a.txt does not exist",
        "train --config=tiny --config.data.train=a=/no/*.txt": "data.train: /no/*.txt matches no file",
        "train --config=tiny --config.data.tokenizer=/no.model": "data.tokenizer=/no.model is not a file",
        "train --config=tiny --config.model.vocab_size=9": "data.tokenizer=package:austen_2k.model has 2048 tokens",
        "train --config=tiny --config.train.branch_from=/no@3": "train.branch_from: /no holds no weights (no such",
        "train --config=tiny --config.train.init_from=/no": "train.init_from: /no holds no weights (no such folder",
        "plan --config=tiny --config.train.init_from=/no": "train.init_from: /no holds no weights (no such folder",
        "generate --checkpoint=/no --prompt=a": "/no holds no weights (no such folder, working directory",
        "generate --prompt=a": "--checkpoint=FOLDER is missing",
        "evaluate --checkpoint=/no --tasks=a": "/no holds no weights",
        "train --config=tiny --config.train.eval_tasks=a --config.train.eval_tasks_folder=/no": (
            "train.eval_tasks_folder=/no is not a folder"
        ),
        f"generate --checkpoint={tmp_path} --prompt=a --tokenizer=/no.model": "--tokenizer=/no.model is not a file",
        f"hf export {tmp_path} --out=x --tokenizer=/no.model": "--tokenizer=/no.model is not a file",
        "evaluate --checkpoint=/no --tasks=a --tasks_folder=/no": "--tasks_folder=/no is not a folder",
        "evaluate --checkpoint=/no --text=/no/a.txt": "--text=/no/a.txt is not a file",
        "evaluate --checkpoint=/no --data=/no/a.txt": "--data: /no/a.txt does not exist",
        "hf export /no --out=x": "/no holds no weights",
        "hf import /no --out=x": "/no has no config.json",
        "hf average /no /no --out=x": "/no holds no weights",
        "data stats --config=tiny --config.data.train=/no": "data.train: /no does not exist",
        "data peek --config=tiny --step=1 --config.data.train=/no": "data.train: /no does not exist",
    }
    for answer, message in zip(errors_without_jax(asked, cwd=tmp_path), asked.values(), strict=True):
        assert answer.startswith(message)


def test_a_mistake_that_needs_no_device_is_answered_before_jax(trained_run, tmp_path):
    texts, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    texts.write_text('{"body": "It is a truth"}\n' * 9)
    other.write_text('{"text": "It is a truth"}\n' * 9)
    (tmp_path / "taken" / "file").mkdir(parents=True)
    part = {"number": 2, "of": 2, "inputs": "0", "text_field": "text"}
    write_built(tmp_path / "parts" / "part-00002-of-00002", ["a", "b"], part=part)
    tiny, resumed = "train --config=tiny", f"train --config={trained_run.parent}/micro.py --workdir={trained_run}"
    asked = {
        f"{tiny} --config.data.train=a=a.jsonl;b=b.jsonl": "data.mixture is empty, but data.train has 2 sources",
        f"{tiny} --config.data.train=a=a.jsonl;b=b.jsonl --config.data.mixture=a=1,c=1": "'c=1' is not NAME=WEIGHT",
        f"{tiny} --config.data.train=a.jsonl": "a.jsonl, row 1: no key 'text' among its keys ('body')",
        f"{tiny} --config.data.text_field=body": "austen_train.jsonl, row 1: no key 'body'",
        "data stats --config=tiny --config.data.train=a.jsonl": "a.jsonl, row 1: no key 'text'",
        f"{tiny} --config.train.branch_from={trained_run}@7": f"{trained_run} has no checkpoint of step 7. It has",
        f"{resumed} --config.optimizer.peak_lr=0.5": "optimizer.peak_lr: 0.01 in the checkpoint, 0.5 now",
        f"hf export {trained_run} --out=taken": "--out=taken exists already",
        f"hf average {trained_run} {trained_run} --out=taken": "--out=taken exists already",
        "hf import none --out=taken": "--out=taken exists already",
        f"{tiny} --config.data.train=parts --config.data.on_bad_record=skip": "part 1 of 2 is missing, beside",
        "data build b.jsonl --out=parts --part=3/2": "--part=3/2 must be I/N",
        "data build b.jsonl --out=taken": "--out=taken is a file or is not empty",
        "hf import org/Name-3.2-1B --out=new": "run `hf download org/Name-3.2-1B --local-dir Name-3.2-1B` first",
        "train --init_from=org/name": "run `hf download org/name --local-dir name` first",
        "generate --checkpoint=org/name --prompt=a": "run `hf download org/name --local-dir name` first",
        f"{tiny} --config.data.tokenizer=org/name": "run `hf download org/name --local-dir name` first",
        f"{tiny} --config.data.train=org/name": "run `hf download org/name --repo-type dataset --local-dir name` first",
    }
    for answer, message in zip(errors_without_jax(asked, cwd=tmp_path), asked.values(), strict=True):
        assert message in answer


def test_a_path_of_a_run_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("runs/tiny", "models/tiny", "/org/name", "org/name/more", "texts/a.jsonl", "name", "~/name"):
        assert fetch_first(path) == "", path


def test_no_module_imports_torch_or_similar():
    loaded = loaded_after("import " + ", ".join(f"hlat_jax.{module}" for module in set(MODULES) - {"", *ADAPTERS}))
    assert not loaded & {"lm_eval", "torch", "transformers", "tensorflow", "wandb", "datasets"}


def test_importing_the_model_imports_no_trainer_config_or_data_library():
    loaded = loaded_after("import hlat_jax.model")
    assert not loaded & {"ml_collections", "grain", "sentencepiece", "tensorboardX", "matplotlib"}


# The lines of ours that an import loads: module -> most. A count along the graph above follows imports for types and
# inside functions, which cost nothing, and stops at `OPTIONAL`, whose own imports do cost.
REACH = {"model": 3500, "step": 4900, "loop": 17800}


@pytest.mark.parametrize("module", REACH)
def test_an_import_loads_few_lines_of_the_package(module):
    code = f"import sys, hlat_jax.{module}; print(*(name for name in sys.modules if name.startswith('hlat_jax.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    names = {name.removeprefix("hlat_jax.") for name in done.stdout.split()}
    lines = {name: len(MODULES[name].read_text().splitlines()) for name in names & set(MODULES)}
    assert sum(lines.values()) <= REACH[module], (sum(lines.values()), lines)


def test_configs_are_never_read_with_get_defaults():
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                owner = ast.unparse(node.func.value)
                assert "config" not in owner, f"{path.name}: {ast.unparse(node)}"
