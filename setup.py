"""Adds to the wheel the one file that pyproject.toml cannot name; `hlat_jax.eval.plugin` says what it is for."""

import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py

PROGRAM = '{"lm_eval", "lm-eval"} & {word.rpartition("/")[2] for word in sys.orig_argv[:3]}'
LINE = f'import sys; {PROGRAM} and __import__("hlat_jax.eval.plugin", fromlist=["register"]).register()\n'


class BuildWithPlugin(build_py):
    """Lays `hlat_jax_lm_eval.pth` beside the packages, from where Python reads it as it starts."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            (pathlib.Path(self.build_lib) / "hlat_jax_lm_eval.pth").write_text(LINE)


setup(cmdclass={"build_py": BuildWithPlugin})
