"""Chat templates against transformers': the text, and which of it is an answer."""

import json

import pytest
import transformers
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
STRIPS_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
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


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_text_and_answers_are_those_of_transformers(template, tmp_path):
    folder = folder_with(tmp_path, template)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), ChatTemplate(folder)
    for messages in (TALK[:1], TALK[:2], TALK):
        for to_answer in (False, True):
            wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=to_answer)
            assert ours.render(messages, to_answer=to_answer) == wanted
    text, spans = ours.answers(TALK)
    assert text == ours.render(TALK)
    ends = {CHATML: "<|im_end|>\n", MARKED: "</s>"}[template]
    assert [text[first:last] for first, last in spans] == [m["content"] + ends for m in TALK[1::2]]
    if ours.marks_answers:  # their mask is of tokens, here of bytes at most
        made = theirs.apply_chat_template(TALK, return_assistant_tokens_mask=True, return_dict=True)
        counted = [token for token, mask in zip(made["input_ids"], made["assistant_masks"], strict=True) if mask]
        assert theirs.decode(counted) == "".join(text[first:last] for first, last in spans)


def test_what_a_template_cannot_write_is_refused(tmp_path):
    def template(text, name):
        (tmp_path / name).mkdir()
        return ChatTemplate(folder_with(tmp_path / name, text))

    for text, messages, said in [
        (MARKED, [{"role": "tool", "content": "3"}], "refuses these messages: no role tool"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", TALK, "place for the role 'assist"),
        (STRIPS_THOUGHTS, [*TALK[:1], {"role": "assistant", "content": "x</think>y"}, *TALK[2:]], "put {% generation"),
    ]:
        with pytest.raises(ValueError, match=said):
            template(text, str(len(list(tmp_path.iterdir())))).answers(messages)
    with pytest.raises(ValueError, match="is not valid"):
        template("{% if %}", "broken")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(ValueError, match="has no chat template"):
        ChatTemplate(tmp_path / "none")
