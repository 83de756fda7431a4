"""A 160M-parameter Llama (12 layers of 768, vocabulary 32,000) for one accelerator.

    python tools/fetch_corpus.py --out data/corpus
    python -m hlat_jax.train --config=160m

The corpus is about 47 MB of free documentation and essays, see tools/fetch_corpus.py. At the step's
rate on one H100 its 131 M tokens take six minutes; the whole run was not made. On a CPU it is for benchmarks of single
steps. No expected loss is recorded yet.
"""

from hlat_jax.config import default


def get_config():
    c = default()
    c.model.vocab_size = 32000
    c.model.num_layers = 12
    c.model.embed_dim = 768
    c.model.mlp_dim = 2048
    c.model.num_heads = 12
    c.model.num_kv_heads = 12
    c.model.head_dim = 64
    c.model.max_positions = 1024

    c.precision.policy = "mixed"
    c.optimizer.peak_lr = 6e-4
    c.optimizer.warmup_steps = 200
    c.optimizer.horizon_steps = 4000

    c.data.train = "data/corpus/train.jsonl"
    c.data.validation = "data/corpus/validation.jsonl"
    c.data.tokenizer = "data/corpus/tokenizer.model"
    c.data.batch_size = 32
    c.data.seq_len = 1024

    c.train.num_steps = 4000
    c.train.num_microbatches = 4
    c.train.eval_every_steps = 500

    c.checkpoint.every_steps = 500
    return c
