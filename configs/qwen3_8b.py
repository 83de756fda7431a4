"""Qwen3 8B on 16 trn1.32xlarge nodes: tensor parallelism 8, 64 replicas with ZeRO-1.

    python -m hlat_jax.train --config=qwen3_8b --config.data.train='/fsx/text/*.parquet' \
        --config.data.validation=/fsx/text/validation.parquet --config.data.tokenizer=/fsx/qwen3/tokenizer.json
    python -m hlat_jax.plan --config=qwen3_8b --instance=trn1.32xlarge --nodes=16

Not yet run on Trainium: planned (13.0 of 15.9 GiB a core), and linted for trn1 and trn2. The model is that of the
published config.json, so that `train.init_from` takes its weights. Its data and learning rate are not public: learning
rate and horizon are ours, 1 T tokens.
Source: Qwen/Qwen3-8B, config.json; arXiv 2505.09388, table 1.
"""

from hlat_jax.config import default


def get_config():
    c = default()
    c.model.vocab_size = 151936
    c.model.num_layers = 36
    c.model.embed_dim = 4096
    c.model.mlp_dim = 12288
    c.model.num_heads = 32
    c.model.num_kv_heads = 8
    c.model.head_dim = 128
    c.model.max_positions = 40_960
    c.model.norm_eps = 1e-6
    c.model.rope_theta = 1_000_000.0
    c.model.qk_norm = True
    c.model.remat = "selective"

    c.parallel.tensor = 8
    c.parallel.sequence_parallel = True
    c.parallel.zero1 = True
    c.precision.policy = "mixed"

    c.optimizer.peak_lr = 3e-4
    c.optimizer.warmup_steps = 2000
    c.optimizer.horizon_steps = 238_419

    c.data.train = "data/train/*.parquet"
    c.data.validation = "data/validation/*.parquet"
    c.data.tokenizer = "data/tokenizer.json"
    c.data.batch_size = 1024  # x 4,096 tokens = 4,194,304 tokens per step
    c.data.seq_len = 4096

    c.train.num_steps = 238_419  # 1 T tokens
    c.train.num_microbatches = 16  # one sequence per replica on 16 nodes
    c.train.eval_every_steps = 1000
    c.train.num_eval_batches = 1

    c.checkpoint.every_steps = 1000
    return c
