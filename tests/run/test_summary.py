"""What a run prints of itself before its first step."""

import jax
from planned import small_config

from hlat_jax.parallel.sharding import make_layout
from hlat_jax.program import make_program
from hlat_jax.run import summary

MUON = """
optimizer        AdamW  embed [64, 32]
                 AdamW  final_norm.scale [32]
                 AdamW  head [64, 32]
                 Muon   layers.attention.kv [4, 32, 2, 4, 8]
                 Muon   layers.attention.out [4, 8, 8, 32]
                 Muon   layers.attention.q [4, 32, 4, 2, 8]
                 AdamW  layers.attention_norm.scale [4, 32]
                 Muon   layers.mlp.down [4, 64, 32]
                 Muon   layers.mlp.gate_up [4, 32, 2, 64]
                 AdamW  layers.mlp_norm.scale [4, 32]
"""


def described(capsys, **changes):
    config = small_config(data=1, **changes)
    summary.describe(make_program(config, make_layout(config.parallel, jax.devices()[:1])))
    return capsys.readouterr().out


def test_muon_prints_which_rule_updates_which_parameter(capsys):
    assert MUON in described(capsys, optimizer="muon")
    assert "optimizer  " not in described(capsys)


def test_constant_schedule_prints_no_horizon(capsys):
    assert "500,000" in described(capsys)
    assert "500,000" not in described(capsys, schedule="constant")
