"""What a model reads: conversations by its chat template, prompts as text or token ids."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from capibara.errors import rule_error
from capibara.models.chat import check_messages, template_variables
from capibara.models.tokenizer import Tokenizer
from capibara.serve.http.errors import bad_request
from capibara.serve.http.schema import ChatRequest, CompletionRequest, FunctionTool, Message
from capibara.serve.http.templates import SECONDS as TEMPLATE_SECONDS
from capibara.serve.http.templates import TemplateLimit, TemplateProcesses
from capibara.serve.link import ModelCard
from capibara.serve.tools.formats import parser_for, parser_of

__all__ = ["DEFAULT_TOOL_TEMPLATE", "Prompts", "check_template"]

DEFAULT_TOOL_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|im_start|>system\n' }}"
    "{% if messages and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{{ 'Functions that may be called, as JSON:\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ 'A call is written <tool_call>{\"name\": ..., \"arguments\": {...}}</tool_call>' + end_of_turn + '\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}"
    "{{ end_of_turn + '\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For a tokenizer that brings none: the same text as the default of training, and tools as Hermes has them."""


_PROBE = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


def check_template(tokenizer: Tokenizer, template: str | None = None) -> None:
    """Refuse a template that reaches for what its sandbox does not give, or that does not end, before anybody asks
    anything."""
    import jinja2

    tokenizer = _with_template(tokenizer, template)
    _check_it_ends(tokenizer)
    try:
        tokenizer.render_chat(_PROBE[:1], True)
    except ValueError as error:
        if isinstance(error.__cause__, jinja2.exceptions.SecurityError):
            raise rule_error(
                "A chat template works on its messages alone", str(error.__cause__), "do not use this model's template"
            ) from error
        if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
            raise


def _check_it_ends(tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_template
    if template is None or template == DEFAULT_TOOL_TEMPLATE:
        return
    processes = TemplateProcesses(template, seconds=TEMPLATE_SECONDS)
    try:
        for turns, prompted in ((_PROBE[:1], True), (_PROBE, False)):  # what is rendered without a bound later on
            try:
                processes.render(turns, prompted, tokenizer.chat_variables({}))
            except TemplateLimit as limit:
                raise rule_error(
                    "A chat template renders a short conversation in no time", str(limit), "use another template"
                ) from limit
            except ValueError:  # it takes other turns; what else may be wrong with it is seen below
                continue
    finally:
        processes.close()


def _with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    ours = copy.copy(tokenizer)
    ours.chat_template = template or tokenizer.chat_template or DEFAULT_TOOL_TEMPLATE
    return ours


class Prompts:
    """The tokens that a request's prompt is, for one model."""

    def __init__(
        self, tokenizer: Tokenizer, card: ModelCard, *, template: str | None = None, tool_parser: str | None = None
    ) -> None:
        self.tokenizer = _with_template(tokenizer, template)
        self.card = card
        assert self.tokenizer.chat_template is not None
        self.tool_parser = parser_for(self.tokenizer.chat_template) if tool_parser is None else parser_of(tool_parser)
        self._reads = template_variables(self.tokenizer.chat_template)
        # Our own does no more than its messages ask for.
        ours = self.tokenizer.chat_template == DEFAULT_TOOL_TEMPLATE
        self._processes = None if ours else TemplateProcesses(self.tokenizer.chat_template)
        self.turn_ends = _turn_ends(self.tokenizer)
        """Tokens other than the end of text that end an answer of a conversation."""
        # With log-probabilities a token is shown with 20 others, the same ones again and again.
        self.token_text = functools.lru_cache(maxsize=1 << 16)(self._token_text)

    # Conversations.

    def chat(self, body: ChatRequest) -> list[int]:
        messages = [self._turn(number, message) for number, message in enumerate(body.messages)]
        if not messages:
            raise bad_request("messages has a turn or more. Got none. Fix: add a user's.", "messages")
        variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
        for name in ("messages", "add_generation_prompt", "self", "template"):  # "self" is Jinja's own word
            if name in variables:
                raise bad_request(
                    f"chat_template_kwargs are what a template reads beside messages. Got {name!r}. Fix: leave it out.",
                    f"chat_template_kwargs.{name}",
                )
        if body.tools and body.tool_choice != "none":
            variables["tools"] = self._tools(body.tools)
        try:
            text = self._rendered(messages, variables)
        except ValueError as error:
            raise bad_request(str(error), "messages", code="chat_template") from None
        return self._encoded(text, "messages", special=True)

    def _rendered(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        if self._processes is None:
            return self.tokenizer.render_chat(messages, True, **variables)
        check_messages(messages)
        return self._processes.render(messages, True, self.tokenizer.chat_variables(variables))

    def close(self) -> None:
        """End the processes that render templates."""
        if self._processes is not None:
            self._processes.close()

    def _tools(self, tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
        if "tools" not in self._reads:
            raise bad_request(
                "This model's chat template takes no tools. Got some. Fix: leave them out, or start the server with "
                "--chat-template FILE.",
                "tools",
                code="unsupported_parameter",
            )
        shown = []
        for tool in tools:
            function = msgspec.to_builtins(tool.function)
            kept = {name: value for name, value in function.items() if value is not None and name != "strict"}
            shown.append({"type": "function", "function": kept})
        return shown

    def _turn(self, number: int, message: Message) -> dict[str, Any]:
        where = f"messages[{number}]"
        # Templates know no developer: OpenAI's newer word for whoever else says "system".
        turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
        for name in ("audio", "function_call"):  # null in what clients send back; else a part of the conversation
            if getattr(message, name) is not None:
                raise bad_request(
                    f"{name} of a turn is not implemented. Got one. Fix: send text, and calls as tool_calls.",
                    f"{where}.{name}",
                    code="unsupported_parameter",
                )
        turn["content"] = _text_of(message, where)
        if message.tool_calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": _called(call, f"{where}.tool_calls[{place}]")}
                for place, call in enumerate(message.tool_calls)
            ]
        if message.role == "tool" and message.tool_call_id is None:
            raise bad_request(
                "A tool's turn names the call that it answers. Got none. Fix: add tool_call_id.",
                f"{where}.tool_call_id",
            )
        for name in ("name", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                turn[name] = value
        return turn

    # Prompts.

    def completion(self, body: CompletionRequest) -> list[list[int]]:
        """A prompt's tokens, for each: one text, several, tokens, or several lists of tokens."""
        prompt = body.prompt
        if isinstance(prompt, str):
            return [self._of_text(prompt, "prompt")]
        if not prompt:
            raise bad_request("prompt has one or more. Got an empty list. Fix: add one.", "prompt")
        if all(isinstance(one, str) for one in prompt):
            return [self._of_text(one, f"prompt[{number}]") for number, one in enumerate(prompt)]
        if all(type(one) is int for one in prompt):
            return [self._of_ids(prompt, "prompt")]
        if all(isinstance(one, list) for one in prompt):
            return [self._of_ids(one, f"prompt[{number}]") for number, one in enumerate(prompt)]
        number = next(n for n, one in enumerate(prompt) if type(one) is not type(prompt[0]))
        raise bad_request(
            f"prompt is text, a list of texts, a list of token ids, or a list of such lists. Got "
            f"{type(prompt[0]).__name__} and {type(prompt[number]).__name__} in one list. Fix: send one kind.",
            f"prompt[{number}]",
            code="invalid_type",
        )

    def _of_text(self, text: str, where: str) -> list[int]:
        bos = self.tokenizer.bos_id
        begin = [bos] if self.card.prompt_bos and bos is not None else []
        return begin + self._encoded(text, where, special=False, may_be_empty=bool(begin))

    def _of_ids(self, ids: list[Any], where: str) -> list[int]:
        for number, id in enumerate(ids):
            if type(id) is not int or not 0 <= id < self.card.vocab_size:
                raise bad_request(
                    f"Token ids of this model are whole numbers from 0 to {self.card.vocab_size - 1}. "
                    f"Got {str(id)[:40]}. Fix: use its own tokenizer.",
                    f"{where}[{number}]",
                    code="invalid_type",
                )
        if not ids:
            raise bad_request("A prompt has a token or more. Got none. Fix: begin with the bos token.", where)
        return ids

    def _encoded(self, text: str, where: str, *, special: bool, may_be_empty: bool = False) -> list[int]:
        try:
            ids = self.tokenizer.encode(text, special=special)
        except ValueError as error:  # halves of surrogate pairs
            raise bad_request(str(error), where, code="invalid_utf8") from None
        if not ids and not may_be_empty:
            raise bad_request("A prompt has a token or more. Got an empty text. Fix: write something.", where)
        return ids

    # Tokens as clients are shown them.

    @functools.cached_property
    def _special(self) -> dict[int, str]:
        return {id: text for text, id in self.tokenizer.special_tokens.items()}

    def _token_text(self, token: int) -> tuple[str, list[int] | None]:
        """One token's text and bytes; of a part of a character the bytes are known of a byte tokenizer alone."""
        if token in self._special:
            text = self._special[token]
            return text, list(text.encode())
        if token >= self.tokenizer.vocab_size:
            return "", None  # beyond the tokenizer's: rows that pad the model's table
        text = self.tokenizer.decode([token])
        if "\ufffd" in text:
            return text, [token] if self.tokenizer.fingerprint.startswith("bytes-") else None
        return text, list(text.encode())


def _turn_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the template writes after an answer, where it is a token of its own: <|im_end|>, <end_of_turn>, ..."""
    try:
        ids, answered = tokenizer.encode_chat(_PROBE)
    except ValueError:  # a template that takes other turns, or does not show where an answer ends
        return ()
    last = [id for id, own in zip(ids, answered, strict=True) if own][-1:]
    return tuple(id for id in last if id in tokenizer.special_tokens.values() and id != tokenizer.eos_id)


_TEXTS = {"text": "text", "input_text": "text", "refusal": "refusal"}
"""A part's type -> where its text stands."""


def _text_of(message: Message, where: str) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise bad_request("A turn has content. Got none. Fix: write some.", f"{where}.content")
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        text = part.get(_TEXTS.get(str(part.get("type")), ""))
        if not isinstance(text, str):
            raise bad_request(
                f"A part of a turn is text. Got {str(part.get('type'))[:40]!r}. Fix: send "
                '{"type": "text", "text": "..."}; this server reads no images or sound.',
                f"{where}.content[{number}]",
                code="invalid_type",
            )
        texts.append(text)
    return "\n".join(texts)


def _called(call: Any, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise bad_request(
            f"The arguments of a call are JSON. Got {error}. Fix: send back what the model wrote.",
            f"{where}.function.arguments",
        ) from None
    return {"name": call.function.name, "arguments": arguments}
