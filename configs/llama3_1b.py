"""Llama 3.2 1B on 4 trn1.32xlarge nodes: tensor parallelism 8, 16 replicas with ZeRO-1.

    python -m hlat_jax.train --config=llama3_1b --config.data.train='/fsx/text/*.parquet' \
        --config.data.validation=/fsx/text/validation.parquet --config.data.tokenizer=/fsx/llama3/tokenizer.model
    python -m hlat_jax.plan --config=llama3_1b --instance=trn1.32xlarge --nodes=4

Not yet run on Trainium: planned (3.3 of 15.9 GiB a core), and linted for trn1 and trn2. The model is that of the
published config.json, so that `train.init_from` takes its weights. Llama 3.2 1B was pruned and distilled from a larger
model and its data is not public: learning rate and horizon are ours, 100 B tokens.
Source: meta-llama/Llama-3.2-1B, config.json.
"""

from hlat_jax.config import default


def get_config():
    c = default()
    c.model.vocab_size = 128256
    c.model.num_layers = 16
    c.model.embed_dim = 2048
    c.model.mlp_dim = 8192
    c.model.num_heads = 32
    c.model.num_kv_heads = 8
    c.model.head_dim = 64
    c.model.max_positions = 131_072
    c.model.rope_theta = 500_000.0
    c.model.rope_scaling = "llama3"
    c.model.rope_factor = 32.0
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
    c.data.tokenizer = "data/tokenizer.model"
    c.data.batch_size = 256  # x 4,096 tokens = 1,048,576 tokens per step
    c.data.seq_len = 4096

    c.train.num_steps = 95_367  # 100 B tokens
    c.train.num_microbatches = 16  # one sequence per replica on 4 nodes
    c.train.eval_every_steps = 1000
    c.train.num_eval_batches = 1

    c.checkpoint.every_steps = 1000
    return c
