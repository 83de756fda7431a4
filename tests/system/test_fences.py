"""Undocumented parts of other libraries: one module imports them, and names the versions it was tested on."""

import ast
import contextlib
import functools
import importlib
import importlib.metadata
import pathlib

import hlat_jax

PACKAGE = pathlib.Path(hlat_jax.__file__).parent
# What begins the names of such parts -> (distribution, the module that may import them).
FENCES = {
    "jax._src": ("jax", "hlat_jax.host.jax_compat"),
    "jax.interpreters": ("jax", "hlat_jax.host.jax_compat"),
    "jax.experimental.pallas": ("jax", "hlat_jax.host.jax_compat"),
    "lm_eval": ("lm_eval", "hlat_jax.evaluate.lm_eval_compat"),
    "orbax": ("orbax-checkpoint", "hlat_jax.store.checkpoint"),
    "tensorboardX": ("tensorboardX", "hlat_jax.store.metrics"),
}


# Attributes of JAX's objects that it does not document.
ATTRIBUTES = {"as_serialized_hlo_module_proto", "compile_and_load", "fun", "get_compile_options"}


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def imported(path):
    """Returns the modules and names that a file imports, those inside functions too."""
    names = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_private_apis_are_imported_by_one_module():
    for prefix, (_, module) in FENCES.items():
        found = {
            ".".join(("hlat_jax", *path.relative_to(PACKAGE).with_suffix("").parts))
            for path in PACKAGE.rglob("*.py")
            for name in imported(path)
            if f"{name}.".startswith(f"{prefix}.")
        }
        assert found == {module}, prefix


def test_one_module_reads_attributes_that_jax_does_not_document():
    found = {
        path.relative_to(PACKAGE).as_posix(): used
        for path in PACKAGE.rglob("*.py")
        if (used := ATTRIBUTES & {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)})
    }
    assert found == {"host/jax_compat.py": ATTRIBUTES - {"fun"}}


def test_the_installed_versions_are_ones_that_were_tested():
    """On failure: run the tests of that module's room under the new version, then add it to the list."""
    for distribution, module in FENCES.values():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            assert importlib.metadata.version(distribution) in importlib.import_module(module).TESTED_VERSIONS
