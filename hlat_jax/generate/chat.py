"""A conversation in the terminal, with the chat template of the model."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hlat_jax.data.chat_template import ChatTemplate, Message
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.generate.inference import TrainedModel
from hlat_jax.store.bucket import local_copy
from hlat_jax.weights.description import describe
from hlat_jax.weights.path_checks import no_weights

if TYPE_CHECKING:
    from hlat_jax.generate.generator import Generator

_TALK = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Yes"}]


def open_template(checkpoint: str, *, key: str = "--chat", name: str = "") -> ChatTemplate:
    """Returns the chat template `name` of a model, as for `ChatTemplate`, without reading an array.

    Raises:
      ValueError: there is none, or it has no place for the user's message or the answer. `key` is the flag to name.
    """
    folder = local_copy(checkpoint, key="--checkpoint")
    if (weights := describe(folder)) is None:
        raise no_weights(folder)
    if weights.companions is None:
        raise ValueError(
            f"{key}: {folder} has no chat template. A run copies one from the Hugging Face folder that it starts from."
        )
    try:
        template = ChatTemplate(weights.companions, now=datetime.datetime.now(), name=name)
        template.render(_TALK[:1], to_answer=True)
        template.render(_TALK)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    return template


def ids_that_end_an_answer(template: ChatTemplate, tokenizer: Tokenizer) -> set[int]:
    """Returns the tokens that end any text, and the control token, if any, that the template puts after an answer."""
    after = template.render(_TALK).rpartition("Yes")[2]  # not `answers`: a template may begin one with a thought
    first = tokenizer.encode_with_control_tokens(after)[:1].tolist() if after.strip() else []
    return {*tokenizer.stop_ids, *(token for token in first if not tokenizer.decode([token]))}


def chat(trained: TrainedModel, template: ChatTemplate, generator: Generator, **options: Any) -> None:
    """Answers each line of standard input until it ends. `options` are passed to `Generator.stream`.

    If the conversation and an answer are longer than the model's positions, the oldest turns are left out.
    """
    tokenizer, most = trained.tokenizer, trained.model.max_positions
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""  # a file or pipe gets the answers only
    options["stop_ids"] = ids_that_end_an_answer(template, tokenizer)
    messages: list[Message] = []
    with contextlib.suppress(EOFError):
        while True:
            if not (line := input(prompt).strip()):
                continue
            messages.append({"role": "user", "content": line})
            ids = encode(template, tokenizer, messages)
            while len(ids) + options["max_tokens"] > most and len(messages) > 1:
                del messages[:2]
                ids = encode(template, tokenizer, messages)
            if len(ids) >= most:
                print(f"(too long: {len(ids)} tokens, and model.max_positions={most})")
                messages.pop()
                continue
            answer = ""
            for piece in stream_text(generator, tokenizer, ids, **options):
                print(piece, end="", flush=True)
                answer += piece
            print()
            messages.append({"role": "assistant", "content": answer.strip()})
    if prompt:
        print()


def encode(template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Returns the tokens of a conversation, ready for an answer."""
    return tokenizer.encode_with_control_tokens(template.render(messages, to_answer=True)).tolist()


def stream_text(
    generator: Generator, tokenizer: Tokenizer, prompt: Sequence[int], *, stop_ids: Collection[int], **options: Any
) -> Iterator[str]:
    """Yields the text that continues a prompt as its characters are complete."""
    new, text = [], tokenizer.decode(prompt)
    printed = len(text)
    for [token] in generator.stream([prompt], stop_ids=stop_ids, **options):
        if token is None or token in stop_ids:
            continue
        new.append(token)
        text = tokenizer.decode([*prompt, *new])
        if not text.endswith("\ufffd"):
            yield text[printed:]
            printed = len(text)
    yield text[printed:]
