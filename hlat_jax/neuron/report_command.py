"""`python -m hlat_jax.neuron report --out=FILE`: one archive of what a first hour on a machine has shown, for an issue.

It has what the doctor, the ladder, runs and logs have written, the versions and the environment of this machine, and no
secrets as far as they can be recognized; it lists its files, so that a person can look before it is attached.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import tarfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.host.neuron_env import recorded
from hlat_jax.host.neuron_topology import HERE

# What is taken from a folder, with its subfolders: reports, logs and the small files of run folders. Text and weights
# have other names.
PATTERNS = (
    "doctor*.json", "ladder*.json", "ladder*.sh", "plan*.json", "lint*.json", "programs.json", "environment.json",
    "config.json", "metrics.jsonl", "events.jsonl", "nonfinite.json", "remat.json", "alive.json", "*.log", "*.err",
    "*.out", "compile.sh", "stuck/*.txt", "ladder.jsonl", "log-neuron-cc*.txt", "preflight.json", "results/*.json",
)  # fmt: skip
# Logs of the runtime when a device runs out of memory. Source: AWS Neuron docs, runtime configuration
SYSTEM_LOGS = "/tmp/neuron_mem_table_device_*.log"
COMMANDS = (
    "uname -a", "neuron-ls", "neuron-ls --topology", "neuronx-cc --version", "modinfo neuron", "fi_info -p efa",
    "nproc", "free -g", "df -h", "dpkg-query --show *neuron*", "rpm -qa *neuron*",
)  # fmt: skip
LARGEST_BYTES = 2 * 2**20  # of a file: its end is kept
MOST_FILES = 200
# Ends of names whose values are secrets. More than secrets may match: what is removed in vain can be asked for again.
_SECRET_NAME = (
    r"(?:(?:secret|passw(?:or)?d|passphrase|passcode|credential|authorization|cookie"
    r"|(?:api|access|private|account|signing|encryption|ssh|master|shared)[ _-]?key)[\w.-]*"
    r"|(?<!per[ _-])token(?:[_-]?(?:value|file|\d+))?|pass|pwd|(?<![a-z])auth)"
)
_NOT_SECRET = ("PWD", "OLDPWD")  # folders
# Between a name and its value: `name: `, `"name": `, `name => `, `<name>`, `"name", "` and `"name", "value": "`. Quotes
# are escaped, once or several times, where JSON is in JSON.
_BETWEEN = (
    r"""[\\"']*\s{0,40}(?:,?\s{0,40}[\\"']*value[\\"']*\s{0,40})?(?:[:=]>?|%3[ad]|>|\bis\s|,(?=\s{0,40}\\*["']))"""
    r"""\s{0,40}(?:[|>][+-]?\s*\n\s*)?"""
)
_QUOTE = r"""(?P<quote>\\*["'])?"""
# To the quote that ends what the first one began; the line is removed where none does.
_QUOTED = r"(?:(?!(?<!\\)(?P=quote)(?!\w|(?P=quote)))[^\n])*"
_REST_OF_LINE = r"""[^\n]+?(?=[\\"'}\]),]*$)"""
_WORD = r"""\S+?(?=[\\"'}\]),]*(?:\s|$))"""
_START = r"(?:(?<![A-Za-z])|(?<=\\[nrt]))"  # of a word, also after an escaped end of line
# Each match is replaced, up to its first group if it has one.
_SECRETS = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|\Z)",
        r"(?s)\A.*-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----",  # of a file whose beginning was cut
        r"(://)(?:[^\s/]{1,500}|[^\s/:@]{0,500}:\S{1,500})(?=@)",
        r"(?i)([?&](?:x-amz-[\w-]+|signature|sig|token|awsaccesskeyid)=)[^\s&\"']+",
        rf"(?i)({_SECRET_NAME}{_BETWEEN}{_QUOTE})(?(quote){_QUOTED}|{_REST_OF_LINE})",
        rf"(?i)((?:(?<![\w-])--?(?=\w)[\w-]{{0,40}}?|(?<=[_-])){_SECRET_NAME}\s+(?!--){_QUOTE})(?(quote){_QUOTED}|{_WORD})",
        rf"""(?i)((?<![\w-])(?:-u|--(?:proxy-)?user)[\\"',\s=]{{0,9}})(?=[^\n]*:){_WORD}(?:[^\n"']*(?=["']))?""",
        r"(?i)(\blogin\s+\S+\s+password\s+|(?:mysql|sshpass)[^\n]{0,200}?\s-p\s?|hooks\.slack\.com/services/)\S+",
        r"([\w.-]{1,80}:)[^\s@:/\"']+(?=@(?!sha)[\w-])",  # user:password@host of a proxy
        r"(?<![\w/+])(?=\S{0,39}[A-Z])(?=\S{0,39}[a-z])(?=\S{0,39}\d)[A-Za-z0-9/+]{40}(?![\w/+=])",  # AWS's, bare
        r"(?i)(bearer\s+)[\w.~+/=-]{8,}",
        r"(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{16}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+",
        rf"{_START}(?:hf_|gh[pousr]_|github_pat_|npm_|glpat-|sk-|xox[abp]-)[\w-]{{16,}}",
    )
)
# Numbers of AWS accounts. Each is then removed wherever it occurs; other numbers of 12 digits, such as bytes, stay.
_ACCOUNT = re.compile(
    r"(?i)\barn:[\w-]+:[\w-]*:[\w-]*:(?P<arn>\d{12})|(?P<host>\d{12})(?=\.(?:dkr|signin|[\w.-]{0,60}amazonaws))"
    r"|(?:account|owner)[^\d\n]{0,20}(?P<named>\d{4}-?\d{4}-?\d{4})(?!\d)|amazonaws\.com/(?P<path>\d{12})"
    r"""|["'](?P<text>\d{12})\\?["']|[a-z\d]-(?P<bucket>\d{12})(?![\d.])"""
)
REMOVED = "[removed]"
_SHORTEST = 6  # characters of a secret of the environment


def main(argv: Sequence[str]) -> int:
    """Writes the archive and lists it; returns 0."""
    usage = "Usage: python -m hlat_jax.neuron report --out=FILE.tar.gz [--paths=FOLDER,FILE]\n"
    values = flags_lib.parse_own(argv, _define, usage=usage)
    if not values.out:
        raise ValueError("--out=FILE is missing; name the archive, such as --out=report.tar.gz.")
    flags_lib.check_output("--out", values.out)
    roots = [pathlib.Path(word) for word in values.paths.split(",") if word]
    for root in roots:
        if not root.exists():
            raise ValueError(f"--paths={values.paths}: there is no {root}; name files and folders, by commas.")
    secrets = secret_values(os.environ)
    found = _taken(roots, pathlib.Path(values.out))
    taken = dict(list(found.items())[:MOST_FILES])
    files = {name: cleaned(text, secrets=secrets) for name, text in _members(taken)}
    write_archive(pathlib.Path(values.out), files)
    for name, text in files.items():
        print(f"{len(text.encode()):>10,}  {name}")
    for wanted, command in (("doctor", "doctor --json=doctor.json"), ("ladder", "ladder --json=ladder.json")):
        if not any(pathlib.Path(name).match(f"{wanted}*.json") for name in files):
            print(f"without {wanted}*.json: python -m hlat_jax.neuron {command} --config=NAME writes one")
    if left_out := len(found) - len(taken):
        print(f"{left_out} files of {len(found)} left out: a report has {MOST_FILES}; name fewer folders in --paths")
    removed = sum(text.count(REMOVED) for text in files.values())
    print(f"{values.out}: {len(files)} files, {removed} values removed as secrets. Look at them before you attach it.")
    return 0


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """Returns the values of variables whose names are those of secrets, to be removed wherever they occur.

    Each line of a value is one too, and each is there as it is, as JSON writes it, as JSON in JSON does, and in a URL.
    """
    found = set()
    for name, value in environ.items():
        if re.search(f"{_SECRET_NAME}$", name, re.IGNORECASE) and name not in _NOT_SECRET:
            found |= {form for line in (value, *value.splitlines()) for form in _spellings(line)}
    return sorted((text for text in found if len(text) >= _SHORTEST), key=len, reverse=True)


def _spellings(text: str) -> Iterator[str]:
    yield from (text, text.strip(), urllib.parse.quote(text), urllib.parse.quote(text, safe=""), repr(text)[1:-1])
    for ascii_only in (True, False):
        once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        yield from (once, json.dumps(once, ensure_ascii=ascii_only)[1:-1])


def cleaned(text: str, *, secrets: Sequence[str]) -> str:
    """Returns the text without `secrets` and without what looks like one: keys, tokens, passwords, signed URLs."""
    for secret in secrets:
        text = text.replace(secret, REMOVED)
    for account in {found[found.lastgroup] for found in _ACCOUNT.finditer(text)}:
        text = text.replace(account, REMOVED)
    for pattern in _SECRETS:
        text = pattern.sub(lambda found: (found[1] if found.re.groups else "") + REMOVED, text)
    return text


def write_archive(path: pathlib.Path, files: Mapping[str, str]) -> None:
    """Writes files as FILE.tar.gz, without names of users and machines."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            content = text.encode()
            member = tarfile.TarInfo(f"report/{name}")
            member.size, member.mtime = len(content), int(time.time())
            archive.addfile(member, io.BytesIO(content))


def _taken(roots: Sequence[pathlib.Path], out: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns name in the archive -> file, each file once; with several roots each has its number in the name."""
    found: dict[pathlib.Path, str] = {}
    for number, root in enumerate(roots, 1):
        for path in sorted([root] if root.is_file() else _matching(root)):
            inside = pathlib.Path() if path == root else path.relative_to(root)
            prefix = f"{number}-{root.resolve().name}" if len(roots) > 1 else root.name if path == root else ""
            if path.resolve() != out.resolve():
                found.setdefault(path.resolve(), str(pathlib.Path(prefix, inside)))
    return {name: path for path, name in found.items()}


def _members(taken: Mapping[str, pathlib.Path]) -> Iterator[tuple[str, str]]:
    """Yields (name in the archive, text) of everything that goes into it."""
    yield "versions.json", json.dumps(_versions(), indent=1) + "\n"
    yield "environment.json", json.dumps(recorded(os.environ), indent=1) + "\n"
    for command in COMMANDS:
        if (printed := _printed(command.split())) is not None:
            yield f"commands/{re.sub(r'[^A-Za-z0-9]+', '_', command).strip('_')}.txt", printed
    for name, path in taken.items():
        yield f"files/{name}", _end_of(path)
    for path in sorted(pathlib.Path("/").glob(SYSTEM_LOGS.lstrip("/"))):
        yield f"logs/{path.name}", _end_of(path)


def _matching(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files of a folder and its subfolders that PATTERNS name; no links, hidden folders or checkpoints."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("checkpoints", "data")]
        for name in names:
            path = pathlib.Path(place, name)
            if any(path.match(pattern) for pattern in PATTERNS) and not path.is_symlink() and path.is_file():
                yield path


def _end_of(path: pathlib.Path) -> str:
    """Returns the text of a file, of a larger one its last LARGEST_BYTES from the next line on."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LARGEST_BYTES))
            content = file.read(LARGEST_BYTES)
    except OSError as error:
        return f"not readable: {error.strerror}\n"
    if size > LARGEST_BYTES:
        content = f"[the last {LARGEST_BYTES:,} of {size:,} bytes]\n".encode() + content.partition(b"\n")[2]
    return content.decode(errors="replace")


def _versions() -> dict[str, object]:
    packages = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions() if one.metadata["Name"]}
    instance = HERE.product_name.read_text().strip() if HERE.product_name.is_file() else ""
    release = pathlib.Path("/etc/os-release")
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "os": release.read_text().splitlines()[:2] if release.is_file() else [platform.system()],
        "instance": instance,
        "devices": len(list(HERE.devices.glob("neuron[0-9]*"))),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def _printed(words: Sequence[str]) -> str | None:
    """Returns what a command prints; None where it is not installed."""
    path = shutil.which(words[0]) or shutil.which(words[0], path="/opt/aws/neuron/bin:/opt/amazon/efa/bin:/sbin")
    if path is None:
        return None
    try:
        done = subprocess.run([path, *words[1:]], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}\n"
    return done.stdout + done.stderr + (f"[exit code {done.returncode}]\n" if done.returncode else "")


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("out", "", "The archive to write, FILE.tar.gz.", flag_values=values)
    flags.DEFINE_string(
        "paths", ".", "Files, and folders to take reports, logs and run folders from, by commas.", flag_values=values
    )
