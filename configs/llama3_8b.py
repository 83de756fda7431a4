"""Llama-3-8B on 16 trn2.48xlarge nodes at LNC 2: tensor parallelism within a chip of 4 devices, FSDP over all chips.

    python -m hlat_jax.train --config=llama3_8b --config.data.train='/fsx/text/*.parquet' \
        --config.data.validation=/fsx/text/validation.parquet --config.data.tokenizer=/fsx/llama3/tokenizer.model
    python -m hlat_jax.plan --config=llama3_8b --instance=trn2.48xlarge --nodes=16

Not yet run on Trainium: planned (10.7 of 22.6 GiB a device), linted for trn2, and partitioned for 1,024 virtual
devices, its whole mesh. Attention is NKI's, documented for trn2 and later only. A microbatch, one sequence of 8,192
tokens on a chip, is estimated at 15 million instructions, an order of magnitude. In public logs the compiler stops at 5
million. The config raises the limit to 60 million, four times the estimate, by an undocumented flag; a public launch
script of AXLearn for trn2 raises it to 20 million. If it does not compile, take --config.parallel.tensor=16
--config.model.fuse_qkv=False --config.train.num_microbatches=8: 4.2 million, and a projected step 1.5 times as long;
public pages differ on which groups of 16 devices are served, as its plan says. At LNC 1 the config
takes 8 nodes and 10.7 of 11.3 GiB, which may not fit. The model, the sequences and the learning rate come from Llama
3 8B. Its data is not public, so the horizon is ours: 1 T tokens. The degrees come from AXLearn's rule for trn2,
tensor 4 x fsdp; the replica groups are a chip, and one core of every chip.
Source: arXiv 2407.21783, table 3 and section 3.4; AXLearn, mesh rule neuron-trn2.48xlarge-64.
"""

from hlat_jax.config import default


def get_config():
    c = default()
    c.model.vocab_size = 128256
    c.model.num_layers = 32
    c.model.embed_dim = 4096
    c.model.mlp_dim = 14336
    c.model.num_heads = 32
    c.model.num_kv_heads = 8
    c.model.head_dim = 128
    c.model.max_positions = 8192
    c.model.rope_theta = 500_000.0
    c.model.remat = "selective"
    c.model.attention = "nki"  # einsum's scores take 3.7 GiB more of a device

    c.parallel.fsdp = -1
    c.parallel.data = 1
    c.parallel.tensor = 4  # the JAX devices of a chip at LNC 2
    c.parallel.sequence_parallel = True
    c.precision.policy = "mixed"

    c.optimizer.peak_lr = 3e-4
    c.optimizer.warmup_steps = 8000
    c.optimizer.horizon_steps = 238_419

    c.data.train = "data/train/*.parquet"
    c.data.validation = "data/validation/*.parquet"
    c.data.tokenizer = "data/tokenizer.model"
    c.data.batch_size = 512  # x 8,192 tokens = 4,194,304 tokens per step
    c.data.seq_len = 8192

    c.train.num_steps = 238_419  # 1 T tokens
    c.train.compiler_flags = "--internal-max-instruction-limit=60000000"  # undocumented
    c.train.num_microbatches = 2  # one sequence per chip at 256 chips
    c.train.eval_every_steps = 1000
    c.train.num_eval_batches = 1

    c.checkpoint.every_steps = 1000
    c.checkpoint.keep_last = 5
    c.checkpoint.keep_every_steps = 24_000
    return c
