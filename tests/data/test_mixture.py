"""The grammar of sources and stages, and the shares that the choice of rows gives."""

import pytest
from refusals import refused

from hlat_jax.cli import config_files
from hlat_jax.data.mixture import Mixture, first_stages, parse_sources, parse_stages
from hlat_jax.resolve import resolve


def test_sources_are_paths_or_names_with_paths():
    for spec, expected in (
        ("a.jsonl, b/*.parquet", {"all": "a.jsonl, b/*.parquet"}),
        ("", {"all": ""}),
        ("web=a,b ; code=/c/lang=en;", {"web": "a,b", "code": "/c/lang=en"}),
        ("/data/lang=en/*.jsonl", {"all": "/data/lang=en/*.jsonl"}),
        ("./lang=en/a;b.txt", {"all": "./lang=en/a;b.txt"}),
    ):
        assert parse_sources(spec, key="k") == expected
    for spec in ("web=a;b.jsonl", "web=a;web=b", "web=a;all=b", "web=a;code= "):
        with refused(f"data.train='{spec}'", "NAME=PATHS;NAME=PATHS"):
            parse_sources(spec, key="data.train")


def test_stages_hold_normalised_weights_until_their_step_or_tokens():
    spec = "a=3,b=1 until_step=10; b=0.1, a=0.2 until_tokens=1_501;a=0,b=2"
    stages = parse_stages(spec, names=["a", "b"], batch_tokens=100)
    assert [stage.until_step for stage in stages] == [10, 16, None]  # the batch that reaches the tokens is the last
    shares = [tuple(map(str, stage.shares)) for stage in stages]
    assert shares == [("3/4", "1/4"), ("2/3", "1/3"), ("0", "1")]
    [stage] = parse_stages("", names=["all"], batch_tokens=100)
    assert stage.shares == (1,)
    assert parse_stages("a=1 until_tokens=1.4e12;a=1", names=["a"], batch_tokens=1 << 22)[0].until_step == 333787


def test_invalid_mixture_specs_are_refused():
    for weights, *facts in (
        ("", "data.train", "2 sources", "web=1,code=1"),
        ("web=1,cod=1", "'cod=1'", "data.train", "'code'"),
        ("web 1", "'web 1'"),
        ("web=1", "code=0"),
        *((f"web=1,code={bad}", f"'code={bad}'") for bad in ("-1", "much", "nan")),
        ("web=1,code=1,web=2", "'web=2'"),
        ("web=0,code=0", "0"),
        ("web=1,code=1 until_step=5", "until_step"),
        *((f"web=1,code=1 until_step={n};web=1,code=2", f"'{n}'") for n in ("0", "x", "2.5")),
        ("web=1,code=1 until_step=5;" * 2 + "web=1,code=1", "step 5"),
    ):
        with refused("data.mixture", *facts):
            parse_stages(weights, names=["web", "code"], batch_tokens=100)


def test_until_tokens_counts_emitted_tokens_despite_padding():
    spec = "a=1,b=1 until_tokens=1_000;a=0,b=1"
    stages = parse_stages(spec, names=["a", "b"], batch_tokens=100, has_padding=True)
    assert [(stage.until_step, stage.until_tokens) for stage in stages] == [(10, 1000), (None, None)]
    mixture = Mixture(["a", "b"], stages=stages, num_rows=2, row_tokens=50)
    assert "1,000 tokens" in mixture.describe()
    for emitted, expected in (([249, 249], 0), ([250, 250], 1), ([300, 250], 1)):  # of one row of two
        assert mixture.choose(0, batch=15, emitted=emitted, owed=[200, -200]) == expected
    # what may come later does not count, what may have come does, with its tokens
    later = parse_stages(spec.replace("1_000", "2_000"), names=["a", "b"], batch_tokens=100, has_padding=True)
    assert first_stages(stages, num_batches=10) == first_stages(later, num_batches=10) == [(10, ["1/2", "1/2"])]
    assert first_stages(stages, num_batches=11) == [(10, ["1/2", "1/2", "1000 tokens"]), (11, ["0", "1"])]


def test_70b_changes_to_the_shares_of_hlats_table_iii():
    data = resolve(config_files.load("70b")).data
    sources = parse_sources(data.train, key="data.train")
    batch_tokens = data.batch_size * data.seq_len
    before, after = parse_stages(data.mixture, names=list(sources), batch_tokens=batch_tokens)
    assert (before.until_step - 1) * batch_tokens < 1.4e12 <= before.until_step * batch_tokens
    shares = {name: float(share) for name, share in zip(sources, after.shares, strict=True)}
    groups = {35.47: ("wikipedia", "c4"), 23.26: ("github",)}
    groups |= {41.27: ("stackexchange", "arxiv", "open_web_math", "pes2o")}
    for percent, names in groups.items():
        assert 100 * sum(shares.pop(name) for name in names) == pytest.approx(percent, abs=0.006)
    assert set(shares.values()) == {0.0}
    first = dict(zip(sources, before.shares, strict=True))
    assert first["open_web_math"] == first["pes2o"] == 0
    assert float(first["common_crawl"]) == pytest.approx(878 / 1210)
