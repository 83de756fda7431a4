"""HLAT-70B: 1.8 T tokens on 256 trn1.32xlarge nodes, TP 32 x PP 8 x DP 32 with ZeRO-1.

    python -m hlat_jax.train --config=70b --config.data.train='/fsx/redpajama/*.parquet' \
        --config.data.validation=/fsx/slimpajama/validation.parquet --config.data.tokenizer=/fsx/llama2/tokenizer.model

Not yet run on Trainium. HLAT's run ended near a training loss of 1.18 after its change of data at 1.4 T tokens.
Differs from 7b in size, layout, precision, learning rate, microbatches and checkpoints only. Master weights are
initialized in fp32; HLAT-70B's were copies rounded to bf16.
Source: arXiv 2404.10630, III-A, III-D, and the published scripts.
"""

from hlat_jax.config import load


def get_config():
    c = load("7b")
    c.model.num_layers = 80
    c.model.embed_dim = 8192
    c.model.mlp_dim = 28672
    c.model.num_heads = 64
    c.model.num_kv_heads = 8
    c.model.init_std = 0.02  # HLAT's scripts never pass their 0.021 flag to the 70B model
    c.model.fuse_qkv = False

    c.parallel.tensor = 32
    c.parallel.pipe = 8
    c.parallel.pipe_exchange = "all_gather"  # the stages are on different nodes, between which no permute is documented
    c.precision.policy = "mixed"

    c.optimizer.peak_lr = 1.5e-4

    c.train.num_microbatches = 32

    c.checkpoint.every_steps = 300
    c.checkpoint.keep_last = 3
    return c
