"""Continues text with a trained model: `python -m hlat_jax.generate --checkpoint=runs/tiny --prompt="It is"`."""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags, logging

from hlat_jax.cli import flags as flags_lib
from hlat_jax.cli.path_checks import check_file
from hlat_jax.config import count_text
from hlat_jax.generate import inference
from hlat_jax.resolve import check_unicode
from hlat_jax.store.progress import show_progress

if TYPE_CHECKING:
    from hlat_jax.data.tokenizer import Tokenizer
    from hlat_jax.generate.generator import Generator

_USAGE = """Usage: python -m hlat_jax.generate --checkpoint=FOLDER --prompt=TEXT [--prompt=TEXT ...] [--FLAG=VALUE ...]
       python -m hlat_jax.generate --checkpoint=FOLDER --chat [--FLAG=VALUE ...]

Continuations are printed when their batch is done. Several continuations have numbers.
"""
_JSON_KEYS = ("completion", "num_tokens", "ended")  # `ended`: by eos, stop or length


def main(argv: Sequence[str]) -> int:
    """Continues the prompts of the command line, prints the texts, and returns 0."""
    values = flags_lib.parse_own(argv, _define, usage=_USAGE)
    if values.chat and (values.prompt or values.prompts_file or values.json or values.stop):
        raise ValueError("--chat reads messages from its input. Leave out --prompt, --prompts_file, --stop and --json.")
    if "" in values.stop:
        raise ValueError("--stop= would end every completion at once. Give it a text, or leave it out.")
    texts = [] if values.chat else _prompts(values)
    logging.set_verbosity(logging.ERROR)  # silence absl INFO logs of libraries
    inference.prepare(values)
    how = {"bos": values.bos, "control_tokens": values.control_tokens}
    # not at the top: they import JAX, which --help does not need
    from hlat_jax.generate import chat
    from hlat_jax.generate.generator import Generator, Sampling

    sampling = Sampling(values.temperature, values.top_k, values.top_p, values.seed, values.repetition_penalty)
    sampling.arguments()  # checked before anything is read
    template = chat.open_template(values.checkpoint) if values.chat else None
    with show_progress("opening the model"):
        trained = inference.trained_model(values)
    print(trained.described, file=sys.stderr, flush=True)
    options = {"max_tokens": values.max_tokens, "sampling": sampling}
    if template is not None:
        chat.chat(trained, template, Generator(trained.model, trained.params, layout=trained.layout), **options)
        return 0
    prompts = [_encode_prompt(trained, text, index, **how) for index, text in enumerate(texts)]
    generator = Generator(trained.model, trained.params, layout=trained.layout)
    for first in range(0, len(prompts), values.batch_size):
        batch = prompts[first : first + values.batch_size]
        began = time.monotonic()
        with show_progress("compiling and generating"):
            done = _continue(generator, trained.tokenizer, batch, stop=values.stop, first_number=first, **options)
        for index, (text, row) in enumerate(zip(texts[first:], done, strict=False), first):
            if values.json:
                line = {"number": index, "prompt": text} | {key: row[key] for key in _JSON_KEYS}
                print(json.dumps(line, ensure_ascii=False), flush=True)
            else:
                print(f"[{index}] {row['text']}" if len(prompts) > 1 else row["text"], flush=True)
        num_tokens = count_text(sum(row["num_tokens"] for row in done), "new token")
        print(f"{num_tokens} in {time.monotonic() - began:.1f} s, with compilation", file=sys.stderr, flush=True)
    return 0


def _continue(
    generator: Generator, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], *, stop: Sequence[str], **options: Any
) -> list[dict[str, Any]]:
    """Returns for each prompt the text, its completion, the number of new tokens, and why it ended."""
    from hlat_jax.generate.generator import collect_tokens

    def parts(row: int, ids: Sequence[int]) -> tuple[str, str]:
        """Returns the text of the prompt and its completion; a character may be of tokens of both."""
        before, whole = (tokenizer.decode([*prompts[row], *more]) for more in ([], ids))
        same = (length for length, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b)
        length = next(same, min(len(before), len(whole)))
        return whole[:length], whole[length:]

    def is_stopped(row: int, ids: Sequence[int]) -> bool:
        return bool(stop) and any(word in parts(row, ids)[1] for word in stop)

    steps = generator.stream(prompts, stop_ids=tokenizer.stop_ids, **options)
    new_ids, ended = collect_tokens(steps, num_prompts=len(prompts), stop_ids=tokenizer.stop_ids, is_stopped=is_stopped)
    rows = []
    for row, (ids, reason) in enumerate(zip(new_ids, ended, strict=True)):
        prompt, text = parts(row, ids)
        text = text[: min([text.find(word) for word in stop if word in text], default=len(text))]
        rows.append({"text": prompt + text, "completion": text, "num_tokens": len(ids), "ended": reason})
    return rows


def _prompts(values: flags.FlagValues) -> list[str]:
    """Returns the prompts of the command line, then those of its file: lines, or texts of JSONL of several lines."""
    prompts, name = list(values.prompt or ()), values.prompts_file
    for prompt in prompts:
        check_unicode("--prompt", prompt)
    if name:
        check_file(name, key="--prompts_file")
        try:
            text = pathlib.Path(name).read_bytes().decode("utf-8-sig")
            lines = [line for line in text.split("\n") if line.strip()]
            prompts += [json.loads(line)["text"] for line in lines] if name.endswith(".jsonl") else lines
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompts_file={name} is not UTF-8: {error}.") from None
        except (ValueError, TypeError, KeyError):
            raise ValueError(f'--prompts_file={name} must have a JSON object with a "text" in each line.') from None
    if not prompts:
        raise ValueError("no prompt was given. Use --prompt=TEXT, or --prompts_file=FILE with a prompt in each line.")
    return prompts


def _encode_prompt(
    trained: inference.TrainedModel, prompt: str, index: int, *, bos: bool | None, control_tokens: bool = False
) -> list[int]:
    """Returns the tokens of a prompt; with `control_tokens`, BOS too has to be written in it, or asked for."""
    if control_tokens:
        ids = trained.first_ids(bool(bos)) + trained.tokenizer.encode_with_control_tokens(prompt).tolist()
    else:
        ids = trained.first_ids(bos) + trained.tokenizer.encode(prompt).tolist()
    if not ids:
        raise ValueError(
            f"prompt {index} is {prompt!r}, which encodes to no tokens. Give a word, or --bos to start from BOS."
        )
    return ids


def _define(values: flags.FlagValues) -> None:
    inference.define(values)
    options = {"flag_values": values}
    flags.DEFINE_multi_string("prompt", None, "Text to continue. You can repeat it.", **options)
    about = "File with a prompt in each line that is not blank, or .jsonl with texts."
    flags_lib.define_path(values, "prompts_file", about)
    flags.DEFINE_bool(
        "control_tokens",
        False,
        "Control tokens written in prompts, such as <|im_start|>, are tokens and not text.",
        **options,
    )
    flags.DEFINE_bool("bos", None, "Begin prompts with BOS. By default the tokenizer or run decides.", **options)
    flags.DEFINE_integer("max_tokens", 128, "Maximum of new tokens of a prompt.", 1, **options)
    flags.DEFINE_float("temperature", 0.0, "Divides the logits. 0 always takes the most likely token.", **options)
    flags.DEFINE_integer("top_k", 0, "Draw from the k most likely tokens. 0 draws from all.", **options)
    flags.DEFINE_float("top_p", 1.0, "Draw from the most likely tokens with this total probability.", **options)
    flags.DEFINE_float("repetition_penalty", 1.0, "Above 1, tokens that the text has had are less likely.", **options)
    flags.DEFINE_integer(
        "seed", 0, "Seed of the random draws. The same seed gives the same text on any mesh.", **options
    )
    flags.DEFINE_integer("batch_size", 32, "Prompts of a batch.", 1, **options)
    flags.DEFINE_bool("chat", False, "Answer each line of input as a message, in the model's chat template.", **options)
    flags.DEFINE_multi_string("stop", [], "Text that ends a completion and is left out. You can repeat it.", **options)
    flags.DEFINE_bool("json", False, "Print each completion as a line of JSON, with why it ended.", **options)


if __name__ == "__main__":
    flags_lib.main(main)
