"""Models in twelve styles of public code, none of them ours by design: name -> builder of a loss.

    loss, params, batch = MODELS["nanodo"]()             # tens of MiB of residuals in fp32
    loss, params, batch = MODELS["nanodo"](small=True)   # for tests
    loss, params, batch = MODELS["nanodo"](seq_len=1024)  # those in TRANSFORMERS; the same number of tokens

`loss(params, batch)` is a scalar in fp32. The styles are written down here; no code is copied.
"""

from foreign.equinox_styles import unet
from foreign.flax_styles import ctc, gemma, lm1b, nanodo, resnet, vit
from foreign.haiku_styles import haiku_lstm, haiku_transformer
from foreign.plain_styles import gnn, latent_ode, moe

MODELS = {
    "nanodo": nanodo,
    "lm1b": lm1b,
    "gemma": gemma,
    "haiku_transformer": haiku_transformer,
    "haiku_lstm": haiku_lstm,
    "vit": vit,
    "resnet": resnet,
    "unet": unet,
    "moe": moe,
    "gnn": gnn,
    "ctc": ctc,
    "odeint": latent_ode,
}
TRANSFORMERS = ("nanodo", "lm1b", "gemma", "haiku_transformer", "vit")
