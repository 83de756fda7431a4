"""What all runs of the replication share: 0.84 M parameters, 1,000 steps of 1,024 tokens, HLAT's schedule.

HLAT stopped at 430,000 of the 500,000 steps after which its cosine would reach zero, and was at its floor of a tenth of
the peak for the last 7 %; so are these runs. Their warm-up is longer, 5 % of the run and not 0.5. One row of the eight
reads its documents a second time in the last 50 steps.
"""

from hlat_jax.config import default

NUM_STEPS = 1000
PEAK_LR = 3e-3


def get_config():
    c = default()
    c.model.vocab_size = 2048
    c.model.num_layers = 4
    c.model.embed_dim = 96
    c.model.mlp_dim = 256
    c.model.num_heads = 4
    c.model.num_kv_heads = 4
    c.model.head_dim = 24
    c.model.max_positions = 128

    c.optimizer.peak_lr = PEAK_LR
    c.optimizer.warmup_steps = 50
    c.optimizer.horizon_steps = 1163  # 1,000 x 500,000 / 430,000

    c.data.train = "package:austen_train.jsonl"
    c.data.validation = "package:austen_validation.jsonl"
    c.data.tokenizer = "package:austen_2k.model"
    c.data.batch_size = 8
    c.data.seq_len = 128

    c.train.num_steps = NUM_STEPS
    c.train.eval_every_steps = 200
    c.train.num_eval_batches = 0  # all of the held-out text

    c.checkpoint.every_steps = 333  # so 999, and 1,000 at the end: a pair of neighbors
    c.checkpoint.keep_every_steps = 100
    c.metrics.update(plot=False, tensorboard=False)
    return c
