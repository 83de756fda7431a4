"""Makes the text and the tokenizer that ship with the package: `python tools/make_assets.py AUSTEN.jsonl`.

AUSTEN.jsonl holds the six finished novels of Jane Austen, one chapter a row with the keys `title`, `part`, `text`, as
exported from Debian's package r-cran-janeaustenr 1.0.0. Written to `--out` (default: hlat_jax/assets):
  austen_train.jsonl, austen_validation.jsonl  every 20th chapter, counted over all novels, is held out
  austen_2k.model                              SentencePiece BPE of 2,048 pieces, trained on the training chapters only
The same input gives the same bytes. Owns these three files; fetches nothing (see fetch_corpus.py for larger text).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import pathlib

import sentencepiece

HELD_OUT_EVERY = 20
HELD_OUT_FIRST = 10  # not 0: the opening chapter of a novel is unlike the rest


def split_chapters(path: pathlib.Path) -> tuple[list[dict], list[dict]]:
    """Returns (training, validation) chapters in the order of the file."""
    chapters = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chapters = [{key: chapter[key] for key in ("title", "part", "text")} for chapter in chapters]
    held_out = [index % HELD_OUT_EVERY == HELD_OUT_FIRST for index in range(len(chapters))]
    train = [chapter for chapter, held in zip(chapters, held_out, strict=True) if not held]
    return train, [chapter for chapter, held in zip(chapters, held_out, strict=True) if held]


def train_tokenizer(texts: list[str], *, vocab_size: int) -> bytes:
    """Returns a serialized SentencePiece model that loses nothing: `decode(encode(text)) == text`.

    Identity normalization and no dummy prefix keep every byte of the text, which makes bits per byte exact. A line
    break is a piece of its own, so no piece crosses lines. Ids: unk 0, bos 1, eos 2, as Llama; no padding id.
    """
    lines = [line for text in texts for line in text.split("\n") if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=["\n"],
        max_sentence_length=1 << 20,  # bytes; the default would skip long paragraphs
        num_threads=1,  # the same bytes on every machine
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=2,
    )
    return model.getvalue()


def main() -> None:
    """Writes the three files and prints what is in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=pathlib.Path)
    default_out = pathlib.Path(__file__).resolve().parent.parent / "hlat_jax" / "assets"
    parser.add_argument("--out", type=pathlib.Path, default=default_out)
    args = parser.parse_args()
    train, validation = split_chapters(args.input)
    for name, chapters in (("austen_train.jsonl", train), ("austen_validation.jsonl", validation)):
        rows = "".join(json.dumps(chapter, ensure_ascii=False) + "\n" for chapter in chapters)
        (args.out / name).write_text(rows, encoding="utf-8")
        num_bytes = sum(len(chapter["text"].encode()) for chapter in chapters)
        print(f"{name}: {len(chapters)} chapters, {num_bytes:,} bytes of text")
    model = train_tokenizer([chapter["text"] for chapter in train], vocab_size=2048)
    (args.out / "austen_2k.model").write_bytes(model)
    print(f"austen_2k.model: {len(model):,} bytes, sha256 {hashlib.sha256(model).hexdigest()}")


if __name__ == "__main__":
    main()
