"""The nearest name to one that does not exist."""

from hlat_jax.facts.names import nearest


def test_a_name_with_the_word_as_a_part_is_near():
    keys = ["warmup_steps", "min_lr_ratio", "muon_lr_ratio", "peak_lr"]
    assert nearest("lr", keys) == "Did you mean 'peak_lr'?"
    assert nearest("warmup", keys) == "Did you mean 'warmup_steps'?"
    assert nearest("peek_lr", keys) == "Did you mean 'peak_lr'?"


def test_all_names_are_listed_if_none_is_near():
    assert nearest("zzz", filter(None, ["b", "", "a"])) == "Known: a, b."
