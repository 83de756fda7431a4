"""The grammar of sources and stages, and the shares that the choice of rows gives."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat_jax.cli import config_files
from hlat_jax.data.mixture import Mixture, first_stages, parse_sources, parse_stages
from hlat_jax.resolve import resolve


def source_of_full_rows(mixture, row, batch):
    """The source of a row of a batch where all rows are full, so that nothing is owed before."""
    nothing = [0] * len(mixture.names)
    return mixture.choose(row, batch=batch, row_tokens=1, emitted=nothing, owed=nothing).source


def mixture_of(weights, *, batch_tokens=100):
    names = [item.split("=")[0] for item in weights.split(";")[0].split()[0].split(",")]
    return Mixture(names, stages=parse_stages(weights, names=names, batch_tokens=batch_tokens))


def chosen(mixture, *, rows, batches):
    return np.asarray([[source_of_full_rows(mixture, row, batch) for row in rows] for batch in batches])


def test_sources_are_paths_or_names_with_paths():
    assert parse_sources("a.jsonl, b/*.parquet", key="k") == {"all": "a.jsonl, b/*.parquet"}
    assert parse_sources("", key="k") == {"all": ""}
    assert parse_sources("web=a,b ; code=/c/lang=en;", key="k") == {"web": "a,b", "code": "/c/lang=en"}
    assert parse_sources("/data/lang=en/*.jsonl", key="k") == {"all": "/data/lang=en/*.jsonl"}
    assert parse_sources("./lang=en/a;b.txt", key="k") == {"all": "./lang=en/a;b.txt"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("web=a;b.jsonl", "'b.jsonl' has no name; several sources are NAME=PATHS;NAME=PATHS"),
        ("web=a;web=b", "names 'web' twice"),
        ("web=a;all=b", "'all' means all sources together"),
        ("web=a;code= ", "source 'code' has no paths"),
    ],
)
def test_malformed_sources_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
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


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("", "data.mixture is empty, but data.train has 2 sources; set it, for example to web=1,code=1"),
        (";", "holds no weights"),
        (" ; ;", "holds no weights"),
        ("web=1,cod=1", "no source 'cod'. Did you mean 'code'?"),
        ("web=1", "no weight for code; write code=0 to leave it out"),
        ("web=1,code=-1", "the weight -1 of 'code' is negative"),
        ("web=1,code=much", "the weight 'much' of 'code' is not a number"),
        ("web=1,code=nan", "the weight 'nan' of 'code' is not a number"),
        ("web=1,code=1,web=2", "'web' has two weights"),
        ("web=0,code=0", "all weights are 0"),
        ("web 1", "'web 1' is not NAME=WEIGHT"),
        ("web=1,code=1 until_step=5", "is the last stage and must not have"),
        ("web=1,code=1;web=1,code=2", "is not the last stage and must have"),
        ("web=1,code=1 until_step=0;web=1,code=2", "'0' is not a positive integer"),
        ("web=1,code=1 until_step=x;web=1,code=2", "'x' is not a positive integer"),
        ("web=1,code=1 until_step=2.5;web=1,code=2", "'2.5' is not a positive integer"),
        (
            "web=1,code=1 until_step=5;web=1,code=2 until_tokens=500;web=1,code=1",
            "ends with step 5, but must end after",
        ),
        ("web=1,code=1 until_stop=5;web=1,code=2", "is not a number"),
    ],
)
def test_invalid_mixture_specs_are_refused(weights, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        parse_stages(weights, names=["web", "code"], batch_tokens=100)
    assert message in str(caught.value)
    assert "data.mixture" in str(caught.value)


@settings(max_examples=40, deadline=None)
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
    found = chosen(mixture, rows=range(64), batches=range(1000))
    expected = np.asarray([0.5, 0.3, 0.2])
    for axis, tolerance in ((0, 0.02), (1, 0.06)):  # a stream has 1000 rows, a batch 64
        shares = np.stack([(found == source).mean(axis=axis) for source in range(3)], axis=-1)
        np.testing.assert_allclose(shares, np.broadcast_to(expected, shares.shape), atol=tolerance)


def test_a_stage_changes_the_shares_from_its_step_on_and_nothing_before():
    before, staged = mixture_of("a=1,b=1"), mixture_of("a=1,b=1 until_step=50;a=0,b=1 until_step=60;a=1,b=0")
    found = chosen(staged, rows=range(8), batches=range(100))
    np.testing.assert_array_equal(found[:50], chosen(before, rows=range(8), batches=range(50)))
    assert (found[50:60] == 1).all()
    assert (found[60:] == 0).all()


def test_choices_match_golden_values():
    """The golden choice: were it to change, running jobs would lose or repeat text at an upgrade."""
    found = chosen(mixture_of("a=1,b=1,c=2"), rows=range(6), batches=(0, 1, 2, 123456789))
    assert found.tolist() == [
        [0, 2, 2, 1, 0, 2],
        [2, 1, 0, 2, 2, 1],
        [0, 2, 2, 1, 0, 2],
        [2, 1, 0, 2, 2, 1],
    ]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(20, 100)), min_size=2, max_size=5), st.integers(0, 99))
def test_token_debt_of_a_row_is_bounded_and_zero_for_full_rows(sources, row):
    """Sources of weights 1 to 9 whose rows hold 20 to 100 of 100 tokens."""
    weights, sizes = zip(*sources, strict=True)
    mixture = mixture_of(",".join(f"s{number}={weight}" for number, weight in enumerate(weights)))
    for tokens_of in (sizes, [100] * len(sizes)):
        emitted, owed = [0] * len(sizes), [0] * len(sizes)
        for batch in range(600):
            choice = mixture.choose(row, batch=batch, row_tokens=100, emitted=emitted, owed=owed)
            if tokens_of is not sizes:
                assert (choice.source, owed) == (source_of_full_rows(mixture, row, batch), [0] * len(sizes))
            emitted, owed = choice.account_after(tokens_of[choice.source])
            assert sum(owed) == 0
            assert max(map(abs, owed)) <= 200 * len(sizes)
        # in tokens: what is owed, at most two rows per source, and what the sequence selects, at most one
        expected = np.asarray(weights) / sum(weights) * sum(emitted)
        np.testing.assert_allclose(emitted, expected, atol=300 * len(sizes))


def test_until_tokens_counts_emitted_tokens_when_rows_have_padding():
    spec = "a=1,b=1 until_tokens=1_000;a=0,b=1"
    stages = parse_stages(spec, names=["a", "b"], batch_tokens=100, has_padding=True)
    assert [(stage.until_step, stage.until_tokens) for stage in stages] == [(10, 1000), (None, None)]
    mixture = Mixture(["a", "b"], stages=stages, num_rows=2)
    assert "until 1,000 tokens; then" in mixture.describe()
    for emitted, expected in (([249, 249], 0), ([250, 250], 1), ([300, 250], 1)):  # of one row of two
        choice = mixture.choose(0, batch=15, row_tokens=50, emitted=emitted, owed=[200, -200])
        assert choice.source == expected
    # what may come later does not count, what may have come does, with its tokens
    later = parse_stages(spec.replace("1_000", "2_000"), names=["a", "b"], batch_tokens=100, has_padding=True)
    assert first_stages(stages, num_batches=10) == first_stages(later, num_batches=10) == [(10, ["1/2", "1/2"])]
    assert first_stages(stages, num_batches=11) == [(10, ["1/2", "1/2", "1000 tokens"]), (11, ["0", "1"])]


def test_mixture_of_a_source_without_a_name_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"no source 'a'\. It has one source without a name: name them"):
        parse_stages("a=1,b=1", names=["all"], batch_tokens=100)


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
