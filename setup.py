"""Adds to the wheel the one file that pyproject.toml cannot name; `hlat_jax.evaluate.plugin` says what it is for."""

import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py

NAMED = 'any("lm_eval" in word or "lm-eval" in word for word in sys.orig_argv)'
LINE = f'import sys; {NAMED} and __import__("hlat_jax.evaluate.plugin", fromlist=["install"]).install()\n'


class BuildWithPlugin(build_py):
    """Lays `hlat_jax_lm_eval.pth` beside the packages, from where Python reads it as it starts."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            (pathlib.Path(self.build_lib) / "hlat_jax_lm_eval.pth").write_text(LINE)


setup(cmdclass={"build_py": BuildWithPlugin})
