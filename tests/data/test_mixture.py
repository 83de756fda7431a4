"""The grammar of sources and stages, and the shares that the choice of rows gives."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat_jax.cli import config_files
from hlat_jax.data.mixture import Mixture, first_stages, parse_sources, parse_stages
from hlat_jax.resolve import resolve


def mixture_of(weights, *, row_tokens=1):
    names = [item.split("=")[0] for item in weights.split(";")[0].split()[0].split(",")]
    return Mixture(
        names, stages=parse_stages(weights, names=names, batch_tokens=100), num_rows=1, row_tokens=row_tokens
    )


def chosen(mixture, *, rows, batches):
    """The source of each row of each batch, where all rows are full, so that nothing is owed before."""
    nothing = {"emitted": [0] * len(mixture.names), "owed": [0] * len(mixture.names)}
    return np.asarray([[mixture.choose(row, batch=batch, **nothing) for row in rows] for batch in batches])


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
        with pytest.raises(ValueError, match=f"data.train='{spec}': several sources are NAME=PATHS;NAME=PATHS"):
            parse_sources(spec, key="data.train")


def test_stages_hold_normalised_weights_until_their_step_or_tokens():
    stages = parse_stages(
        "a=3,b=1 until_step=10; b=0.1, a=0.2 until_tokens=1_501;a=0,b=2", names=["a", "b"], batch_tokens=100
    )
    assert [stage.until_step for stage in stages] == [10, 16, None]  # the batch that reaches the tokens is the last
    assert [stage.shares for stage in stages] == [
        (Fraction(3, 4), Fraction(1, 4)),
        (Fraction(2, 3), Fraction(1, 3)),
        (Fraction(0), Fraction(1)),
    ]
    [stage] = parse_stages("", names=["all"], batch_tokens=100)
    assert stage.shares == (1,)
    assert parse_stages("a=1 until_tokens=1.4e12;a=1", names=["a"], batch_tokens=1 << 22)[0].until_step == 333787


def test_invalid_mixture_specs_are_refused():
    for weights, message in (
        ("", "data.mixture is empty, but data.train has 2 sources; set it, as to web=1,code=1"),
        ("web=1,cod=1", "'cod=1' is not NAME=WEIGHT of a source in data.train. Did you mean 'code'?"),
        ("web 1", "'web 1' is not NAME=WEIGHT"),
        ("web=1", "no weight for code; write code=0 to leave it out"),
        *((f"web=1,code={bad}", f"'code={bad}' must be the one weight of its source") for bad in ("-1", "much", "nan")),
        ("web=1,code=1,web=2", "'web=2' must be the one weight of its source"),
        ("web=0,code=0", "all weights are 0"),
        ("web=1,code=1 until_step=5", "each stage but the last must have"),
        *((f"web=1,code=1 until_step={n};web=1,code=2", f"'{n}' is not a positive integer") for n in ("0", "x", "2.5")),
        (
            "web=1,code=1 until_step=5;web=1,code=2 until_tokens=500;web=1,code=1",
            "ends with step 5, but must end after",
        ),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
            parse_stages(weights, names=["web", "code"], batch_tokens=100)
        assert message in str(caught.value)
        assert "data.mixture" in str(caught.value)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=2, max_size=6).filter(any), st.integers(1, 16), st.integers(0, 10**9))
def test_shares_are_within_one_percent_after_a_few_thousand_rows_from_any_batch_on(weights, num_rows, first):
    names = [f"s{number}" for number in range(len(weights))]
    mixture = mixture_of(",".join(f"{name}={weight}" for name, weight in zip(names, weights, strict=True)))
    found = chosen(mixture, rows=range(num_rows), batches=range(first, first + -(-4000 // num_rows)))
    shares = np.bincount(found.ravel(), minlength=len(weights)) / found.size
    np.testing.assert_allclose(shares, np.asarray(weights) / sum(weights), atol=0.01)
    assert not set(found.ravel().tolist()) & {number for number, weight in enumerate(weights) if weight == 0}


def test_shares_hold_per_stream_and_per_batch():
    mixture = mixture_of("a=5,b=3,c=2")
    found = chosen(mixture, rows=range(64), batches=range(300))
    expected = np.asarray([0.5, 0.3, 0.2])
    for axis, tolerance in ((0, 0.03), (1, 0.06)):  # a stream has 300 rows, a batch 64
        shares = np.stack([(found == source).mean(axis=axis) for source in range(3)], axis=-1)
        np.testing.assert_allclose(shares, np.broadcast_to(expected, shares.shape), atol=tolerance)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(20, 100)), min_size=2, max_size=5), st.integers(0, 99))
def test_token_debt_of_a_row_is_bounded_and_zero_for_full_rows(sources, row):
    """Sources of weights 1 to 9 whose rows hold 20 to 100 of 100 tokens."""
    weights, sizes = zip(*sources, strict=True)
    spec = ",".join(f"s{number}={weight}" for number, weight in enumerate(weights))
    mixture = mixture_of(spec, row_tokens=100)
    for tokens_of in (sizes, [100] * len(sizes)):
        emitted, owed = [0] * len(sizes), [0] * len(sizes)
        for batch in range(600):
            if tokens_of is not sizes:
                assert owed == [0] * len(sizes)
            account = {"batch": batch, "emitted": emitted, "owed": owed}
            source = mixture.choose(row, **account)
            emitted, owed = mixture.account_after(row, **account, num_tokens=tokens_of[source])
            assert sum(owed) == 0
            assert max(map(abs, owed)) <= 200 * len(sizes)
        # in tokens: what is owed, at most two rows per source, and what the sequence selects, at most one
        expected = np.asarray(weights) / sum(weights) * sum(emitted)
        np.testing.assert_allclose(emitted, expected, atol=300 * len(sizes))


def test_until_tokens_counts_emitted_tokens_when_rows_have_padding():
    spec = "a=1,b=1 until_tokens=1_000;a=0,b=1"
    stages = parse_stages(spec, names=["a", "b"], batch_tokens=100, has_padding=True)
    assert [(stage.until_step, stage.until_tokens) for stage in stages] == [(10, 1000), (None, None)]
    mixture = Mixture(["a", "b"], stages=stages, num_rows=2, row_tokens=50)
    assert "until 1,000 tokens; then" in mixture.describe()
    for emitted, expected in (([249, 249], 0), ([250, 250], 1), ([300, 250], 1)):  # of one row of two
        assert mixture.choose(0, batch=15, emitted=emitted, owed=[200, -200]) == expected
    # what may come later does not count, what may have come does, with its tokens
    later = parse_stages(spec.replace("1_000", "2_000"), names=["a", "b"], batch_tokens=100, has_padding=True)
    assert first_stages(stages, num_batches=10) == first_stages(later, num_batches=10) == [(10, ["1/2", "1/2"])]
    assert first_stages(stages, num_batches=11) == [(10, ["1/2", "1/2", "1000 tokens"]), (11, ["0", "1"])]


def test_70b_changes_at_1400_billion_tokens_to_the_shares_of_hlats_table_iii():
    data = resolve(config_files.load("70b")).data
    sources = parse_sources(data.train, key="data.train")
    batch_tokens = data.batch_size * data.seq_len
    before, after = parse_stages(data.mixture, names=list(sources), batch_tokens=batch_tokens)
    assert (before.until_step - 1) * batch_tokens < 1.4e12 <= before.until_step * batch_tokens
    shares = {name: float(share) for name, share in zip(sources, after.shares, strict=True)}
    groups = {
        35.47: ("wikipedia", "c4"),
        41.27: ("stackexchange", "arxiv", "open_web_math", "pes2o"),
        23.26: ("github",),
    }
    for percent, names in groups.items():
        assert 100 * sum(shares.pop(name) for name in names) == pytest.approx(percent, abs=0.006)
    assert set(shares.values()) == {0.0}
    first = dict(zip(sources, before.shares, strict=True))
    assert first["open_web_math"] == first["pes2o"] == 0
    assert float(first["common_crawl"]) == pytest.approx(878 / 1210)
