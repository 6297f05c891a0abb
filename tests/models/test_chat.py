"""Chat templates: where answers are in the text, for templates as models have them, and what templates may do."""

from __future__ import annotations

from typing import Any

import pytest

from capibara.models.chat import answer_spans, render

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>", "</turn>")
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "second first"},
]

# Ways of writing turns that models in use have, each in a line or two of our own.
TEMPLATES: dict[str, tuple[str, list[str]]] = {
    "instructions, no generation prompt": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        [" first</s>", " second first</s>"],
    ),
    "headers": (
        "{{ bos_token }}"
        "{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}",
        ["first<|eot|>", "second first<|eot|>"],
    ),
    "renamed roles": (
        "{% for m in messages %}<turn>{{ {'assistant': 'model'}.get(m.role, m.role) }}\n"
        "{{ m.content }}</turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}",
        ["first</turn>", "second first</turn>"],
    ),
    "thoughts dropped from content": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ["first<|im_end|>", "second first<|im_end|>"],
    ),
    "space before the end": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} </s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        ["first </s>", "second first </s>"],
    ),
    "words end a turn": (
        "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n### end\n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant\n{% endif %}",
        ["first\n### end", "second first\n### end"],
    ),
}


def _answers(template: str, messages: list[dict[str, Any]], **variables: Any) -> list[str]:
    text, spans = answer_spans(template, messages, SPECIAL, bos_token="<s>", eos_token="</s>", **variables)
    assert text == render(template, messages, bos_token="<s>", eos_token="</s>", **variables)
    return [text[begin:end] for begin, end in spans]


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_found_with_their_end(name: str) -> None:
    template, wanted = TEMPLATES[name]
    assert _answers(template, CHAT) == wanted
    assert _answers(template, CHAT[:3]) == wanted[:1]
    assert _answers(template, CHAT[:1]) == []


def test_an_answer_may_spell_a_special_token_or_be_empty() -> None:
    template, _ = TEMPLATES["headers"]
    said = [CHAT[0], {"role": "assistant", "content": "it is <|eot|> that ends"}]
    assert _answers(template, said) == ["it is <|eot|> that ends<|eot|>"]
    assert _answers(template, [CHAT[0], {"role": "assistant", "content": ""}]) == ["<|eot|>"]


def test_a_call_of_a_tool_is_an_answer() -> None:
    template = (
        "{% for m in messages %}<turn>{{ m.role }}\n{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
        "{% else %}{{ m.content }}{% endif %}</turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
    )
    calls = [{"name": "clock"}]
    messages = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "9"}]
    assert _answers(template, messages) == ['[{"name": "clock"}]</turn>']


COUNTS = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_template_of_which_answers_cannot_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must show where an answer begins.*turn 1"):
        _answers(COUNTS, CHAT)
    assert render(COUNTS, CHAT[:1]) == "1hi"
    counts_and_changes = (  # the length of a content is part of the text, which is another for the last answer
        "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' and loop.last %}!{% endif %}"
        "{{ m.content | length }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    )
    with pytest.raises(ValueError, match="its own text changes with what follows"):
        _answers(counts_and_changes, CHAT)
    first = "{{ messages[0].content }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="the messages before it do not render by themselves"):
        _answers(first, CHAT[1:])


def test_templates_have_the_usual_functions_and_a_sandbox() -> None:
    def rendered(template: str) -> str:
        return render(template, [{"role": "user", "content": "<é>"}])

    assert rendered("{{ messages[0] | tojson }}") == '{"role": "user", "content": "<é>"}'
    assert rendered("{{ strftime_now('%Y') | length }}") == "4"
    assert rendered("{% for m in messages %}\n  {% if true %}\n{{ m.content }}{% endif %}\n{% endfor %}") == "<é>"
    assert rendered("{% for m in messages %}{% break %}{% endfor %}") == ""
    with pytest.raises(ValueError, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="SecurityError"):
        rendered("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match=r"A chat template is Jinja. Got line 2"):
        rendered("\n{% if %}")


@pytest.mark.parametrize(
    "messages",
    [[], "hi", [{"role": "user"}], [{"content": "x"}], ["hi"], [{"role": "user", "content": 3}]],
)
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(ValueError, match="turn"):
        answer_spans(COUNTS, messages, SPECIAL)
