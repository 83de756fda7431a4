"""HLAT-70B: 1.8 T tokens on 256 trn1.32xlarge nodes, TP 32 x PP 8 x DP 32 with ZeRO-1.

    python -m hlat_jax.train --config=70b --config.data.tokenizer=/fsx/llama2/tokenizer.model

It reads data/train/SOURCE/*.parquet: the seven sources of RedPajama up to 1.4 T tokens, then the mix of HLAT's table
III. For other folders set data.train with the same names; for other text set data.mixture too (empty: one source).

Not yet run on Trainium. HLAT's run ended near a training loss of 1.18, after a drop from 1.37 at the change of data.
The recipe is that of the paper and the published scripts. It differs from them in this:

- Data. HLAT trained on each document once an epoch. Here the shares of the sources are fixed: those of RedPajama's
  tokens as its authors count them, then those of table III. Within its groups they follow the sizes of open-web-math
  (14.7 B tokens), peS2o (42 B) and RedPajama's sources, except C4: the 66 B that are left of "web". The second mix
  continues sources where the first left them; HLAT opened new files. It ends at 1,800 B tokens, HLAT's plots at 1,804.
- Order. One seeded order for each source over the whole job. HLAT split files over replicas, shuffled each part, and
  dropped the text read ahead at each resume. Long documents are cut in order; HLAT's tail pieces came first.
- Initial weights. Masters are drawn in fp32; HLAT's were copies of the parameters, rounded to bf16. Every layer has
  draws of its own; HLAT seeded all pipeline stages alike.
- Arithmetic. RoPE rotates in fp32, in HLAT in bf16; the loss is fp32, in HLAT rounded to bf16. Key and value heads, of
  which four cores hold copies, count once in the gradient norm and not four times.
- Checkpoints have the fp32 masters; HLAT derived them from bf16 parameters at each resume. The permanent ones, every
  100 B tokens as HLAT's, have the optimizer's state too. The last step is saved; HLAT's was not.
- A step with a loss or gradient that is not finite is left out, and three in a row end the run; in HLAT one did.
- The bubble of the pipeline is HLAT's, 7 of 39, in lockstep ticks. The embedding and the head, which HLAT put into the
  first and last stage, are split over all of them.

Validation is off, as in HLAT's 70B script. With data.validation set it follows each checkpoint, as in HLAT's code,
always on the same 1,024 sequences; HLAT-7B read on for 500 at a time.
Source: arXiv 2404.10630, III-A, III-B, III-D and table III, and the published scripts; sizes: RedPajama-Data's page.
"""

from hlat_jax.cli.config_files import load

# B tokens of each source: in RedPajama-1T, and in the pool of HLAT's table III (web 90, domain 104.7, code 59)
FIRST = {
    "common_crawl": 878, "c4": 175, "github": 59, "books": 26, "arxiv": 28, "wikipedia": 24, "stackexchange": 20,
    "open_web_math": 0, "pes2o": 0,
}  # fmt: skip
THEN = {
    "common_crawl": 0, "c4": 66, "github": 59, "books": 0, "arxiv": 28, "wikipedia": 24, "stackexchange": 20,
    "open_web_math": 14.7, "pes2o": 42,
}  # fmt: skip


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

    first, then = (",".join(f"{name}={share}" for name, share in shares.items()) for shares in (FIRST, THEN))
    c.data.train = ";".join(f"{name}=data/train/{name}/*.parquet" for name in FIRST)
    c.data.mixture = f"{first} until_tokens=1.4e12;{then}"
    c.data.validation = ""

    c.train.num_microbatches = 32
    c.train.eval_every_steps = 300

    c.checkpoint.every_steps = 300
    c.checkpoint.keep_last = 3
    c.checkpoint.keep_every_steps = 23_842  # 100 B tokens
    return c
