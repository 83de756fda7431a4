"""A trained model as an `LM` of the LM Evaluation Harness, for log-likelihoods and generated text.

    python -m hlat_jax.evaluate --checkpoint=runs/tiny --tasks=hellaswag,arc_easy
    python -m hlat_jax.evaluate lm_eval --model hlat_jax --model_args checkpoint=runs/tiny --tasks hellaswag

As in the harness's other models, a control token spelled in a text, as in '<s>It is', becomes that token.

Source of the interface: `lm_eval.api.model.LM`, version 0.4.13.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hlat_jax.config import count_text
from hlat_jax.data.chat_template import ChatTemplate, Message
from hlat_jax.evaluate import lm_eval_compat
from hlat_jax.generate.chat import open_template
from hlat_jax.generate.generator import Generator, collect_tokens
from hlat_jax.generate.inference import TrainedModel
from hlat_jax.generate.sampling import Sampling
from hlat_jax.generate.scoring import Pair, Scorer
from hlat_jax.store.progress import Status

MAX_NEW_TOKENS = 256  # where a task gives no number; the default of the harness's other models
_SAMPLING = ("temperature", "top_k", "top_p")
TEMPLATE_FLAG = "--apply_chat_template"  # of the harness, for errors


class HarnessModel(lm_eval_compat.TemplateLM):
    """A trained model for the harness. Every process of a job is given all requests, and answers all of them."""

    def __init__(
        self, trained: TrainedModel, *, batch_size: int = 8, bos: bool | None = None, status: Status | None = None
    ):
        """Wraps a trained model.

        Args:
          trained: the model, with its parameters on the devices.
          batch_size: number of rows that run together, on each replica.
          bos: whether texts begin with BOS. By default the tokenizer or run decides. Without BOS, an empty context is
            EOS.
          status: progress, which is kept up to date.

        Raises:
          ValueError: `bos` with a tokenizer that has no BOS.
        """
        super().__init__()
        self._status = status or Status()
        self._tokenizer, self._first = trained.tokenizer, trained.first_ids(bos)
        self._folder, self._left_out = trained.folder, False
        self._template: ChatTemplate | None = None
        self.max_length = trained.model.max_positions
        self._num_rows = batch_size * trained.layout.row_degree
        self._scorer = Scorer(trained.model, trained.params, layout=trained.layout, num_rows=batch_size)
        self._generator = Generator(trained.model, trained.params, layout=trained.layout)

    def use(self, params: Any) -> None:
        """Replaces the parameters by others of the same model and sharding, and keeps the compiled programs."""
        self._scorer.params = self._generator.params = params

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        return self._first[0] if self._first else self._tokenizer.eos_id

    @property
    def tokenizer_name(self) -> str:
        """The key of tokenizer and chat template in the harness's cache of rendered requests."""
        return f"{self._tokenizer.sha256}-{self._get_template().sha256}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the chat template in Jinja and applies it from now on, or returns None for False.

        Args:
          chat_template: the name of one of the folder's templates, or True for the default template.

        Raises:
          ValueError: there is no such template.
        """
        if not chat_template:
            return None
        name = chat_template if isinstance(chat_template, str) else ""
        self._template = template = open_template(str(self._folder), key=TEMPLATE_FLAG, name=name)
        return template.text

    def apply_chat_template(self, chat_history: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Returns the text of a conversation.

        It ends where an answer follows, or without `add_generation_prompt`, in the last message. If the template has no
        place for a system message, it is left out with a warning, as in the harness's backend for Hugging Face.

        Raises:
          ValueError: there is no template, or it refuses the other messages.
        """
        template = self._get_template()

        def render(messages: Sequence[Message]) -> str:
            if add_generation_prompt:
                return template.render(messages, to_answer=True)
            return template.render_open(messages)

        try:
            return render(chat_history)
        except ValueError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            if not self._left_out:
                self._left_out = True
                print(f"warning: system messages are left out ({error})", file=sys.stderr, flush=True)
            return render(others)

    def _get_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = open_template(str(self._folder), key=TEMPLATE_FLAG)
        return self._template

    def tok_encode(self, string: str, *, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns token ids, after BOS if texts begin with it and this text does not spell it."""
        ids = self._tokenizer.encode_with_control_tokens(string).tolist()
        if add_special_tokens is False or ids[:1] == self._first:
            return ids
        return self._first + ids

    def _loglikelihood_tokens(self, requests: Sequence[tuple], **_: Any) -> list[tuple[float, bool]]:
        """Returns (log-likelihood, whether greedy) of requests (texts, context ids, continuation ids)."""
        self._status.text = count_text(len(requests), "continuation")
        pairs = [(context, continuation) for _, context, continuation in requests]
        scores = self._scorer(pairs, status=self._status)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, tuple(score))
        return [tuple(score) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Returns the log-likelihood of whole texts, each token predicted once, in windows of `max_length`.

        If texts begin with BOS, this token is predicted too, after another BOS. The harness's backend for Hugging
        Face does the same.
        """
        pairs: list[Pair] = []
        ends = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            rolling = lm_eval_compat.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            pairs += map(lm_eval_compat.make_disjoint_window, rolling)
            ends.append(len(pairs))
        self._status.text = f"{count_text(len(pairs), 'window')} of texts"
        scores, totals = self._scorer(pairs, status=self._status), []
        for request, start, end in zip(requests, [0, *ends], ends, strict=False):
            totals.append(sum(score.log_likelihood for score in scores[start:end]))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Returns the text generated after each context, up to a stop sequence, EOS, or `max_gen_toks` tokens."""
        alike: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        texts_of_all = [""] * len(requests)
        self._status.share, self._status.text = 0.0, count_text(len(requests), "generated text")
        for numbers in alike.values():
            ids = {index: self.tok_encode(requests[index].args[0]) for index in numbers}
            numbers = sorted(numbers, key=lambda index: -len(ids[index]))
            for start in range(0, len(numbers), self._num_rows):
                batch = numbers[start : start + self._num_rows]
                asked = requests[batch[0]].args[1]
                texts = self._continue_texts([ids[index] for index in batch], asked, first_number=start)
                for index, text in zip(batch, texts, strict=True):
                    texts_of_all[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
                self._status.share += len(batch) / len(requests)
        return texts_of_all

    def _continue_texts(self, prompts: list[list[int]], asked: dict[str, Any], *, first_number: int) -> list[str]:
        """Returns the text generated after each prompt; prompts that leave no room for it lose their beginning."""
        options = lm_eval_compat.normalize_gen_kwargs(asked, MAX_NEW_TOKENS)
        stop = lm_eval_compat.handle_stop_sequences(options.pop("until"), eos=None)
        stop_ids = {*self._tokenizer.stop_ids, *self._control_tokens(stop)}
        max_tokens, do_sample = options.pop("max_gen_toks"), options.pop("do_sample")
        unknown = sorted(options.keys() - set(_SAMPLING))
        if unknown:
            raise ValueError(
                f"generation_kwargs has {unknown[0]!r}, but only {', '.join(_SAMPLING)} are supported. Leave it out of "
                "the task."
            )
        sampling = Sampling(**options) if do_sample else Sampling()
        room = self.max_length - max_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks={max_tokens} leaves no room for a prompt in model.max_positions={self.max_length}. "
                "Set it below that in the task, or by the harness's --gen_kwargs."
            )
        prompts = [prompt[-room:] or [self.prefix_token_id] for prompt in prompts]
        steps = self._generator.stream(
            prompts,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=stop_ids,
            first_number=first_number,
        )

        def is_stopped(_: int, ids: Sequence[int]) -> bool:
            text = self._text(ids)
            return any(term in text for term in stop if term)

        ids, _ = collect_tokens(steps, num_prompts=len(prompts), stop_ids=stop_ids, is_stopped=is_stopped)
        return [lm_eval_compat.postprocess_generated_text(self._text(row), stop, None) for row in ids]

    def _control_tokens(self, terms: Sequence[str]) -> list[int]:
        """Returns the ids of the terms that are control tokens, which no decoded text contains."""
        ids = [self._tokenizer.encode_with_control_tokens(term).tolist() for term in terms if term]
        return [token for [token, *more] in filter(None, ids) if not more and not self._text([token])]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(np.asarray(ids, np.int32))


lm_eval_compat.register_model_type()
