"""A 0.4M-parameter Llama that uses all cores of one trn1 node (2 or 32) and trains in a notebook on a laptop.

    python -m hlat_jax.train --config=node

The config of notebooks/. It has tensor parallelism over all devices, so 32 query heads and widths that are multiples of
32. Text and tokenizer are those of `tiny`.
"""

from hlat_jax.config import default


def get_config():
    c = default()
    c.model.vocab_size = 2048
    c.model.num_layers = 2
    c.model.embed_dim = 64
    c.model.mlp_dim = 192
    c.model.num_heads = 32
    c.model.num_kv_heads = 8
    c.model.head_dim = 8
    c.model.max_positions = 64
    c.model.init_std = 0.06
    c.model.fuse_qkv = False  # above 8 cores the KV heads are copied

    c.parallel.data = 1
    c.parallel.tensor = -1
    c.parallel.sequence_parallel = True

    c.optimizer.peak_lr = 5e-3
    c.optimizer.warmup_steps = 10
    c.optimizer.horizon_steps = 180

    c.data.train = "package:austen_train.jsonl"
    c.data.validation = "package:austen_validation.jsonl"
    c.data.tokenizer = "package:austen_2k.model"
    c.data.batch_size = 8
    c.data.seq_len = 64

    c.train.num_steps = 160
    c.train.eval_every_steps = 40
    c.train.num_eval_batches = 8

    c.checkpoint.every_steps = 80
    return c
