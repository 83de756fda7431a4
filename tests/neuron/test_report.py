"""The archive for an issue: what it holds, and that no secret gets into it. All secrets here are invented."""

import json
import os
import pathlib
import re
import tarfile
import urllib.parse

import pytest

from hlat_jax.neuron import report_command
from hlat_jax.neuron.__main__ import main

KEY_ID, SECRET = "AKIA" + "Z7EXAMPLE7INVENT", "wJalr/invented+secret/K7MDENGbPxRfiCY"
TOKEN, PASSWORD, JWT = "hf_" + "InventedInventedInvented", "correct-horse", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEinvented\nlines==\n-----END RSA PRIVATE KEY-----"
LOG = f"""\
step 1 loss 10.5, 4096 tokens, num_tokens=8192, max_tokens: 64, tokenizer=a.model, bos_id=1
aws_access_key_id = {KEY_ID}
export AWS_SECRET_ACCESS_KEY="{SECRET}"
HF_TOKEN={TOKEN} WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567
{{"db_password": "{PASSWORD}", "steps": 3}}
Authorization: Bearer abcdef0123456789
curl -H 'X-Other: Bearer {JWT}' s3.example/b?X-Amz-Signature=5d672d79c15b13162d9279b0855cfba6&part=1
git clone https://user:{PASSWORD}@git.example/x
role arn:aws:iam::123456789012:role/nodes, and {KEY_ID} alone
{PEM}
the end 7
"""
LEAKS = [
    KEY_ID, SECRET, TOKEN, PASSWORD, JWT, "0123456789abcdef", "abcdef0123456789", "5d672d79c1", "123456789012", "MIIE",
]  # fmt: skip


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder after a first hour, which is the working directory; the environment has a secret of its own."""
    run = tmp_path / "runs" / "7b"
    files = {
        "doctor-7b.json": json.dumps({"checks": [{"check": "devices", "verdict": "passed"}]}),
        "ladder.json": json.dumps({"rungs": [1, 2]}),
        "hlat-7.log": LOG,
        "runs/ladder/7b/ladder.jsonl": "{}",
        "runs/7b/compile/log-neuron-cc-3.txt": "INFO",
        "preflight/preflight.json": "{}",
        "preflight/results/all.json": "{}",
        "runs/7b/metrics.jsonl": '{"step": 1, "loss": 10.5}\n',
        "runs/7b/environment.json": json.dumps({"NEURON_CC_FLAGS": "--target=trn1"}),
        "runs/7b/checkpoints/1/config.json": "weights",
        "data/train.log": "text",
        ".aws/credentials.log": SECRET,
        "notes.txt": "mine",
        "text.jsonl": "text",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "outside.log").symlink_to("/etc/hostname")
    (run / "stuck").mkdir()
    (run / "stuck" / "stacks.txt").write_text("Thread 1 in no-recognizable-form-1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_SERVICE_TOKEN", "no-recognizable-form-1")
    monkeypatch.setenv("NEURON_RT_LOG_LEVEL", "INFO")
    monkeypatch.setenv("FI_PASSWORD", PASSWORD)
    return tmp_path


def contents(path):
    with tarfile.open(path) as archive:
        return {member.name.removeprefix("report/"): archive.extractfile(member).read().decode() for member in archive}


def test_report_has_what_was_found_and_lists_it(machine, capsys):
    assert main(["report", "--out=r.tar.gz"]) == 0
    found = contents("r.tar.gz")
    taken = {name.removeprefix("files/") for name in found if name.startswith("files/")}
    assert taken == {
        "doctor-7b.json", "ladder.json", "hlat-7.log", "runs/7b/metrics.jsonl", "runs/7b/environment.json",
        "runs/7b/stuck/stacks.txt", "runs/ladder/7b/ladder.jsonl", "runs/7b/compile/log-neuron-cc-3.txt",
        "preflight/preflight.json", "preflight/results/all.json",
    }  # fmt: skip
    assert json.loads(found["environment.json"])["NEURON_RT_LOG_LEVEL"] == "INFO"
    versions = json.loads(found["versions.json"])
    assert versions["packages"]["jax"]
    assert versions["python"]
    assert "Linux" in found["commands/uname_a.txt"]
    assert found["files/runs/7b/metrics.jsonl"] == '{"step": 1, "loss": 10.5}\n'
    listed = capsys.readouterr().out.splitlines()[:-1]
    assert {line.split()[-1] for line in listed} == set(found)


def test_report_has_no_secret_and_what_is_none_stays(machine):
    main(["report", "--out=r.tar.gz"])
    found = contents("r.tar.gz")
    whole = "\n".join(found.values())
    assert [leak for leak in [*LEAKS, "no-recognizable-form-1"] if leak in whole] == []
    first, *_, last = found["files/hlat-7.log"].splitlines()
    assert (first, last) == (LOG.splitlines()[0], "the end 7")
    assert '"steps": 3' in found["files/hlat-7.log"]
    assert "git clone https://[removed]@git.example/x" in found["files/hlat-7.log"]
    assert "part=1" in found["files/hlat-7.log"]
    with tarfile.open("r.tar.gz") as archive:
        assert {(member.uname, member.gname, member.uid) for member in archive} == {("", "", 0)}


LEAKING = [
    ('{"line": "{\\"password\\": \\"@@\\"}", "step": 3}', '"step": 3'),
    ('{"line": "{\\\\\\"password\\\\\\": \\\\\\"@@\\\\\\"}", "step": 3}', '"step": 3'),
    ('"password": "a\\"@@", "step": 3', '"step": 3'),
    ('{"sessionToken": "@@", "step": 3}', '"step": 3'),
    ('"AccessToken":"@@"', ""),
    ("'SessionToken': '@@'", ""),
    ("<SessionToken>@@</SessionToken>", ""),
    ("token=@@", ""),
    ("TOKEN: @@", ""),
    ("python x.py --password @@ --config=7b", "--config=7b"),
    ("python x.py --token @@ --config=7b", "--config=7b"),
    ("python x.py --token '@@ @@' --config=7b", "--config=7b"),
    ('["--api-key", "@@", "--config=7b"]', "--config=7b"),
    ("curl -u user:@@ https://a.example", "https://a.example"),
    ("curl --user 'user:two @@' https://a.example", "https://a.example"),
    ("git clone https://@@@git.example/x", "git.example/x"),
    ("s3://id:a/@@@bucket/x", "bucket/x"),
    ("DB_PASS=@@", ""),
    ("MYSQL_PWD=@@", ""),
    ("passphrase: @@", ""),
    ("passphrase: |\n  @@", ""),
    ("key AIzaSyA-invented_@@ here", "here"),
    ("password = two @@ here", ""),
    ('{"name": "DB_PASSWORD", "value": "@@"}', ""),
    ("machine a.example login me password @@", ""),
    ("the password is @@", ""),
    ("mysql -h db.example -p@@ hlat", "hlat"),
    ("sshpass -p @@ ssh a.example", "ssh a.example"),
    ("aws configure set aws_secret_access_key @@", ""),
    ("next=%2F&token%3D@@", ""),
    ("http_proxy=me:@@@proxy.example:3128", "proxy.example:3128"),
    ("https://hooks.slack.com/services/T0/B0/@@", ""),
    ("keys: ASIA9 @@/K7MDENGbPxRfiCYinventedinven9 x", "x"),
    ("MIIE@@\nlines==\n-----END PRIVATE KEY-----\nend", "end"),
    ('{"line": "first\\nsk-invented-invented-@@"}', "first"),
]


@pytest.mark.parametrize(("text", "stays"), LEAKING)
def test_a_secret_is_removed_however_it_is_written(text, stays):
    secret = "hunter2two"
    found = report_command.cleaned(f"before\n{text.replace('@@', secret)}\nafter\n", secrets=[])
    assert "hunter" not in found
    assert "two" not in found
    assert stays in found
    assert "after" in found


@pytest.mark.parametrize(
    "text",
    [
        "123456789012.dkr.ecr.us-west-2.amazonaws.com/hlat:1",
        "Account: 123456789012",
        '{"AccountId": "123456789012"}',
        "account number is 1234-5678-9012",
        "s3://hlat-123456789012/x",
        '"OwnerId": "123456789012"\nlater 123456789012 alone',
    ],
)
def test_numbers_of_accounts_are_removed_and_other_numbers_stay(text):
    found = report_command.cleaned(f'"bytes": 103079215104,\n{text}\n', secrets=[])
    assert not re.search("1234-?5678-?9012", found)
    assert "103079215104" in found


def test_a_secret_of_the_environment_is_removed_in_every_spelling():
    secret = 'hor"se\\ b\u00e4tt\nstaple/more'
    values = report_command.secret_values({"MY_TOKEN": secret, "PWD": "/home/someone", "LONG_NAME": "a value"})
    once = json.dumps({"at": secret})
    texts = [secret, once, json.dumps(secret, ensure_ascii=False), json.dumps(once), repr(secret), "staple/more"]
    texts += [urllib.parse.quote(secret), urllib.parse.quote(secret, safe="")]
    for text in texts:
        found = report_command.cleaned(f"x {text} y", secrets=values)
        assert not re.search("hor|tt|staple|more", found), text
    assert report_command.cleaned("/home/someone a value", secrets=values) == "/home/someone a value"


def test_what_is_no_secret_stays():
    text = "tokens: 3\nbits_per_token: 2.5\n--data_tokens=7 --tokenizer a.model\ntoken_id: 2\nverdict passed: 9\n"
    text += "repo/hlat:1@sha256:0a\n0123456789abcdef0123456789abcdef01234567 git@git.example:hlat/hlat.git\n"
    text += "/home/ubuntu/hlat_jax/x.py:3\n"
    assert report_command.cleaned(text, secrets=[]) == text


def test_large_file_keeps_its_end_and_the_report_does_not_contain_itself(machine, monkeypatch, capsys):
    monkeypatch.setattr(report_command, "LARGEST_BYTES", 100)
    pathlib.Path("long.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    main(["report", "--out=r.log"])
    main(["report", "--out=r.log"])
    found = contents("r.log")
    assert "files/r.log" not in found
    first, *rest = found["files/long.log"].splitlines()
    assert first == "[the last 100 of 8,890 bytes]"
    assert rest[-1] == "line 999"
    assert 5 < len(rest) < 15
    assert all(line in {f"line {number}" for number in range(980, 1000)} for line in rest)


def test_report_says_what_it_is_without(machine, capsys):
    os.remove("doctor-7b.json")
    main(["report", "--out=r.tar.gz", "--paths=runs,hlat-7.log"])
    said = capsys.readouterr().out
    assert "without doctor*.json: python -m hlat_jax.neuron doctor --json=doctor.json" in said
    assert "without ladder*.json" in said
    assert {"files/2-hlat-7.log", "files/1-runs/7b/metrics.jsonl"} <= set(contents("r.tar.gz"))


def test_files_of_one_name_in_several_folders_are_all_there(machine):
    for place in ("a", "b"):
        pathlib.Path(place, "runs").mkdir(parents=True)
        pathlib.Path(place, "runs", "x.log").write_text(place)
    main(["report", "--out=r.tar.gz", "--paths=a/runs,b/runs,a/runs/x.log"])
    found = contents("r.tar.gz")
    assert (found["files/1-runs/x.log"], found["files/2-runs/x.log"]) == ("a", "b")


def test_report_says_how_many_files_it_leaves_out(machine, monkeypatch, capsys):
    monkeypatch.setattr(report_command, "MOST_FILES", 4)
    main(["report", "--out=r.tar.gz"])
    assert "6 files of 10 left out: a report has 4; name fewer folders in --paths" in capsys.readouterr().out
    assert len([name for name in contents("r.tar.gz") if name.startswith("files/")]) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--out=FILE is missing"),
        (["--out=nowhere/r.tar.gz"], "there is no folder nowhere"),
        (["--out=r.tar.gz", "--paths=a,b"], "there is no a; name files and folders"),
        (["--out=r.tar.gz", "--path=a"], "unknown flag --path. Did you mean '--paths'"),
    ],
)
def test_report_refuses_what_it_cannot_do(machine, words, message):
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        main(["report", *words])
