"""Small tokenizers of both kinds, trained where a test needs one."""

import io
import json

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

TEXTS = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "  two  spaces\n\n\tand a tab, naïve — “quoted” 12,345.6 € 東京 🙂 e\u0301",
    "text with </s> and <s> in it",
    "",
]


def write_tokenizer_json(folder, kind="bytes", **config):
    """Trains and writes a tokenizer.json of a kind of decoder, and tokenizer_config.json; returns its path."""
    if kind == "bytes":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = []
    special = ["<unk>", "<s>", "</s>"] + ([f"<0x{byte:02X}>" for byte in range(256)] if kind != "bytes" else [])
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS[:1] * 5, trainer)
    made.add_tokens(["possession"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.enable_truncation(4)
    made.enable_padding(length=8)
    path = folder / "tokenizer.json"
    made.save(str(path))
    if kind != "bytes":  # bytes are ordinary tokens of the vocabulary
        content = json.loads(path.read_text())
        content["added_tokens"] = [each for each in content["added_tokens"] if not each["content"].startswith("<0x")]
        path.write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"} | config))
    return path


def train_model(path, **options):
    """Trains and writes a SentencePiece model of 60 tokens, or as the options say; returns its path."""
    model = io.BytesIO()
    lines = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"] * 50
    defaults = {"model_type": "bpe", "vocab_size": 60, "minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **(defaults | options))
    path.write_bytes(model.getvalue())
    return str(path)
