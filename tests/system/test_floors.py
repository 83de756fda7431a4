"""The package's shape: who may import whom, what importing costs, and how functions take arguments."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hlat_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# The one module that is about a library which brings torch or its relatives along; nothing imports it at its top.
ADAPTERS = ("hlat_jax.evaluate.harness", "hlat_jax.evaluate.lm_eval_compat", "hlat_jax.evaluate.model_type")

# Functions whose arguments are for others to say: Optax, a command line, the evaluation harness.
OF_OTHERS = ("update", "parse", "create_from_arg_string", "create_from_arg_obj")

# A module of a package may have a layer of its own. A module imports from its own layer or a lower one.
LAYERS = {
    "config": 0,
    "config_checks": 0,
    "batch": 0,
    "cost": 0,
    "sizes": 0,
    "durable": 0,
    "jax_compat": 0,
    "distributed": 1,
    "integrity": 1,
    "sharding": 1,
    "degrees": 1,
    "collectives": 1,
    "buckets": 1,
    "spread": 1,
    "overlap": 1,
    "zero": 1,
    "pipeline": 1,
    "precision": 1,
    "stack": 1,
    "ops": 1,
    "passes": 1,
    "ops.__main__": 4,
    "ops.tune": 4,
    "neuron": 1,
    "neuron.__main__": 4,
    "neuron.doctor": 4,
    "neuron.doctor_command": 4,
    "neuron.env_command": 4,
    "neuron.lint_command": 4,
    "neuron.programs": 4,
    "neuron.programs_command": 4,
    "neuron.changes": 4,
    "neuron.hlo": 4,
    "neuron.hlo_command": 4,
    "neuron.short_training": 4,
    "model": 2,
    "planner.collectives": 1,
    "planner.liveness": 1,
    "planner.traffic": 1,
    "planner.trace": 1,
    "choices": 2,
    "program": 3,
    "program_options": 3,
    "report": 3,
    "optimizer": 3,
    "step": 3,
    "drift": 3,
    "checkpoint": 3,
    "weights": 3,
    "weights_folder": 3,
    "starting_weights": 3,
    "safetensors_file": 1,
    "huggingface": 4,
    "hf": 4,
    "averaging": 4,
    "metrics": 3,
    "loss_curve": 3,
    "data": 3,
    "data.__main__": 4,
    "data.peek": 4,
    "assets": 3,
    "flags": 4,
    "machine": 4,
    "process": 0,
    "plan": 4,
    "planner": 4,
    "agreement": 4,
    "budget": 4,
    "settings": 4,
    "summary": 4,
    "decoding": 3,
    "generator": 4,
    "scoring": 4,
    "inference": 4,
    "generate": 4,
    "evaluate": 4,
    "compilation": 4,
    "eval": 4,
    "loop": 4,
    "train": 4,
}


def layer_of(module: str) -> int:
    """Returns the layer of `hlat_jax.a.b`: that of `a.b` when it has one of its own, else that of `a`."""
    path = module.partition(".")[2]
    return LAYERS.get(path, LAYERS[path.split(".")[0]]) if path else 0


def imports_of(path: pathlib.Path) -> list[str]:
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hlat_jax"):
            if node.module.count("."):
                modules.append(node.module)
            else:
                modules += [f"hlat_jax.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names if alias.name.startswith("hlat_jax")]
    return modules


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_import_only_from_their_own_layer_or_below(path):
    module = ".".join(("hlat_jax", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for imported in imports_of(path):
        if imported != "hlat_jax.__version__":
            assert layer_of(imported) <= layer_of(module), f"{module} imports {imported}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_functions_take_few_arguments(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            arguments = [a for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
            assert len(arguments) + len(node.args.kwonlyargs) <= 6, node.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_options_of_public_functions_are_keyword_only_and_subjects_are_few(path):
    public = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    for node in public:
        if node.name.startswith("_") or node.name in OF_OTHERS:
            continue
        positional = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
        with_default = positional[len(positional) - len(node.args.defaults) :] if node.args.defaults else []
        assert len(positional) <= 3 or node.name in ("step",), f"{node.name}{positional}"
        assert set(with_default) <= {"positions_BT"}, f"{node.name}: {with_default} must be keyword-only"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_model_imports_nnx_and_only_to_declare(path):
    text = path.read_text()
    uses_nnx = any(isinstance(n, ast.ImportFrom) and n.module == "flax" for n in ast.walk(ast.parse(text)))
    assert uses_nnx == (path.name == "model.py")
    allowed = {"Module", "Param", "Rngs", "split", "merge", "to_pure_dict", "replace_by_pure_dict"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nnx":
            assert node.attr in allowed


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["config", "flags", "cost", "train", "neuron.env", "neuron.env_command", "neuron.doctor_command"]
)
def test_what_runs_before_the_environment_is_set_does_not_import_jax(module):
    assert "jax" not in loaded_after(f"import hlat_jax.{module}")


def test_no_module_imports_torch_or_its_relatives():
    modules = [
        ".".join(("hlat_jax", *p.relative_to(PACKAGE).with_suffix("").parts)) for p in FILES if p.stem != "__init__"
    ]
    loaded = loaded_after("import " + ", ".join(name for name in modules if name not in ADAPTERS))
    assert not loaded & {"lm_eval", "torch", "transformers", "tensorflow", "wandb", "datasets"}


def test_importing_the_model_brings_no_trainer_config_system_or_data_library():
    loaded = loaded_after("import hlat_jax.model")
    assert not loaded & {"ml_collections", "grain", "sentencepiece", "tensorboardX", "matplotlib"}


def test_no_config_is_read_with_a_default_that_could_hide_a_missing_key():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                owner = ast.unparse(node.func.value)
                assert "config" not in owner, f"{path.name}: {ast.unparse(node)}"
