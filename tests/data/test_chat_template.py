"""Chat templates against transformers': the text, and which of it is an answer."""

import json

import pytest
import transformers
from refusals import refused
from tokenizer_files import write_tokenizer_json

from hlat_jax.data.chat_template import ChatTemplate

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '[A]' }}{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}
    {%- elif m.role == 'user' %}
        {{- '[U]' ~ m.content | trim ~ '[/U]' }}
    {%- else %}
        {{- raise_exception('no role ' ~ m.role) }}
    {%- endif %}
{%- endfor %}"""
# What is special in other families; « and » stand where {% generation %} would mark an answer.
_CHATML_END = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
FAMILIES = {
    "qwen3": "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' %}«"
    "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1] + '<|im_end|>\n' }}»{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    + _CHATML_END,
    "smollm3": "<|im_start|>{{ messages[0].content if messages[0].role == 'system' else 'Be nice.' }}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' %}«"
    "{{ m.content + '<|im_end|>\n' }}»{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}" + _CHATML_END,
    "r1": "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}{% elif m.role == 'assistant' %}[A]«"
    "{{ m.content.split('</think>')[-1] + eos_token }}»{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[A]<think>\n' }}{% endif %}",
    "mistral": "{% if messages[0].role == 'system' %}{% set system, messages = messages[0].content, messages[1:] %}"
    "{% endif %}{% set users = messages | selectattr('role', 'eq', 'user') | list %}{{ bos_token }}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools is not none %}{{ '[TOOLS]' + tools | tojson(ensure_ascii=False) }}{% endif %}"
    "[INST] {{ system + '\n\n' if system and m == users[-1] }}{{ m.content }}[/INST]"
    "{% else %}« {{ m.content | trim + eos_token }}»{% endif %}{% endfor %}",
    "phi3": "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}"
    "«{{ m.content + '<e>\n' }}»{% else %}{{ m.content + '<e>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}«{{ eos_token }}»{% endif %}",
    "parts": "{% for m in messages %}[{{ m.role }}{{ m.name }}]{% for part in m.content %}"
    "{% if m.role == 'assistant' %}«{{ part['text'] + eos_token }}»{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
}
STRIPS_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
FIRST_ONLY = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]"
    "{{ messages[0].content if loop.last and m.role == 'user' }}{{ m.content }}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "It is a truth?"},
    {"role": "assistant", "content": "Universally — “acknowledged”, {{ naïve }}."},
    {"role": "user", "content": "a fortune"},
    {"role": "assistant", "content": "a man\nin possession"},
]


def folder_with(tmp_path, template, **settings):
    write_tokenizer_json(tmp_path, tokenizer_class="PreTrainedTokenizerFast", chat_template=template, **settings)
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_that_transformers_finds(family, tmp_path):
    plain, marked = tmp_path / "plain", tmp_path / "marked"
    for folder, marks in ((plain, ("", "")), (marked, ("{% generation %}", "{% endgeneration %}"))):
        folder.mkdir()
        folder_with(folder, FAMILIES[family].replace("«", marks[0]).replace("»", marks[1]))
    theirs, system = transformers.AutoTokenizer.from_pretrained(marked), {"role": "system", "content": "Be terse."}
    ours = ChatTemplate(plain)
    wide = [message | {"content": f" {message['content']}\n"} for message in TALK]
    for messages in (TALK[:2], TALK, [system, *TALK[:2]], [system, *TALK], [system, *wide, *TALK]):
        given = [
            m | {"content": [{"type": "text", "text": m["content"]}]} if family == "parts" else m for m in messages
        ]
        text, spans = ours.answers([message | {"name": None} for message in messages])
        assert text == theirs.apply_chat_template(given, tokenize=False)
        made = theirs.apply_chat_template(given, return_assistant_tokens_mask=True, return_dict=True)
        counted = [token for token, mask in zip(made["input_ids"], made["assistant_masks"], strict=True) if mask]
        assert theirs.decode(counted) == "".join(text[first:last] for first, last in spans)


def test_the_date_in_training_is_the_same_every_day(tmp_path):
    template = ChatTemplate(folder_with(tmp_path, "{{ strftime_now('%d %b %Y, %H:%M') }}" + CHATML))
    assert template.answers(TALK)[0].startswith("26 Jul 2024, 00:00<|im_start|>")


def test_what_a_template_cannot_write_is_refused(tmp_path):
    def template(text, name):
        (tmp_path / name).mkdir()
        return ChatTemplate(folder_with(tmp_path / name, text))

    plain = {family: text.replace("«", "").replace("»", "") for family, text in FAMILIES.items()}
    system, thought = {"role": "system", "content": "a"}, [*TALK[:1], {"role": "assistant", "content": "x</think>y"}]
    for number, (text, messages, fact) in enumerate([
        (MARKED, [{"role": "tool", "content": "3"}], "no role tool"),  # in the words of the template
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", TALK, "'assistant'"),
        (STRIPS_THOUGHTS, [*TALK[:1], {"role": "assistant", "content": "x</think>y"}, *TALK[2:]], "{% generation"),
        (plain["r1"], thought, "message 2"),
        (CHATML.replace("'<|im_end|>'", "('<b>' if loop.last and m.role[0] == 'a' else '<a>')"), TALK, "{% generation"),
        ("{{ '.' * (messages[0].content | length) }}" + plain["qwen3"], TALK, "{% generation"),
        (plain["smollm3"], [*TALK[:1], system, *TALK[1:]], "'system'"),
        (FIRST_ONLY, [system, *TALK[:2]], "'system'"),
    ]):  # fmt: skip
        with refused(tmp_path / str(number), fact):
            template(text, str(number)).answers(messages)
    with refused(tmp_path / "broken"):
        template("{% if %}", "broken")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with refused(tmp_path / "none", "chat_template.jinja"):
        ChatTemplate(tmp_path / "none")
