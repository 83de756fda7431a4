"""Log-likelihoods of given tokens after given ones: what multiple choice and rolling perplexity ask of a model.

    score = Scorer(cfg, params, layout=layout, num_rows=8)
    [(log_likelihood, is_greedy)] = score([([2, 17, 5], [9, 11])])

Owns the program and the few static shapes that pairs of token ids are put into. Text and tokenizers are others'.

Shapes: B rows, T places, C chunks of places, D embed, V vocab.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from hlat_jax.config import ModelConfig
from hlat_jax.generate.decoding import Run, serving
from hlat_jax.generate.generator import padded_length, param_shardings
from hlat_jax.model import bind
from hlat_jax.ops.cross_entropy import CHUNK_POSITIONS, logits
from hlat_jax.parallel.collectives import gathered, position
from hlat_jax.parallel.sharding import ROWS, Layout

Pair = tuple[Sequence[int], Sequence[int]]


class Score(NamedTuple):
    """Of a continuation: log of its probability in nats, and whether each of its tokens is a most likely one."""

    log_likelihood: float
    is_greedy: bool


class Asked(NamedTuple):
    """What the program takes after the parameters, all [B, T].

    Attributes:
      tokens: int32.
      targets: int32; what follows each of them.
      counted: bool; whose targets are scored.
    """

    tokens: Any
    targets: Any
    counted: Any


class Scorer:
    """A model that is ready to score; compiles its program once for each length that rows are padded to.

    Attributes:
      params: others of the same model may take their place, where the layout has them.
    """

    def __init__(self, cfg: ModelConfig, params: Any, *, layout: Layout, num_rows: int):
        """Puts the parameters where they are used.

        Args:
          cfg: the model.
          params: its parameters, as `model.init_params` has them; it computes in their dtype.
          layout: the devices.
          num_rows: that run together on each replica.
        """
        self.max_tokens = cfg.max_positions
        self._num_rows = num_rows * layout.row_degree
        self.params = jax.device_put(params, param_shardings(cfg, layout))
        self._everywhere = functools.partial(jax.make_array_from_process_local_data, layout.replicated())
        self._score = make_score(cfg, layout)

    def __call__(self, pairs: Sequence[Pair]) -> list[Score]:
        """Returns the score of each pair (context, continuation), the second given the first.

        Where both together are longer than `max_tokens` + 1, the beginning of the context is left out. The longest
        pairs run first: what does not fit into memory fails at once.

        Raises:
          ValueError: an empty context or continuation, or a continuation longer than `max_tokens`.
        """
        rows = [self._row(number, *pair) for number, pair in enumerate(pairs)]
        found: list[Any] = [None] * len(rows)
        longest_first = sorted(range(len(rows)), key=lambda number: -len(rows[number][0]))
        for start in range(0, len(rows), self._num_rows):
            numbers = longest_first[start : start + self._num_rows]
            # read before the next one starts: programs of several devices that no data orders may wait for each other
            sums_B, greedy_B = jax.device_get(self._score(self.params, self._batch([rows[i] for i in numbers])))
            for row, number in enumerate(numbers):
                found[number] = Score(float(sums_B[row]), bool(greedy_B[row]))
        return found

    def _row(self, number: int, context: Sequence[int], continuation: Sequence[int]) -> tuple[np.ndarray, int]:
        """Returns (tokens, of which the last is only predicted; how many of the last are scored)."""
        if not len(context) or not len(continuation):
            raise ValueError(
                f"pair {number} has {len(context)} tokens of context and {len(continuation)} of continuation; each "
                "needs one or more, a context at least the token that begins a document."
            )
        if len(continuation) > self.max_tokens:
            raise ValueError(
                f"pair {number} has a continuation of {len(continuation)} tokens and model.max_positions is "
                f"{self.max_tokens}; shorten it, or predict it in windows."
            )
        return np.asarray([*context, *continuation][-self.max_tokens - 1 :], np.int32), len(continuation)

    def _batch(self, rows: list[tuple[np.ndarray, int]]) -> Asked:
        """Returns rows of one length, which end with zeros that nothing before them sees."""
        num_places = padded_length(max(len(tokens) - 1 for tokens, _ in rows), self.max_tokens)
        tokens_BT, targets_BT = np.zeros((2, self._num_rows, num_places), np.int32)
        counted_BT = np.zeros((self._num_rows, num_places), bool)
        for row, (tokens, num_scored) in enumerate(rows):
            length = len(tokens) - 1
            tokens_BT[row, :length], targets_BT[row, :length] = tokens[:-1], tokens[1:]
            counted_BT[row, length - num_scored : length] = True
        # the same from every process, each of which gives its devices what they hold
        return jax.tree.map(self._everywhere, Asked(tokens_BT, targets_BT, counted_BT))


def make_score(cfg: ModelConfig, layout: Layout) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns the jitted (params, Asked) -> (log-likelihoods fp32 [B], whether all are greedy [B]).

    The results are of the counted targets, and on every device. The row degree of the layout divides B.
    """
    run = Run(serving(cfg, layout.platform), layout)

    def local(params: Any, asked: Asked) -> tuple[jax.Array, jax.Array]:
        decoder, shape = bind(params, run.cfg), asked.tokens.shape
        positions_BT = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        x_BTD, _ = run.blocks(decoder, asked.tokens, positions_BT, past=None)
        head_VD = run.seat.weight(decoder.head_VD, ("vocab", "embed"))
        log_likelihood_BT, greedy_BT = _of_targets(decoder.normed(x_BTD), head_VD, asked.targets, axes=run.seat.vocab)
        sums_B = jnp.sum(jnp.where(asked.counted, log_likelihood_BT, 0.0), axis=1)
        num_wrong_B = jnp.sum((asked.counted & ~greedy_BT).astype(jnp.int32), axis=1)
        rows = layout.wide(ROWS)
        return gathered(sums_B, rows, 0), gathered(num_wrong_B, rows, 0) == 0

    def score(params: Any, asked: Asked) -> tuple[jax.Array, jax.Array]:
        return run.everywhere(local, (P(ROWS),), (P(), P()))(params, asked)

    return jax.jit(score, out_shardings=layout.replicated())


def _of_targets(
    hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, *, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities of targets, fp32 [B, T], and whether no token is more likely.

    Args:
      hidden_BTD: what the head reads.
      head_VD: this device's rows of the head.
      targets_BT: numbers of rows of the whole head.
      axes: of the mesh, over which the head is split.
    """
    num_rows, num_places = targets_BT.shape
    chunk = min(CHUNK_POSITIONS, num_places)
    num_chunks = -(-num_places // chunk)

    def split(field: jax.Array) -> jax.Array:
        beyond = [(0, 0), (0, num_chunks * chunk - num_places)] + [(0, 0)] * (field.ndim - 2)
        return jnp.pad(field, beyond).reshape(num_rows, num_chunks, chunk, *field.shape[2:]).swapaxes(0, 1)

    def of_chunk(_: None, fields: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        hidden_BtD, targets_Bt = fields
        logits_BtV = logits(hidden_BtD, head_VD)
        largest_Bt = jnp.max(logits_BtV, axis=-1)
        if axes:
            largest_Bt = jax.lax.pmax(largest_Bt, axes)
        here_Bt = targets_Bt - position(axes) * head_VD.shape[0]
        is_target_BtV = jax.lax.broadcasted_iota(jnp.int32, logits_BtV.shape, 2) == here_Bt[..., None]
        sums_2Bt = jnp.stack([
            jnp.sum(jnp.exp(logits_BtV - largest_Bt[..., None]), axis=-1),
            jnp.sum(jnp.where(is_target_BtV, logits_BtV, 0.0), axis=-1),
        ])  # fmt: skip
        normaliser_Bt, target_Bt = jax.lax.psum(sums_2Bt, axes) if axes else sums_2Bt
        return None, (target_Bt - largest_Bt - jnp.log(normaliser_Bt), target_Bt >= largest_Bt)

    _, found_CBt = jax.lax.scan(of_chunk, None, (split(hidden_BTD), split(targets_BT)))
    log_likelihood_BT, greedy_BT = (part.swapaxes(0, 1).reshape(num_rows, -1)[:, :num_places] for part in found_CBt)
    return log_likelihood_BT, greedy_BT
