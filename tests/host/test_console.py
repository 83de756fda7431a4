"""Labelled lines."""

from hlat_jax.host.console import labelled


def test_texts_of_all_lines_stand_in_one_column():
    assert labelled("state", "1 GiB\nof 2") == "state            1 GiB\n                 of 2"
    assert labelled("train.branch_from", "ignored") == "train.branch_from ignored"
