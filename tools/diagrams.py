"""Draws the diagrams of the pages into docs/images: mesh-70b, pipeline, batch, checkpoint.

    python tools/diagrams.py

The degrees are read from configs/70b.py, the rows of the batch are packed by data/packing.py, and the ticks follow the
formulas of parallel/pipeline.py. Run the script again if one of them changes.
"""

from __future__ import annotations

import pathlib

from matplotlib import figure as figures
from matplotlib import patches, rcParams

from hlat_jax.cli.config_files import load
from hlat_jax.data.packing import best_fit

IMAGES = pathlib.Path(__file__).resolve().parent.parent / "docs/images"
BLUE, LIGHT, ORANGE, GREY, INK = "#2b6cb0", "#bcd4ee", "#e8a866", "#e6e9ec", "#1f2933"
DOCUMENTS = ("#bcd4ee", "#f6d5b0", "#cfe8cf", "#e3d3ee", "#f3c6c6", "#e4e2b0", "#c3e3e3")
rcParams |= {"font.family": "DejaVu Sans", "font.size": 8, "text.color": INK}


def canvas(width: float, height: float, *, title: str):
    """Returns an empty figure of this size in inches, and its axes with one unit for an inch."""
    figure = figures.Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    axes.text(0.15, height - 0.25, title, fontsize=11, fontweight="bold", va="center")
    return figure, axes


def box(axes, x: float, y: float, width: float, height: float, text: str = "", *, fill: str = GREY, **font) -> None:
    """Draws a rectangle with its lower left corner at (x, y), and a text in its middle."""
    axes.add_patch(patches.Rectangle((x, y), width, height, facecolor=fill, edgecolor="white", linewidth=0.8))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", **font)


def arrow(axes, begin: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=begin, arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1})


def mesh_70b(num_nodes: int = 256, num_cores: int = 32):
    """Returns the mesh of 70b on trn1.32xlarge nodes: a row for each stage, a column for each replica, and one node."""
    config = load("70b")
    tensor, pipe, kv_heads = config.parallel.tensor, config.parallel.pipe, config.model.num_kv_heads
    assert tensor == num_cores  # one node is one group of tensor parallelism
    replicas = num_nodes // pipe
    figure, axes = canvas(9, 4.3, title=f"70b on {num_nodes} nodes: pipe {pipe} x data {replicas} x tensor {tensor}")
    left, top, side, shown = 1.0, 3.3, 0.235, (2, 5)
    low = top - (pipe - 1) * side
    for stage in range(pipe):
        y = top - stage * side
        axes.text(left - 0.1, y + side / 2, f"stage {stage}", ha="right", va="center")
        for replica in range(replicas):
            fill = ORANGE if (stage, replica) == shown else BLUE if replica == shown[1] else LIGHT
            box(axes, left + replica * side, y, side, side, fill=fill)
    right = left + replicas * side
    arrow(axes, (right + 0.12, top + side), (right + 0.12, low))
    axes.text(left, top + side + 0.12, f"data: {replicas} replicas. A square is a node.")
    axes.text(right, top + side + 0.12, f"pipe: {config.model.num_layers // pipe} layers a stage", ha="right")
    axes.text(left + 17 * side, low - 0.18, "A blue column is one whole model.", color=BLUE)
    size, y_node = 0.235, 0.45
    for core in range(num_cores):
        x, y = left + core % 16 * size, y_node + (1 - core // 16) * size
        box(axes, x, y, size, size, str(core), fill=ORANGE if core % kv_heads == 0 else LIGHT, fontsize=6)
    x, y = left + shown[1] * side, top - shown[0] * side
    for begin, end in ((x, left), (x + side, left + 16 * size)):  # from the square to the node in large
        axes.plot([begin, end], [y, y_node + 2 * size], color=ORANGE, linewidth=0.8)
    axes.text(left - 0.1, y_node + size, "a node", ha="right", va="center")
    axes.text(left, y_node - 0.2, f"tensor: {num_cores} cores split heads, MLP and vocabulary.")
    copies = f"{kv_heads} KV heads on {tensor} cores give {tensor // kv_heads} copies.\nOrange cores hold KV head 0."
    axes.text(left + 16 * size + 0.2, y_node + size, copies, va="center")
    return figure


def pipeline(stages: int = 4, num_microbatches: int = 6):
    """Returns the timeline of a step: the microbatch that each stage computes, forward (1 unit) and backward (2)."""
    warm, steady = stages - 1, num_microbatches
    figure, axes = canvas(9, 3.3, title=f"A step with {stages} stages and {num_microbatches} microbatches")
    left, top, height = 0.8, 2.4, 0.4
    unit = 8.05 / (3 * (warm + steady))
    phases = (("only forward", warm, 1), ("forward and backward", steady, 3), ("only backward", warm, 2))
    x, tick = left, 0
    low = top - warm * height - 0.1
    for name, num_ticks, units in phases:
        axes.plot([x + 0.02, x + num_ticks * units * unit - 0.04], [low, low], color=INK, linewidth=1)
        axes.text(x + num_ticks * units * unit / 2, low - 0.16, f"{name}: {num_ticks} ticks", ha="center", va="center")
        for _ in range(num_ticks):
            for stage in range(stages):
                y = top - stage * height
                if units != 2:
                    _work(axes, x, y, unit, height, "F", tick - stage, num_microbatches)
                if units != 1:
                    begin = x + (units - 2) * unit
                    _work(axes, begin, y, 2 * unit, height, "B", tick - 2 * warm + stage, num_microbatches)
            x, tick = x + units * unit, tick + 1
    for stage in range(stages):
        axes.text(left - 0.1, top - stage * height + height / 2, f"stage {stage}", ha="right", va="center")
    text = (
        f"Grey: a result that nothing uses. The bubble is (p - 1) / (m + p - 1) = {warm}/{warm + steady} of the step."
    )
    axes.text(left, 0.3, text)
    return figure


def _work(axes, x: float, y: float, width: float, height: float, label: str, index: int, num_microbatches: int) -> None:
    if 0 <= index < num_microbatches:
        fill, color = (LIGHT, INK) if label == "F" else (BLUE, "white")
        box(axes, x, y, width, height, f"{label}{index}", fill=fill, color=color, fontsize=7)
    else:
        box(axes, x, y, width, height)


def batch(seq_len: int = 256, lengths: tuple[int, ...] = (150, 90, 330, 60, 200, 45, 120), num_rows: int = 4):
    """Returns the path of a batch: the documents of one of its rows, cut at T and packed for several steps."""
    figure, axes = canvas(9, 3.4, title="The path of a batch (data.packing=documents)")
    inch, height, top, x_steps, x_batch = 2.1 / seq_len, 0.26, 2.4, 3.35, 6.25
    titles = {0.15: "documents of row 0", x_steps: f"row 0, T = {seq_len} tokens", x_batch: "batch of step 0, [B, T]"}
    for x, text in titles.items():
        axes.text(x, top + 0.4, text, fontsize=8.5)
    for index, length in enumerate(lengths):
        y = top - 0.3 * index
        axes.text(0.15, y + height / 2, f"document {index}", va="center")
        box(axes, 0.95, y, length * inch * 0.6, height, fill=DOCUMENTS[index])
    cuts = [(index, min(seq_len, n - start)) for index, n in enumerate(lengths) for start in range(0, n, seq_len)]
    rows = [[cuts[cut] for cut in row] for row in best_fit([length for _, length in cuts], capacity=seq_len)]
    for step, row in enumerate(rows):
        y = top - 0.42 * step
        axes.text(x_steps - 0.1, y + height / 2, f"step {step}", ha="right", va="center")
        _packed(axes, x_steps, y, row, seq_len, inch, height)
    for row in range(num_rows):
        y = top - 0.42 * row
        if row == 0:
            _packed(axes, x_batch, y, rows[0], seq_len, inch * 0.7, height)
        else:
            box(axes, x_batch, y, 1.47, height, f"row {row}: documents of row {row}", fill=GREY, fontsize=6.5)
    for replica in range(num_rows // 2):
        y = top - 0.84 * replica
        axes.plot([x_batch + 1.57] * 2, [y - 0.42, y + height], color=INK, linewidth=1)
        axes.text(x_batch + 1.67, y - 0.08, f"replica {replica}\n(data, fsdp)", va="center")
    for begin, end, y in ((2.68, x_steps - 0.5, 0.55), (x_steps + 2.15, x_batch - 0.05, -height / 2)):
        arrow(axes, (begin, top - y), (end, top - y))
    text = (
        "A document longer than T is cut. No token attends to another document (color). Light grey at the end: padding."
    )
    axes.text(0.15, 0.2, text)
    return figure


def _packed(axes, x: float, y: float, row: list[tuple[int, int]], seq_len: int, inch: float, height: float) -> None:
    """Draws a packed row of (document, length), and its padding."""
    end = x + seq_len * inch
    for index, length in row:
        box(axes, x, y, length * inch, height, str(index), fill=DOCUMENTS[index], fontsize=7)
        x += length * inch
    box(axes, x, y, end - x, height, fill=GREY)


def checkpoint():
    """Returns the parts of a checkpoint and what reads each."""
    figure, axes = canvas(9, 3.5, title="RUN/checkpoints/STEP")
    parts = (
        ("state/", "params: fp32 masters", BLUE, "white"),
        ("state/", "opt_state: first and second moments", LIGHT, INK),
        ("state/", "step", LIGHT, INK),
        ("run/", "data position of each row, config, norms, shapes", "#f6d5b0", INK),
        ("integrity.json", "size and checksum of each file, written last", "#cfe8cf", INK),
    )
    readers = (
        ("generate, evaluate, hf export, --init_from", (0,)),
        ("train: resume on any mesh, the same bits", (0, 1, 2, 3)),
        ("every reader, before it reads", (4,)),
    )
    top, height, gap, left, width = 2.5, 0.38, 0.08, 1.3, 3.5
    for index, (name, text, fill, color) in enumerate(parts):
        y = top - index * (height + gap)
        if index == 0 or parts[index - 1][0] != name:
            axes.text(left - 0.1, y + height / 2, name, ha="right", va="center")
        box(axes, left, y, width, height, text, fill=fill, color=color)
    for index, (text, read) in enumerate(readers):
        y = top - 0.05 - 0.92 * index
        axes.text(6.1, y + height / 2, text, va="center", fontsize=8.5)
        for part in read:
            arrow(axes, (left + width + 0.05, top - part * (height + gap) + height / 2), (6.05, y + height / 2))
    axes.text(left, 0.22, "Each process writes its own shards. A folder without integrity.json is not a checkpoint.")
    return figure


if __name__ == "__main__":
    drawn = {"mesh-70b": mesh_70b(), "pipeline": pipeline(), "batch": batch(), "checkpoint": checkpoint()}
    for name, figure in drawn.items():
        figure.savefig(IMAGES / f"{name}.png", dpi=130, metadata={"Software": None})
