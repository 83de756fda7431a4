"""A small Llama on the six novels of Jane Austen, for a laptop: the config to run first, and the base of most tests.

    python -m hlat_jax.train --config=tiny

Text and tokenizer ship with the package. On two CPU cores it takes about two minutes for 409,600 tokens. The validation
loss on the whole held-out text ends near 4.49 nats per token of a 2,048-token vocabulary (1.84 bits per byte), inside
the range below, which allows for another order of floating-point sums. Measured: 4.489; train.seed=1: 4.573;
train.seed=2 with data.seed=99: 4.484.
"""

from hlat_jax.config import default


def get_config():
    c = default()
    c.model.vocab_size = 2048
    c.model.num_layers = 6
    c.model.embed_dim = 192
    c.model.mlp_dim = 512
    c.model.num_heads = 6
    c.model.num_kv_heads = 2
    c.model.head_dim = 32
    c.model.max_positions = 256

    c.optimizer.peak_lr = 2e-3
    c.optimizer.warmup_steps = 40
    c.optimizer.horizon_steps = 160

    c.data.train = "package:austen_train.jsonl"
    c.data.validation = "package:austen_validation.jsonl"
    c.data.tokenizer = "package:austen_2k.model"
    c.data.batch_size = 2
    c.data.seq_len = 256

    c.train.num_steps = 160
    c.train.eval_every_steps = 80
    c.train.num_eval_batches = 24
    c.train.sample_prompt = "It is a truth universally acknowledged, that"
    c.train.eval_loss_low = 4.4
    c.train.eval_loss_high = 4.6

    c.checkpoint.every_steps = 40
    return c
