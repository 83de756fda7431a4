"""Qwen3 0.6B on 4 trn1.32xlarge nodes: tensor parallelism 8, 16 replicas with ZeRO-1.

    python -m hlat_jax.train --config=qwen3_0_6b --config.data.train='/fsx/text/*.parquet' \
        --config.data.validation=/fsx/text/validation.parquet --config.data.tokenizer=/fsx/qwen3/tokenizer.json
    python -m hlat_jax.plan --config=qwen3_0_6b --instance=trn1.32xlarge --nodes=4

Not yet run on Trainium: planned (2.3 of 15.9 GiB a core), and linted for trn1 and trn2. The model is that of the
published config.json, so that `train.init_from` takes its weights: 16 heads of 128 on a width of 1,024, with RMSNorm on
queries and keys. Its data and learning rate are not public: learning rate and horizon are ours, 100 B tokens.
Source: Qwen/Qwen3-0.6B, config.json; arXiv 2505.09388, table 1.
"""

from hlat_jax.config import default


def get_config():
    c = default()
    c.model.vocab_size = 151936
    c.model.num_layers = 28
    c.model.embed_dim = 1024
    c.model.mlp_dim = 3072
    c.model.num_heads = 16
    c.model.num_kv_heads = 8
    c.model.head_dim = 128
    c.model.max_positions = 40_960
    c.model.norm_eps = 1e-6
    c.model.rope_theta = 1_000_000.0
    c.model.qk_norm = True
    c.model.tie_embeddings = True
    c.model.remat = "selective"

    c.parallel.tensor = 8
    c.parallel.sequence_parallel = True
    c.parallel.zero1 = True
    c.precision.policy = "mixed"

    c.optimizer.peak_lr = 3e-4
    c.optimizer.warmup_steps = 2000
    c.optimizer.horizon_steps = 95_367

    c.data.train = "data/train/*.parquet"
    c.data.validation = "data/validation/*.parquet"
    c.data.tokenizer = "data/tokenizer.json"
    c.data.batch_size = 256  # x 4,096 tokens = 1,048,576 tokens per step
    c.data.seq_len = 4096

    c.train.num_steps = 95_367  # 100 B tokens
    c.train.num_microbatches = 16  # one sequence per replica on 4 nodes
    c.train.eval_every_steps = 1000
    c.train.num_eval_batches = 1

    c.checkpoint.every_steps = 1000
    return c
