"""The loss as a picture: what is drawn where, and, in a notebook, while it is trained."""

import math
import sys
import threading
import types

import pytest
from metric_rows import eval_row, row

from hlat_jax.store import loss_curve
from hlat_jax.store.loss_curve import live, plot_loss
from hlat_jax.store.metrics import json_line


def write(path, rows):
    path.write_text("".join(map(json_line, rows)))


def test_plot_is_drawn_and_empty_metrics_are_not_an_error(tmp_path):
    png, path = tmp_path / "loss.png", tmp_path / "metrics.jsonl"
    path.write_text("")
    assert not plot_loss(path, png, title="t")
    assert not png.exists()
    write(path, [row(s, loss=math.nan if s == 2 else 4.0) for s in range(1, 5)])
    assert plot_loss(path, png, title="t")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_curves_are_plotted_over_tokens_without_non_finite_points(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [eval_row(0), row(1, loss=4.0), row(2, loss=math.nan), row(3, loss=3.0), eval_row(3)])
    assert loss_curve._curves(path) == ([(100, 4.0), (300, 3.0)], [(0, 4.5), (300, 4.5)])


def test_smoothing_keeps_a_constant_and_follows_a_step():
    assert loss_curve.smooth([2.0] * 100) == pytest.approx([2.0] * 100)
    stepped = loss_curve.smooth([5.0] * 200 + [1.0] * 200)
    assert stepped[190] == pytest.approx(5.0)
    assert stepped[-1] == pytest.approx(1.0)
    assert stepped[200] == pytest.approx(3.0, abs=0.2)  # no lag
    assert loss_curve.smooth([9.0, 4.0, 3.0])[0] == 9.0


@pytest.fixture
def screen(monkeypatch):
    """What IPython would show, in order: whether a picture has curves; its `drawn` is set at every update."""
    shown = types.SimpleNamespace(curves=[], drawn=threading.Event())
    handle = types.SimpleNamespace(update=lambda image: (shown.curves.append(image), shown.drawn.set()))

    def display(image, display_id):
        assert display_id
        shown.curves.append(image)
        return handle

    fake = types.SimpleNamespace(Image=lambda png, width: png, display=display)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=fake))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setattr(loss_curve, "_png", lambda path, _: loss_curve._curves(path) if path.exists() else ([], []))
    return shown


def test_live_curve_updates_with_new_rows_and_ends_with_all_of_them(tmp_path, screen):
    path = tmp_path / "run" / "metrics.jsonl"
    with live(tmp_path / "run", title="t", every_s=0.01):
        assert screen.curves == [([], [])]
        path.parent.mkdir()
        write(path, [row(1, loss=4.0)])
        while ([(100, 4.0)], []) not in screen.curves:  # it may also have seen the file while it was written
            assert screen.drawn.wait(600)
            screen.drawn.clear()
        write(path, [row(1, loss=4.0), row(2, loss=3.0)])
    assert ([(100, 4.0)], []) in screen.curves
    assert screen.curves[-1] == ([(100, 4.0), (200, 3.0)], [])
    assert not [thread for thread in threading.enumerate() if thread.name == "loss-curve"]
