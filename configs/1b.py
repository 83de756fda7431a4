"""A 1.2B-parameter Llama (22 layers of 2,048, grouped-query attention) for one large accelerator.

    python tools/fetch_corpus.py --out data/corpus
    python -m hlat_jax.train --config=1b

For throughput measurements; the corpus is far too small to train it well. No expected loss is recorded.
"""

from hlat_jax.config import default


def get_config():
    c = default()
    c.model.vocab_size = 32000
    c.model.num_layers = 22
    c.model.embed_dim = 2048
    c.model.mlp_dim = 5632
    c.model.num_heads = 16
    c.model.num_kv_heads = 8
    c.model.head_dim = 128
    c.model.max_positions = 4096
    c.model.remat = "selective"

    c.parallel.zero1 = True  # eight cores of trn1 hold it so; on one device it changes nothing
    c.precision.policy = "mixed"
    c.optimizer.warmup_steps = 200
    c.optimizer.horizon_steps = 20_000

    c.data.train = "data/corpus/train.jsonl"
    c.data.validation = "data/corpus/validation.jsonl"
    c.data.tokenizer = "data/corpus/tokenizer.model"
    c.data.batch_size = 64
    c.data.seq_len = 2048

    c.train.num_steps = 20_000
    c.train.num_microbatches = 8
    c.train.eval_every_steps = 1000

    c.checkpoint.every_steps = 1000
    return c
