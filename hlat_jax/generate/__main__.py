"""`python -m hlat_jax.generate --checkpoint=runs/tiny --prompt="It is"`: continues text with a trained model."""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags, logging

from hlat_jax.cli import flags as flags_lib
from hlat_jax.cli.path_checks import check_file
from hlat_jax.config import counted
from hlat_jax.generate import inference
from hlat_jax.resolve import check_unicode
from hlat_jax.store.progress import show_progress

_USAGE = """Usage: python -m hlat_jax.generate --checkpoint=FOLDER --prompt=TEXT [--prompt=TEXT ...] [--FLAG=VALUE ...]

A single continuation is printed as it is generated; several are printed when their batch is done, with their numbers.
"""


def main(argv: Sequence[str]) -> int:
    """Continues the prompts of the command line and prints them; returns 0."""
    values = flags_lib.parse_own(argv, _define, usage=_USAGE)
    prompts = _prompts(values)
    logging.set_verbosity(logging.ERROR)  # silence absl INFO logs of libraries
    inference.prepare(values)
    from hlat_jax.generate.generator import Generator, Sampling  # imports JAX, which --help does not need

    sampling = Sampling(values.temperature, values.top_k, values.top_p, values.seed)
    sampling.arguments()  # checked before anything is read
    with show_progress("opening the model"):
        trained = inference.trained_model(values)
    tokenizer = trained.tokenizer
    _log(trained.described)
    how = {"bos": values.bos, "control_tokens": values.control_tokens}
    ids = [_encoded(trained, prompt, number, **how) for number, prompt in enumerate(prompts)]
    _log_shortened(ids, values.max_tokens, trained.model.max_positions)
    generator = Generator(trained.model, trained.params, layout=trained.layout, log=_log)
    options = {"max_tokens": values.max_tokens, "sampling": sampling, "stop_ids": tokenizer.stop_ids}
    for first in range(0, len(ids), values.batch_size):
        batch = ids[first : first + values.batch_size]
        texts = [StreamedText(tokenizer, prompt) for prompt in batch]
        steps = generator.stream(batch, first_number=first, **options)
        if len(ids) > 1:
            steps = _with_progress(steps, most=values.max_tokens)
        _print(texts, steps, alone=len(ids) == 1, first=first)
    return 0


class StreamedText:
    """The text of a prompt and its continuation, in parts that can be printed while tokens arrive."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._printed = ""

    def add(self, token: int | None) -> None:
        """Appends a token; None: none."""
        if token is not None:
            self._ids.append(token)

    def part(self) -> str:
        """Returns the new text, up to the last complete character."""
        certain = self.whole().rstrip("\ufffd")
        part, self._printed = certain[len(self._printed) :], max(certain, self._printed, key=len)
        return part

    def rest(self) -> str:
        """Returns the new text at the end."""
        return self.whole()[len(self._printed) :]

    def whole(self) -> str:
        """Returns the text of all tokens; control tokens, such as EOS, have none."""
        return self._tokenizer.decode(self._ids)


def _print(texts: Sequence[StreamedText], steps: Any, *, alone: bool, first: int) -> None:
    began, num_tokens = time.monotonic(), 0
    for step in steps:
        num_tokens += sum(token is not None for token in step)
        for text, token in zip(texts, step, strict=True):
            text.add(token)
        if alone:
            print(texts[0].part(), end="", flush=True)
    if alone:
        print(texts[0].rest())
    else:
        for number, text in enumerate(texts, first):
            print(f"[{number}] {text.whole()}", flush=True)
    _log(f"{counted(num_tokens, 'token')} in {time.monotonic() - began:.1f} s")


def _with_progress(steps: Iterator[Any], *, most: int) -> Iterator[Any]:
    """Yields the steps of a batch, at most `most`, and shows how many there were; the first compiles and logs that."""
    yield next(steps)
    with show_progress("generating") as status:
        for number, step in enumerate(steps, 2):
            status.share = number / most
            yield step


def _prompts(values: flags.FlagValues) -> list[str]:
    prompts = list(values.prompt or ())
    for prompt in prompts:
        check_unicode("--prompt", prompt)
    if values.prompts_file:
        prompts += _prompts_of_file(values.prompts_file)
    if not prompts:
        raise ValueError("no prompt was given; use --prompt=TEXT, or --prompts_file=FILE with a prompt in each line.")
    return prompts


def _prompts_of_file(name: str) -> list[str]:
    """Returns the prompts of a file: its lines, or the texts of JSONL, in which they may have several lines."""
    # not at the top: --help does not need the readers
    from hlat_jax.data.formats import files, paths, records, streaming

    check_file(name, key="--prompts_file")
    file = files.DataFile(pathlib.Path(name).expanduser())
    if paths.file_format(file) == "jsonl":
        texts = [text for text, _ in streaming.iter_documents(file, text_field="text")]
        for bad in texts:
            if isinstance(bad, records.BadRecord):
                raise ValueError(f'--prompts_file: {bad.problem} Each line must be an object with a "text".')
        return texts
    try:
        text = pathlib.Path(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts_file={name} is not UTF-8: {error}.") from None
    return [line for line in text.splitlines() if line.strip()]


def _encoded(
    trained: inference.TrainedModel, prompt: str, number: int, *, bos: bool | None, control_tokens: bool = False
) -> list[int]:
    """Returns the tokens of a prompt; with `control_tokens`, BOS too has to be written in it, or asked for."""
    if control_tokens:
        ids = trained.first_ids(bool(bos)) + trained.tokenizer.encode_with_control_tokens(prompt).tolist()
    else:
        ids = trained.first_ids(bos) + trained.tokenizer.encode(prompt).tolist()
    if not ids:
        raise ValueError(
            f"prompt {number} is {prompt!r}, which encodes to no tokens; give a word, or --bos to start from BOS."
        )
    return ids


def _log_shortened(ids: Sequence[Sequence[int]], max_tokens: int, max_positions: int) -> None:
    """Logs that --max_tokens is more than the context has room for, where it is."""
    number, longest = max(enumerate(map(len, ids)), key=lambda pair: pair[1])
    room = max_positions - longest
    if 0 < room < max_tokens:
        _log(
            f"--max_tokens={max_tokens} is more than fits: prompt {number} has {longest} tokens and the model "
            f"{max_positions} positions, so at most {room} tokens follow it"
        )


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _define(values: flags.FlagValues) -> None:
    inference.define(values)
    options = {"flag_values": values}
    flags.DEFINE_multi_string("prompt", None, "Text to continue; may be repeated.", **options)
    flags.DEFINE_string(
        "prompts_file", "", "File with a prompt in each line that is not blank, or .jsonl with texts.", **options
    )
    flags.DEFINE_bool(
        "control_tokens",
        False,
        "Control tokens written in prompts, such as <|im_start|>, are tokens and not text.",
        **options,
    )
    flags.DEFINE_bool("bos", None, "Begin prompts with BOS; unset: as the tokenizer or run is configured.", **options)
    flags.DEFINE_integer("max_tokens", 128, "Maximum of new tokens of a prompt.", 1, **options)
    flags.DEFINE_float("temperature", 0.0, "Divides the logits; 0: always the most likely token.", **options)
    flags.DEFINE_integer("top_k", 0, "Draw from the k most likely tokens; 0: from all.", **options)
    flags.DEFINE_float("top_p", 1.0, "Draw from the most likely tokens with this total probability.", **options)
    flags.DEFINE_integer(
        "seed", 0, "Seed of the random draws; the same seed gives the same text on any mesh.", **options
    )
    flags.DEFINE_integer("batch_size", 32, "Prompts of a batch.", 1, **options)


if __name__ == "__main__":
    flags_lib.main(main)
