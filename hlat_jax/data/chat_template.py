"""Formats conversations with chat templates of Hugging Face folders, and finds the answers in the text."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar

from hlat_jax.host.optional_import import import_optional
from hlat_jax.store.typed_json import read_json

Message = dict[str, Any]  # with `role` and `content`
TEMPLATE_FILE, NAMED_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_DEFAULT = "default"  # transformers' name for the template that is taken where none is named
# Enclose what a template marks with {% generation %}; of Unicode's private use, and removed from the text.
_BEGIN, _END = "\ue0f0", "\ue0f1"
_CUT = "\ue0f2 "  # ends a message that is to be continued; the space shows whether the template strips contents
# What `strftime_now` gives templates in training, which must not depend on the day; Llama 3's date without a clock.
TRAINING_DAY = datetime.datetime(2024, 7, 26)


class ChatTemplate:
    """The template of a folder, from its chat_template.jinja or chat_template in its tokenizer_config.json.

    Args:
      folder: the folder of the template.
      now: the time that the template's `strftime_now` writes.
      name: the name of the template, if the folder has several. "" is the default template.

    Attributes:
      folder: the folder of the template.
      text: the text of the template, in Jinja.
      marks_answers: whether the template marks answers with {% generation %}.
      sha256: the checksum of the template and of the control tokens that it gets.

    Raises:
      ValueError: the folder has no template of that name, or it is not Jinja, or jinja2 is not installed.
    """

    def __init__(self, folder: pathlib.Path, *, now: datetime.datetime = TRAINING_DAY, name: str = ""):
        self.folder, self._placed = folder, set[tuple[str, bool]]()
        sandbox = import_optional(
            "jinja2.sandbox", missing="chat templates need jinja2: pip install 'hlat_jax[hf]', or pip install jinja2."
        )
        jinja2 = import_optional("jinja2", missing="")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False} | options)
        environment.globals["strftime_now"] = now.strftime

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = raise_exception
        self.text, self._tokens = _read(folder, name or _DEFAULT)
        self.sha256 = hashlib.sha256(json.dumps([self.text, self._tokens]).encode()).hexdigest()
        self._error, self.marks_answers = jinja2.TemplateError, "endgeneration" in self.text
        try:
            self._template = environment.from_string(self.text)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {folder} is not valid: {error}.") from None
        self._as_parts = False  # whether contents are given as lists of parts, which some templates loop over
        if self._leaves_out("user", ["user"]):
            self._as_parts = True
            self._as_parts = not self._leaves_out("user", ["user"])

    def render(self, messages: Sequence[Message], *, to_answer: bool = False) -> str:
        """Returns the text of a conversation with control tokens written out.

        Args:
          messages: the messages in turn.
          to_answer: whether the text ends with the beginning of an answer.

        Raises:
          ValueError: the template refuses the messages, or has no place for the role of one.
        """
        return self._render(messages, to_answer=to_answer).replace(_BEGIN, "").replace(_END, "")

    def render_open(self, messages: Sequence[Message]) -> str:
        """Returns the text of a conversation up to the end of the last message's content, for a model to continue.

        Raises:
          ValueError: `render` raises, or the template leaves out the end of that message.
        """
        *before, last = messages
        text, cut, rest = self.render([*before, last | {"content": last["content"] + _CUT}]).rpartition(_CUT.strip())
        if not cut:
            raise ValueError(f"the chat template of {self.folder} leaves out the end of the message to continue.")
        return text if rest.startswith(" ") else text.rstrip()  # as transformers: a template that strips contents

    def answers(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation and (first character, last + 1) of each part that is an answer.

        Answers are the parts that {% generation %} marks. Without marks, they are each message of the assistant from
        after the beginning of an answer to its end, end included.

        Raises:
          ValueError: `render` raises, or the template cuts an answer, or changes it if messages follow.
        """
        marked, spans = self._render(messages), []
        if self.marks_answers:
            text = ""
            for part in marked.split(_BEGIN):
                answer, end, rest = part.partition(_END)
                spans += [(len(text), len(text) + len(answer))] if end else []
                text += answer + rest
            return text, spans
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:index], to_answer=True)
                after = self.render(messages[: index + 1])
                together = after.startswith(before) and marked.startswith(after)
                spans.append((len(before), len(after)) if together else self._span(messages, index, marked))
        return marked, spans

    def _span(self, messages: Sequence[Message], index: int, text: str) -> tuple[int, int]:
        """Returns where answer `number` stands in a text that writes what is before it in another way after it.

        It begins where what introduces an answer ends, or differs from the text, and ends with what ends it as the last
        message. Marks around its content, and after that of the message before, show where these are; an answer of
        which the template leaves out a part, such as a thought, loses a mark.
        """

        def parts(stop: int, *, to_answer: bool = False) -> list[str]:
            marked = list(messages[:stop])
            for each in range(index - 1, min(index + 1, stop)):
                content = marked[each]["content"]
                core = content.strip()  # marks stand within the white space, which a template may strip
                marks = core.join((_BEGIN * (each == index), _BEGIN))
                marked[each] = marked[each] | {"content": content.replace(core, marks, 1)}
            return self._render(marked, to_answer=to_answer).split(_BEGIN)

        if index:
            whole, last, prompt = parts(len(messages)), parts(index + 1), parts(index, to_answer=True)
            if (len(whole), len(last), len(prompt)) == (4, 4, 2) and "".join(whole) == text:
                begin, between, content, rest = whole
                same = os.path.commonprefix([prompt[-1], between])  # noqa: RUF071
                ending, shorter = last[-1], last[-1].removesuffix(self._tokens.get("eos_token", ""))
                if shorter and not rest.startswith(ending):  # EOS ends the conversation, not each answer
                    ending = shorter
                if rest.startswith(ending) and (same == prompt[-1] or not between.removeprefix(same).strip()):
                    return len(begin + same), len(begin + between + content + ending)
        raise ValueError(
            f"the chat template of {self.folder} leaves out a part of message {index + 1}, such as a thought, or "
            "changes it if messages follow. Put {% generation %} and {% endgeneration %} around the answer in the "
            "template, or end the conversation with that message."
        )

    def _render(self, messages: Sequence[Message], *, to_answer: bool = False) -> str:
        for role, is_first in {(message["role"], each == 0) for each, message in enumerate(messages)} - self._placed:
            talk = [role] if role == "user" else [role, "user", "assistant"] if is_first else ["user", role]
            if self._leaves_out(role, talk):
                where = "in front of the user's, before an answer" if is_first else "after another message"
                raise ValueError(
                    f"the chat template of {self.folder} has no place for the role {role!r} {where}. Leave such "
                    "messages out, or change the template."
                )
            self._placed.add((role, is_first))
        try:
            return self._fill(messages, to_answer=to_answer)
        except (self._error, TypeError, KeyError) as error:
            raise ValueError(f"the chat template of {self.folder} refuses these messages: {error}") from None

    def _leaves_out(self, role: str, roles: Sequence[str]) -> bool:
        """Returns whether the message of a role is not in the text of a conversation that the template takes."""
        with contextlib.suppress(self._error, TypeError, KeyError):  # it may want another order
            return f"of the {role}" not in self._fill([{"role": each, "content": f"of the {each}"} for each in roles])
        return False

    def _fill(self, messages: Sequence[Message], *, to_answer: bool = False) -> str:
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if self._as_parts:
            given = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in given]
        absent = {"tools": None, "documents": None}  # as transformers passes them
        return self._template.render(messages=given, add_generation_prompt=to_answer, **absent, **self._tokens)


def _read(folder: pathlib.Path, name: str) -> tuple[str, dict[str, str]]:
    """Returns a template of a folder, and the control tokens by the names that templates have for them."""
    settings: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= read_json(folder / file) if (folder / file).is_file() else {}
    given = settings.get("chat_template")
    texts = {each["name"]: each["template"] for each in given} if isinstance(given, list) else {_DEFAULT: given}
    paths = {path.stem: path for path in (folder / NAMED_TEMPLATES).glob("*.jinja")}
    for key, path in (paths | {_DEFAULT: folder / TEMPLATE_FILE}).items():
        if path.is_file():
            texts[key] = path.read_text(encoding="utf-8")
    known = {key: text for key, text in texts.items() if isinstance(text, str)}
    if not known:
        raise ValueError(
            f"{folder} has no chat template, neither a chat_template.jinja nor chat_template in tokenizer_config.json. "
            "Put the model's template there. A base model has none."
        )
    if name not in known:
        raise ValueError(f"{folder} has no chat template called {name!r}. It has {', '.join(sorted(known))}.")
    tokens = {key: settings.get(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    contents = {key: token["content"] if isinstance(token, dict) else token for key, token in tokens.items()}
    return known[name], {key: token for key, token in contents.items() if token is not None}


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
