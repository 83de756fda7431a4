"""Log-likelihoods of continuations given their contexts, for multiple choice and rolling perplexity.

Shapes: B rows, T positions, C chunks of positions, D embed, V vocab.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from hlat_jax.config import ModelConfig, count_text
from hlat_jax.generate.decoding import ShardedDecoder, serving
from hlat_jax.generate.generator import padded_length, place_params
from hlat_jax.model import bind
from hlat_jax.ops.cross_entropy import CHUNK_POSITIONS, Vocab, logits
from hlat_jax.parallel import collectives
from hlat_jax.parallel.sharding import ROWS, Layout
from hlat_jax.store.progress import Status

Pair = tuple[Sequence[int], Sequence[int]]


class Score(NamedTuple):
    """Log-probability of a continuation in nats, and whether greedy decoding gives it."""

    log_likelihood: float
    is_greedy: bool


class ScoringBatch(NamedTuple):
    """Rows to score. Every field has shape [B, T].

    Attributes:
      tokens: int32 token ids.
      targets: int32 id of the token that follows each token.
      counted: bool, True for targets that are scored.
    """

    tokens: Any
    targets: Any
    counted: Any


class Scorer:
    """A model with its parameters on the devices. It compiles its program once for each padded length of rows.

    Attributes:
      max_tokens: most tokens of a continuation, `model.max_positions`.
      params: the parameters, which may be replaced by others of the same model and shardings.
    """

    def __init__(self, cfg: ModelConfig, params: Any, *, layout: Layout, num_rows: int):
        """Puts the parameters on the devices. `num_rows` is the batch size of each replica.

        `params` are parameters as `model.init_params` returns them. The model computes in their dtype.
        """
        self.max_tokens = cfg.max_positions
        self._num_rows = num_rows * layout.row_degree
        self.params = place_params(params, cfg, layout)
        self._everywhere = functools.partial(jax.make_array_from_process_local_data, layout.replicated_sharding())
        self._score = make_score(cfg, layout)

    def __call__(self, pairs: Sequence[Pair], *, status: Status | None = None) -> list[Score]:
        """Returns the score of each pair (context, continuation), the second given the first.

        Contexts are truncated from the left to `max_tokens` + 1 tokens in all. The longest pairs run first, so that one
        that does not fit into memory fails at once. `status` is kept up to date.

        Raises:
          ValueError: an empty context or continuation, or a continuation longer than `max_tokens`.
        """
        rows = [self._row(index, context, continuation) for index, (context, continuation) in enumerate(pairs)]
        scores: list[Any] = [None] * len(rows)
        status = status or Status()
        status.share = 0.0
        longest_first = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
        for start in range(0, len(rows), self._num_rows):
            numbers = longest_first[start : start + self._num_rows]
            # read before the next one starts: unordered programs over several devices may deadlock
            sums_B, greedy_B = jax.device_get(self._score(self.params, self._batch([rows[i] for i in numbers])))
            for row, index in enumerate(numbers):
                scores[index] = Score(float(sums_B[row]), bool(greedy_B[row]))
            status.share += len(numbers) / len(rows)
        return scores

    def _row(self, index: int, context: Sequence[int], continuation: Sequence[int]) -> tuple[np.ndarray, int]:
        """Returns the tokens, of which the last is only a target, and the number of targets that are scored."""
        if not len(context) or not 0 < len(continuation) <= self.max_tokens:
            raise ValueError(
                f"pair {index} has {count_text(len(context), 'token')} of context and {len(continuation)} of "
                f"continuation. Give at least one of each, and at most model.max_positions={self.max_tokens} of the "
                "second."
            )
        return np.asarray([*context, *continuation][-self.max_tokens - 1 :], np.int32), len(continuation)

    def _batch(self, rows: list[tuple[np.ndarray, int]]) -> ScoringBatch:
        """Returns rows padded with zeros to one length; causal attention keeps padding from the tokens before it."""
        seq_len = padded_length(max(len(tokens) - 1 for tokens, _ in rows), self.max_tokens)
        tokens_BT, targets_BT = np.zeros((2, self._num_rows, seq_len), np.int32)
        counted_BT = np.zeros((self._num_rows, seq_len), bool)
        for row, (tokens, num_scored) in enumerate(rows):
            length = len(tokens) - 1
            tokens_BT[row, :length], targets_BT[row, :length] = tokens[:-1], tokens[1:]
            counted_BT[row, length - num_scored : length] = True
        # the same on every process, each of which provides the shards of its own devices
        return jax.tree.map(self._everywhere, ScoringBatch(tokens_BT, targets_BT, counted_BT))


def make_score(cfg: ModelConfig, layout: Layout) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns the jitted (params, ScoringBatch) -> (log-likelihoods fp32 [B], whether all are greedy [B]).

    Both are over the counted targets, and replicated. The row degree of the layout divides B.
    """
    model = ShardedDecoder(serving(cfg, layout.platform), layout)
    vocab = Vocab(model.ctx.vocab, cfg.vocab_size)

    def local(params: Any, batch: ScoringBatch) -> tuple[jax.Array, jax.Array]:
        decoder, shape = bind(params, model.cfg), batch.tokens.shape
        positions_BT = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        x_BTD, _ = model.apply_layers(decoder, batch.tokens, positions_BT)
        head_VD = decoder.gather_head(ctx=model.ctx)
        x_BTD = decoder.apply_final_norm(x_BTD)
        log_likelihood_BT, greedy_BT = _score_targets(x_BTD, head_VD, batch.targets, vocab)
        sums_B = jnp.sum(jnp.where(batch.counted, log_likelihood_BT, 0.0), axis=1)
        num_wrong_B = jnp.sum((batch.counted & ~greedy_BT).astype(jnp.int32), axis=1)
        sums_B, num_wrong_B = (collectives.all_gather(part, layout.wide(ROWS), 0) for part in (sums_B, num_wrong_B))
        return sums_B, num_wrong_B == 0

    def score(params: Any, batch: ScoringBatch) -> tuple[jax.Array, jax.Array]:
        return model.shard_map(local, (P(ROWS),), (P(), P()))(params, batch)

    return jax.jit(score, out_shardings=layout.replicated_sharding())


def _score_targets(
    hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, vocab: Vocab
) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities of targets, fp32 [B, T], and whether no token is more likely.

    `head_VD` are this device's rows of the head.
    """
    axes = vocab.axes
    num_rows, seq_len = targets_BT.shape
    chunk = min(CHUNK_POSITIONS, seq_len)
    num_chunks = -(-seq_len // chunk)

    def split(field: jax.Array) -> jax.Array:
        padding = [(0, 0), (0, num_chunks * chunk - seq_len)] + [(0, 0)] * (field.ndim - 2)
        return jnp.pad(field, padding).reshape(num_rows, num_chunks, chunk, *field.shape[2:]).swapaxes(0, 1)

    def score_chunk(_: None, fields: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        hidden_BtD, targets_Bt = fields
        logits_BtV = logits(hidden_BtD, head_VD, vocab=vocab)
        largest_Bt = jnp.max(logits_BtV, axis=-1)
        if axes:
            largest_Bt = jax.lax.pmax(largest_Bt, axes)
        here_Bt = targets_Bt - collectives.axis_index(axes) * head_VD.shape[0]
        is_target_BtV = jax.lax.broadcasted_iota(jnp.int32, logits_BtV.shape, 2) == here_Bt[..., None]
        sums_2Bt = jnp.stack([
            jnp.sum(jnp.exp(logits_BtV - largest_Bt[..., None]), axis=-1),
            jnp.sum(jnp.where(is_target_BtV, logits_BtV, 0.0), axis=-1),
        ])  # fmt: skip
        normaliser_Bt, target_Bt = jax.lax.psum(sums_2Bt, axes) if axes else sums_2Bt
        return None, (target_Bt - largest_Bt - jnp.log(normaliser_Bt), target_Bt >= largest_Bt)

    _, scores_CBt = jax.lax.scan(score_chunk, None, (split(hidden_BTD), split(targets_BT)))
    log_likelihood_BT, greedy_BT = (part.swapaxes(0, 1).reshape(num_rows, -1)[:, :seq_len] for part in scores_CBt)
    return log_likelihood_BT, greedy_BT
