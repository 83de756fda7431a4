"""What a run says after its last step is true of what it leaves."""

import math

from metric_rows import row

from hlat_jax.cli import config_files
from hlat_jax.resolve import resolve
from hlat_jax.run import summary
from hlat_jax.store.metrics import ROWS_FILE, json_line


def test_loss_curve_is_named_only_where_one_was_drawn(tmp_path, capsys):
    config = resolve(config_files.load("tiny"))
    for loss, drawn in ((math.nan, False), (4.0, True)):  # nothing to draw of a loss that is not finite
        (tmp_path / ROWS_FILE).write_text(json_line(row(1, loss=loss)))
        summary.finish(config, tmp_path, 1)
        assert (tmp_path / "loss.png").exists() == drawn
        assert (f"loss curve: {tmp_path / 'loss.png'}" in capsys.readouterr().out) == drawn
