"""Continues a trained model on more text: the recipe of `--init_from`, sized for a small model on a laptop.

    python -m hlat_jax.train --init_from=SmolLM2-135M --config.data.train=my.txt --workdir=runs/my

The model, its tokenizer and the files beside its weights are those of --init_from, a run or a Hugging Face folder.
"""

from hlat_jax.config import default


def get_config():
    c = default()
    num_steps = c.train.get_ref("num_steps")  # a run of another length decays over that
    num_steps.set(100)

    c.optimizer.schedule = "linear"
    c.optimizer.peak_lr = 1e-4
    c.optimizer.warmup_steps = num_steps // 10
    c.optimizer.horizon_steps = num_steps * 1
    c.optimizer.min_lr_ratio = 0.0

    c.data.validation = "5%"
    c.data.batch_size = 4
    c.data.seq_len = 512

    c.train.eval_every_steps = 50
    c.train.num_eval_batches = 8

    c.checkpoint.every_steps = 50
    return c
