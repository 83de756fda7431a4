"""Stand-ins for what a start finds on a Trainium machine: installed packages, processes, a compiler's cache."""

import os


def installed(folder, *names):
    """Makes packages look installed for a Python with `folder` on its path; by default those of the plugin."""
    for name in names or ("jax-neuronx", "libneuronxla"):
        info = folder / f"{name.replace('-', '_')}-0.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    return str(folder)


def process(processes, pid, command, *, opened=(), maps=""):
    """Adds a process to a folder like /proc."""
    folder = processes / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
    (folder / "maps").write_text(maps)
    for number, path in enumerate(opened):
        (folder / "fd" / str(number)).symlink_to(path)
    return folder


def mounted(processes, kind):
    """Makes all of the file system one of a kind, for who reads a folder like /proc; returns the folder."""
    (processes / "self").mkdir(parents=True, exist_ok=True)
    (processes / "self" / "mounts").write_text(f"none / {kind} rw 0 0\n")
    return processes


def compiled(cache, name, *files):
    """Adds a program with these files to neuronx-cc's cache; returns its folder."""
    folder = cache / "neuronxcc-2.28.7631.0+ab" / f"MODULE_{name}+cd"
    folder.mkdir(parents=True)
    for file in ("model.hlo_module.pb", *files):
        (folder / file).touch()
    return folder


def breaking_cache(folder, *, when="cached", crash=False):
    """Returns a PYTHONPATH under which a process that imports JAX fails: `always`, or if JAX's cache is in use."""
    folder.mkdir()
    condition = "True" if when == "always" else "os.environ.get('JAX_COMPILATION_CACHE_DIR')"
    last = "os.abort()" if crash else "sys.exit('RET_CHECK failure proto.has_host_program_shape()')"
    (folder / "sitecustomize.py").write_text(
        f"import os, sys\nif sys.argv[0] == '-c' and {condition}:\n"
        f"    print('XlaRuntimeError: RET_CHECK has_host_program_shape', file=sys.stderr, flush=True)\n    {last}\n"
    )
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
