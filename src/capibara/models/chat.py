"""Chat templates: messages as the text that a model reads, and which of that text is its own answers.

A template is Jinja, as tokenizer_config.json brings it: a program from outside. It runs in Jinja's sandbox, which
gives it no way to files, modules or attributes that begin with an underscore.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capibara.distribution import NAME
from capibara.errors import rule_error

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["DEFAULT_TEMPLATE", "Message", "answer_spans", "check_messages", "render", "template_variables"]

Message = Mapping[str, Any]
"""A turn: "role", "content", and whatever else the template reads (tool_calls, name, ...)."""

DEFAULT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + end_of_turn + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For a tokenizer that brings none: ChatML, where a turn ends with <|im_end|> if that is a token, else with eos."""

_BEGIN, _END = "\U000f5a01", "\U000f5a02"  # private characters: marks inside of rendered text that no message has


def render(template: str, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any) -> str:
    """The text of a conversation; `variables` are the template's own (bos_token, tools, ...)."""
    return _rendered(template, messages, add_generation_prompt, variables).replace(_BEGIN, "").replace(_END, "")


@functools.lru_cache(maxsize=32)
def template_variables(template: str) -> frozenset[str]:
    """The names that a template reads and does not set itself: messages, tools, ..."""
    from jinja2 import meta

    environment = _compiled(template).environment
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


def answer_spans(
    template: str, messages: Sequence[Message], specials: Iterable[str], **variables: Any
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation and where the assistant's answers are in it, each with the token that ends it.

    A template that marks them itself (`{% generation %}`) is believed. For any other, an answer begins where the text
    of the messages before it ends, generation prompt included: there the model takes over when it is used. It ends
    where the text up to its message ends; or, for templates that write a turn differently once others follow it, at
    the special token after its content.
    """
    check_messages(messages)
    marked = _rendered(template, messages, False, variables)
    if _BEGIN in marked:
        return _marked_spans(marked)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            begin = _answer_begin(template, messages, number, marked, variables)
            end = _answer_end(template, messages, number, marked, begin, tuple(specials), variables)
            spans.append((begin, end))
    return marked, spans


def check_messages(messages: Sequence[Message]) -> None:
    """Whether this is a conversation: a list of turns, each with a role and what was said."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise rule_error(
            "messages is a list of turns",
            repr(messages)[:80],
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or not (isinstance(content, str | list) or (content is None and message.get("tool_calls")))
        ):
            raise rule_error(
                "Every turn has a role and a content",
                f"turn {number}: {repr(message)[:80]}",
                '{"role": "user", "content": "..."}',
            )


def _answer_begin(
    template: str, messages: Sequence[Message], number: int, text: str, variables: Mapping[str, Any]
) -> int:
    try:
        before = _rendered(template, messages[:number], True, variables)
    except ValueError as error:
        raise _no_spans(number, f"the messages before it do not render by themselves: {error}") from error
    if not text.startswith(before):
        raise _no_spans(number, f"the text before it changes with what follows, near {_parting(text, before)!r}")
    return len(before)


def _answer_end(
    template: str,
    messages: Sequence[Message],
    number: int,
    text: str,
    begin: int,
    specials: tuple[str, ...],
    variables: Mapping[str, Any],
) -> int:
    special = "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)"
    upto = _rendered(template, messages[: number + 1], False, variables)
    content = messages[number].get("content")
    content = content.strip() if isinstance(content, str) else ""
    if text.startswith(upto):
        said = text.rfind(content, begin, len(upto)) if content else begin
        after = begin if said < 0 else said + len(content)
        ends = [match.end() for match in re.finditer(special, text[after : len(upto)])]
        if ends:
            return after + ends[-1]
        # No token ends it: what the template writes after the content does, but for the space to the next turn.
        return len(upto) if text[after : len(upto)].isspace() else len(upto[begin:].rstrip()) + begin
    if content:
        turn = {**messages[number], "content": _before_space(messages[number]["content"], _END)}
        probe = _rendered(template, [*messages[:number], turn, *messages[number + 1 :]], False, variables)
        if probe.count(_END) == 1 and probe.replace(_END, "") == text:
            after = probe.index(_END)
            match = re.compile(rf"\s*(?:{special})").match(text, after)
            if match and after >= begin:
                return match.end()
    raise _no_spans(number, f"its own text changes with what follows, near {_parting(text, upto)!r}")


def _before_space(content: str, mark: str) -> str:
    end = len(content.rstrip())
    return content[:end] + mark + content[end:]


def _parting(text: str, other: str) -> str:
    """Where two texts part, with what stands around it."""
    at = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return text[max(at - 20, 0) : at + 20]


def _no_spans(number: int, why: str) -> ValueError:
    return rule_error(
        "The loss counts on answers only, so the chat template must show where an answer begins and ends",
        f"a template for which that cannot be said of turn {number}: {why}",
        "put {% generation %}...{% endgeneration %} around the answer in the template",
    )


def _marked_spans(marked: str) -> tuple[str, list[tuple[int, int]]]:
    text, spans, begin = "", [], 0
    for piece in re.split(f"([{_BEGIN}{_END}])", marked):
        if piece == _BEGIN:
            begin = len(text)
        elif piece == _END:
            spans.append((begin, len(text)))
        else:
            text += piece
    return text, spans


def _rendered(
    template: str, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
) -> str:
    program = _compiled(template)  # outside of the try below: its error is the template's, whatever the messages
    from jinja2 import TemplateError

    try:
        return program.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
    except (TemplateError, TypeError, ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise rule_error(
            "The chat template takes these messages",
            f"{type(error).__name__}: {error}",
            "change the messages to what the template expects (roles that alternate, a system turn first, ...)",
        ) from error


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, LoopControlExtension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError(f"Chat templates need jinja2: pip install '{NAME}[train]'") from error

    class Generation(Extension):
        """`{% generation %}` ... `{% endgeneration %}`: what the model says, put between marks."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # Jinja's own escapes < and > for HTML, which a model does not read.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise rule_error("A chat template is Jinja", f"line {error.lineno}: {error.message}", "mend it") from error
