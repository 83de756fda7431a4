"""Chat templates of Hugging Face folders: the text of a conversation, and which parts of it are answers."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar

from hlat_jax.host.optional_import import import_optional
from hlat_jax.store.typed_json import read_json

Message = dict[str, Any]  # with `role` and `content`
TEMPLATE_FILE = "chat_template.jinja"
# Enclose what a template marks with {% generation %}; of Unicode's private use, and removed from the text.
_BEGIN, _END = "\ue0f0", "\ue0f1"


class ChatTemplate:
    """The template of a folder: its chat_template.jinja, or chat_template in its tokenizer_config.json.

    Attributes:
      folder: of the template.
      marks_answers: whether the template marks them with {% generation %}.
      sha256: of the template and the control tokens that it is given.

    Raises:
      ValueError: the folder has none, or one that is not Jinja; jinja2 is not installed.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder, self._roles = folder, set[str]()
        sandbox = import_optional(
            "jinja2.sandbox", missing="chat templates need jinja2: pip install 'hlat_jax[hf]', or pip install jinja2."
        )
        jinja2 = import_optional("jinja2", missing="")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = raise_exception
        text, self._tokens = _read(folder)
        self.sha256 = hashlib.sha256(json.dumps([text, self._tokens]).encode()).hexdigest()
        self._error, self.marks_answers = jinja2.TemplateError, "endgeneration" in text
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {folder} is not valid: {error}.") from None

    def render(self, messages: Sequence[Message], *, to_answer: bool = False) -> str:
        """Returns the text of a conversation, control tokens written out.

        Args:
          messages: in turn.
          to_answer: whether the beginning of an answer follows.

        Raises:
          ValueError: the template refuses them, or has no place for the role of one.
        """
        return self._render(messages, to_answer=to_answer).replace(_BEGIN, "").replace(_END, "")

    def answers(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation and (first character, last + 1) of each part that is an answer.

        What {% generation %} marks; without it, of each message of the assistant what it adds to the text of those
        before it, which ends as an answer begins.

        Raises:
          ValueError: as `render`; the template changes the text of messages before, so that no part is an answer.
        """
        marked, spans = self._render(messages), []
        if self.marks_answers:
            text = ""
            for part in marked.split(_BEGIN):
                answer, end, rest = part.partition(_END)
                spans += [(len(text), len(text) + len(answer))] if end else []
                text += answer + rest
            return text, spans
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:number], to_answer=True)
                after = self.render(messages[: number + 1])
                if not (after.startswith(before) and marked.startswith(after)):
                    raise ValueError(
                        f"the chat template of {self.folder} writes the messages before an answer in another way after "
                        "it; put {% generation %} and {% endgeneration %} around the answer in the template."
                    )
                spans.append((len(before), len(after)))
        return marked, spans

    def _render(self, messages: Sequence[Message], *, to_answer: bool = False) -> str:
        try:
            text = self._template.render(messages=messages, add_generation_prompt=to_answer, **self._tokens)
        except (self._error, TypeError, KeyError) as error:
            raise ValueError(f"the chat template of {self.folder} refuses these messages: {error}") from None
        for role in {message["role"] for message in messages} - self._roles:
            self._roles.add(role)  # before it is tried, which renders too
            talk = [{"role": each, "content": f"of the {each}"} for each in dict.fromkeys(("user", role))]
            with contextlib.suppress(ValueError):  # it may want another order
                if f"of the {role}" not in self._render(talk):
                    self._roles.discard(role)
            if role not in self._roles:
                raise ValueError(f"the chat template of {self.folder} has no place for the role {role!r}.")
        return text


def _read(folder: pathlib.Path) -> tuple[str, dict[str, str]]:
    """Returns the template of a folder, and the control tokens by the names that templates have for them."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= read_json(folder / name) if (folder / name).is_file() else {}
    path, text = folder / TEMPLATE_FILE, settings.get("chat_template")
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    if isinstance(text, list):  # several by name
        text = {each["name"]: each["template"] for each in text}.get("default")
    if not isinstance(text, str):
        raise ValueError(
            f"{folder} has no chat template: neither a chat_template.jinja nor chat_template in tokenizer_config.json. "
            "Put that of the model there; a base model has none."
        )
    tokens = {key: settings.get(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    texts = {key: token["content"] if isinstance(token, dict) else token for key, token in tokens.items()}
    return text, {key: token for key, token in texts.items() if token is not None}


def _generation_tag() -> type:
    """Returns the extension of Jinja for {% generation %}, which marks an answer."""
    nodes = import_optional("jinja2.nodes", missing="")
    base = import_optional("jinja2.ext", missing="").Extension

    class Generation(base):  # type: ignore[misc, valid-type]
        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    return Generation
