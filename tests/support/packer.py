"""The batches of a run in plain Python, written from the definition: an oracle that shares no code with the package.

Texts in, rows out; of Grain only its permutation, of the package nothing. Slow and short on purpose.
"""

import functools
import zlib

from grain.experimental import index_shuffle

A1, A2 = 13925035116211876495, 10511698010929265437  # 2**64 / p, 2**64 / p**2


@functools.cache
def permutation(num_documents, seed):
    return [index_shuffle(i, max_index=num_documents - 1, seed=seed, rounds=4) for i in range(num_documents)]


def documents_of(source, texts, data, *, row, epoch):
    """Yields the texts of one stream's documents in one epoch; `source` is None for the only, unnamed one."""
    seed = (data.seed + (zlib.crc32(source.encode()) if source else 0)) % 2**32
    order = permutation(len(texts), (seed + epoch) % 2**32) if data.shuffle else range(len(texts))
    return [texts[number] for number in order[row :: data.batch_size]]


def tokens_of(text, data, encode):
    cut, n = [], data.max_document_chars
    for i in range(0, max(len(text), 1), n):
        cut += [*encode(text[i : i + n]), 2]
    return cut


def concat_rows(source, texts, data, *, row, encode):
    """Yields (tokens, None) for ever."""
    rest, epoch = [], 0
    while True:
        for text in documents_of(source, texts, data, row=row, epoch=epoch):
            if text is not None:
                rest += tokens_of(text, data, encode)
            while len(rest) >= data.seq_len:
                yield rest[: data.seq_len], None
                rest = rest[data.seq_len :]
        epoch += 1


def documents_rows(source, texts, data, *, row, encode):
    """Yields (tokens, segment ids) for ever."""
    epoch, n = 0, data.seq_len
    while True:
        own = documents_of(source, texts, data, row=row, epoch=epoch)
        for first in range(0, len(own), data.window_documents):
            pieces = []
            for text in own[first : first + data.window_documents]:
                tokens = tokens_of(text, data, encode) if text is not None else []
                pieces += [tokens[i : i + n] for i in range(0, len(tokens), n)]
            rows = []
            for piece in sorted(pieces, key=len, reverse=True):  # stable, also when reversed
                fits = [r for r in rows if sum(map(len, r)) + len(piece) <= n]
                if fits:
                    max(fits, key=lambda r: sum(map(len, r))).append(piece)  # the first of equals
                else:
                    rows.append([piece])
            for placed in rows:
                tokens = [token for piece in placed for token in piece]
                segments = [number for number, piece in enumerate(placed, 1) for _ in piece]
                yield tokens + [2] * (n - len(tokens)), segments + [0] * (n - len(tokens))
        epoch += 1


def batches_of(sources, weights, data, *, num_batches, encode):
    """Returns [batches][rows] of (tokens, segment ids).

    `sources`: name (None: unnamed) -> texts, None standing for a bad record; `weights`: a function from the batch, and
    the tokens before it if all rows were this one, to integers, one a source.
    """
    make = concat_rows if data.packing == "concat" else documents_rows
    streams = [
        [make(name, texts, data, row=row, encode=encode) for name, texts in sources.items()]
        for row in range(data.batch_size)
    ]
    batches, n = [], data.seq_len
    emitted, owed = ([[0] * len(sources) for _ in range(data.batch_size)] for _ in range(2))
    for k in range(num_batches):
        batch = []
        for row in range(data.batch_size):
            shares = weights(k, sum(emitted[row]) * data.batch_size)
            u, source = (row * A1 + k * A2) % 2**64, 0
            while u * sum(shares) >= sum(shares[: source + 1]) * 2**64:
                source += 1
            owed[row][source] += n
            source = max(range(len(shares)), key=lambda s: (shares[s] > 0, owed[row][s], -s))
            batch.append(next(streams[row][source]))
            segments = batch[-1][1]
            tokens = n if segments is None else sum(segment > 0 for segment in segments)
            padding = [(k + 1) * n - sum(emitted[row]) - tokens, k * n - sum(emitted[row])]  # after and before the row
            emitted[row][source] += tokens
            owed[row][source] -= tokens
            for s in range(len(shares)):
                paid = [[sum(shares[:end]) * p // sum(shares) for p in padding] for end in (s, s + 1)]
                owed[row][s] -= (paid[1][0] - paid[1][1]) - (paid[0][0] - paid[0][1])
        batches.append(batch)
    return batches
