"""Runs notebooks and writes what they show into them: after a change of one, or of what it shows.

    pip install '.[notebooks]'
    python tools/run_notebooks.py notebooks/01_train_a_tiny_model.ipynb   # or all, where none is named

They run one after another in a folder of their own, so that no path of this machine gets into them.
"""

import argparse
import os
import pathlib
import re
import socket
import sys
import tempfile
from collections.abc import Mapping

import nbclient
import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
TIMEOUT_S = 1800  # of one cell, on a busy machine
OURS = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # plots below their cells, whatever a user has set
    "TF_CPP_MIN_LOG_LEVEL": "3",  # on a busy machine XLA warns of slow compilation
}


def executed(
    path: pathlib.Path, folder: pathlib.Path, *, env: Mapping[str, str], then: str = ""
) -> nbformat.NotebookNode:
    """Returns a notebook with what its cells show when they run, one after another, in `folder`.

    Args:
      path: of the notebook; it is not written to.
      folder: where it runs.
      env: variables of its process; PYTHONPATH becomes this checkout, also where another copy is installed.
      then: code to run after its cells, in a cell of its own; empty: none.
    """
    notebook = nbformat.read(path, as_version=4)
    if then:
        notebook.cells.append(nbformat.v4.new_code_cell(then))
    # no folder of kernels is searched: what is left is ipykernel's own, of this very interpreter
    specs = KernelSpecManager(kernel_dirs=[])
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, kernel, timeout=TIMEOUT_S, resources=resources)
    here = {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / ".ipython")}
    client.execute(cleanup_kc=True, env={**env, **OURS, **here})
    return notebook


def check(notebook: nbformat.NotebookNode, folder: pathlib.Path) -> None:
    """Raises SystemExit where what a notebook shows names this machine, its user or a folder, or is a warning."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = "\n".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)
    for word in (str(ROOT), str(folder), str(pathlib.Path.home()), socket.gethostname()):
        if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", shown):
            sys.exit(f"error: a cell shows {word!r}, which describes this machine; print less.")
    for output in outputs:
        if output.get("name") == "stderr":
            sys.exit(f"error: a cell writes to stderr: {output.text}")


def main() -> None:
    """Runs the notebooks that are named, or all, in one folder, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=pathlib.Path)
    named = parser.parse_args().notebooks
    paths = [path.resolve() for path in named] or sorted(FOLDER.glob("*.ipynb"))
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            notebook = executed(path, pathlib.Path(folder), env=os.environ)
            check(notebook, pathlib.Path(folder))
            notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)  # when it ran
            nbformat.write(notebook, path)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
