"""How many nodes a run can use: `plan nodes`, and the counts that `plan` names where it refuses one."""

import micro
import pytest
from refusals import assert_names

from hlat_jax.plan import __main__ as plan_command

FOLLOWS = "--config.train.num_microbatches=-1"


@pytest.fixture
def plan(monkeypatch, capsys):
    return micro.command_runner(plan_command.main, monkeypatch, capsys)


@pytest.mark.parametrize(("name", "there", "used"), [("7b", 64, 64), ("7b", 63, 63), ("7b", 60, 60), ("70b", 255, 248)])
def test_a_recipe_uses_the_nodes_that_are_left(plan, name, there, used):
    code, printed, _ = plan("nodes", f"--config={name}", FOLLOWS, f"--nodes={there}", "--instance=trn1.32xlarge")
    assert (code, printed) == (0, f"{used}\n")


def test_a_range_without_a_number_that_passes_is_refused_with_some(plan):
    code, printed, said = plan("nodes", "--config=70b", FOLLOWS, "--nodes=255", "--min_nodes=249")
    assert (code, printed) == (2, "")
    [line] = said.splitlines()
    assert_names(line, "--nodes=255", "--min_nodes=249", "a multiple of 256 devices", "248 nodes and 256 nodes pass")
    code, _, said = plan("nodes", "--config=7b", "--nodes=63", "--min_nodes=64")
    assert code == 2
    assert_names(said, "--min_nodes=64 is more than --nodes=63")


@pytest.mark.parametrize("nodes", [48, 63])
def test_a_plan_that_is_refused_names_the_nearest_numbers_of_nodes(plan, nodes):
    code, _, said = plan("--config=7b", f"--nodes={nodes}")
    assert code == 2
    assert_names(said, "train.num_microbatches=-1, which pads", "32 nodes and 64 nodes pass")


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [63, 60])
def test_7b_fits_on_numbers_of_nodes_that_divide_nothing(plan, nodes):
    code, printed, said = plan("--config=7b", f"--nodes={nodes}", FOLLOWS)
    assert code == 0, said
    assert_names(printed, f"data {4 * nodes}", f"{20 * nodes - 1024} of {20 * nodes:,} sequences are zeros", "fits")
