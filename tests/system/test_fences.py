"""Undocumented parts of other libraries: one module imports them, and names the versions it was tested on."""

import ast
import contextlib
import importlib
import importlib.metadata

from test_floors import MODULES, imported, nodes_of

# What begins the names of such parts -> (distribution, the module that may import them).
FENCES = {
    "jax._src": ("jax", "host.jax_compat"),
    "jax.interpreters": ("jax", "host.jax_compat"),
    "jax.experimental.pallas": ("jax", "host.jax_compat"),
    "lm_eval": ("lm_eval", "evaluate.lm_eval_compat"),
    "orbax": ("orbax-checkpoint", "store.checkpoint"),
    "tensorboardX": ("tensorboardX", "store.metrics"),
}
# Attributes of JAX's objects that it does not document.
ATTRIBUTES = {"as_serialized_hlo_module_proto", "compile_and_load", "fun", "get_compile_options"}


def test_private_apis_are_imported_by_one_module():
    imports = {name: imported(path) for name, path in MODULES.items()}
    for prefix, (_, module) in FENCES.items():
        found = [name for name, names in imports.items() if any(f"{one}.".startswith(f"{prefix}.") for one in names)]
        assert found == [module], prefix


def test_one_module_reads_attributes_that_jax_does_not_document():
    found = {
        name: used
        for name, path in MODULES.items()
        if (used := ATTRIBUTES & {node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute)})
    }
    assert found == {"host.jax_compat": ATTRIBUTES - {"fun"}}


def test_the_installed_versions_are_ones_that_were_tested():
    """On failure: run the tests of that module's room under the new version, then add it to the list."""
    for distribution, module in FENCES.values():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(distribution)
            assert version in importlib.import_module(f"hlat_jax.{module}").TESTED_VERSIONS
