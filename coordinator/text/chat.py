"""Converts messages to token ids so that no text of a client can become a control token.

    messages -> guard (mark what spells a control token) -> template -> alias (the template's own control tokens get
    names no client can write) -> unmark -> one encoding, by a tokenizer that knows only the aliases

A client's `<|im_end|>` is therefore encoded as plain text, in its position, and a conversation without such text gets
exactly the same ids as in transformers. Marks and aliases are made of two Unicode noncharacters, which exist for
internal use; text that contains them is refused.

Tools for a chat template that has none: a system message describes them, and calls and results are plain text.

The form is that of Hermes and Qwen, which many models have seen and `HermesParser` reads:

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

Results are a user's message, each between `<tool_response>` tags. A template that takes no system message gets the
description before the first user's message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import orjson
import xxhash
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from coordinator.text.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message, its content as one text. `role` is system, developer, user, assistant or tool; `tool_calls` are as
    chat templates expect them: with the arguments as an object, or as text if a model wrote something else. `reasoning`
    is what an assistant wrote before its content."""

    role: str
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    reasoning: str = ""


_ALIAS = "\ufdd0"
_MARK = "\ufdd1"
_HERE = "\ufdd2"  # the end of a message that is continued
MAX_DEPTH = 100
SLICE = 64 * 1024
"""Characters or ids processed per call: other threads run between two calls, so the event loop waits about 2 ms."""
# Keys and constants of tools and calls. None of them is a control token, alone or with the JSON syntax around it.
SCHEMA_WORDS = frozenset(
    [
        *("type", "function", "name", "description", "parameters", "strict", "id", "arguments", "properties", "items"),
        *("object", "array", "string", "number", "integer", "boolean", "null", "required", "enum", "anyOf", "default"),
    ]
)


@dataclass(frozen=True, slots=True)
class Rendering:
    """How messages become a prompt: the `tools` for the template, whether the beginning of an answer is appended to the
    messages, whether instead the last message stays open for the model to continue, and additional template
    `variables`."""

    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


PLAIN = Rendering()
RESERVED_VARIABLES = frozenset(["add_generation_prompt", "documents", "messages", "tools"])


@dataclass(frozen=True, slots=True)
class _Traits:
    """What a template does with messages, found by rendering some. `parts` are the roles whose content it reads only as
    a list of parts; `system`: it takes system messages; `text_arguments`: it takes the arguments of a call as text;
    `short_ids`: it refuses ids of calls unless they are nine letters and digits, as Mistral's do; `one_call`: it shows
    only the first of several calls in a message (gpt-oss), or refuses them (Llama 3.1)."""

    parts: frozenset[str]
    system: bool
    text_arguments: bool
    short_ids: bool
    one_call: bool


_PROBE = "Probe7"
_NO_ARGUMENTS: dict[str, Any] = {}


class ChatEncoder:
    """A chat template with its tokenizer. Control tokens are the special tokens and the added tokens that the template
    can write. `parts` is the tokenizer's parsed JSON, if the caller has it. State: what the template does with
    messages, once it has been tried."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, parts: Mapping[str, Any] | None = None) -> None:
        self.template = template
        self.has_tools = "tools" in template.source
        self._maps_developer = "developer" not in template.source
        self._traits: _Traits | None = None
        literals = template.literals()
        added = tokenizer.get_added_tokens_decoder().values()
        controls = [t.content for t in added if t.special or t.content in literals]
        self._controls = ControlTokens(tokenizer, parts or orjson.loads(tokenizer.to_str()), controls)

    def check(self) -> None:
        """Raises StartupError if the template does not compile; tries what it does with messages."""
        self.template.check()
        self._traits = self._tried()

    def render(self, messages: Sequence[ChatMessage], how: Rendering = PLAIN, *, guard: bool = False) -> str:
        """Returns the prompt as text; with `guard`, text that spells control tokens is marked.

        Raises:
            InvalidRequest: the template refused the messages, or the last message cannot be continued.
        """
        clean = self._controls.guard if guard else str
        traits = self._traits = self._traits or self._tried()
        tools = how.tools
        if not self.has_tools:
            messages, tools = as_plain_messages(messages, tools, system=traits.system), ()
        elif traits.one_call:
            messages = _with_one_call_each(messages)
        values: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            role = "system" if message.role == "developer" and self._maps_developer else message.role
            value = _template_value(message, traits)
            values.append({k: _cleaned(v, clean, f"messages[{index}].{k}") for k, v in value.items()} | {"role": role})
        final: str = values[-1]["content"]
        if how.continue_final_message:
            values[-1]["content"] = final + _HERE
        for value in values:
            if value["role"] in traits.parts:
                value["content"] = [{"type": "text", "text": value["content"]}]
        rendered = self.template.render(
            values,
            tools=_cleaned(list(tools), clean, "tools") or None,
            add_generation_prompt=how.add_generation_prompt,
            variables=_cleaned(how.variables, clean, "chat_template_kwargs"),
        )
        if not how.continue_final_message:
            return rendered
        core, before = final.strip(), rendered.rpartition(_HERE)[0]
        if not core or core not in before:
            problem = "continue_final_message: the chat template does not render the last message unchanged"
            raise InvalidRequest(problem, param="continue_final_message")
        for text in (final, core):  # of a template that renders it twice
            before = before.replace(text + _HERE, text)
        # Blanks at its end count, also if the template strips them.
        return before.rstrip() + final[len(final.rstrip()) :] if before.rstrip().endswith(core) else before

    def _tried(self) -> _Traits:
        parts: set[str] = set()

        def content(role: str, text: str) -> Any:
            return [{"type": "text", "text": text}] if role in parts else text

        def shows(role: str) -> bool:
            messages = [{"role": role, "content": content(role, _PROBE)}]
            if role != "user":
                messages.insert(int(role == "system"), {"role": "user", "content": content("user", "Hi")})
            return self._shows(messages)

        shown = set[str]()
        for role in ("user", "system", "assistant", "tool"):
            if shows(role):
                shown.add(role)
                continue
            parts.add(role)
            if shows(role):
                shown.add(role)
            else:
                parts.discard(role)

        def calls(*names: str, call_id: str = "abcdefghi", arguments: Any = _NO_ARGUMENTS) -> bool:
            made = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for name in names
            ]
            calling = {"role": "assistant", "content": content("assistant", ""), "tool_calls": made}
            return self._shows([{"role": "user", "content": content("user", "Hi")}, calling])

        one = calls(_PROBE)
        return _Traits(
            frozenset(parts),
            "system" in shown,
            text_arguments=calls("f", arguments=_PROBE),
            short_ids=one and not calls(_PROBE, call_id="call_abcdefghijk"),
            one_call=one and not calls("f", _PROBE),
        )

    def _shows(self, messages: list[dict[str, Any]]) -> bool:
        try:
            return _PROBE in self.template.render(messages)
        except InvalidRequest:
            return False

    def encode_rendered(self, guarded: str) -> list[int]:
        """Returns the ids of a text that `render` made with `guard`. Blocks: call it from a thread."""
        return self._controls.encode(guarded)


def _with_one_call_each(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns a conversation in which calls of the same message follow each other, each with its result behind it."""
    made: list[ChatMessage] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.tool_calls) < 2:
            made.append(message)
            continue
        results = list(takewhile(lambda each: each.role == "tool", messages[at:]))
        at += len(results)
        for number, call in enumerate(message.tool_calls):
            caller = message if number == 0 else ChatMessage("assistant", "")
            made.append(replace(caller, tool_calls=(call,)))
            own = next((n for n, each in enumerate(results) if each.tool_call_id == call["id"]), None)
            if own is not None:
                made.append(results.pop(own))
        made += results
    return made


def _template_value(message: ChatMessage, traits: _Traits) -> dict[str, Any]:
    """Returns a message under the names that templates use."""
    value: dict[str, Any] = {"content": message.content}
    if message.name is not None:
        value["name"] = message.name
    if message.tool_call_id is not None:
        value["tool_call_id"] = _short_id(message.tool_call_id) if traits.short_ids else message.tool_call_id
    if message.tool_calls:
        value["tool_calls"] = [_template_call(call, traits) for call in message.tool_calls]
    if message.reasoning:
        value |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
        if not (message.content and message.tool_calls):  # gpt-oss's refuses both together with calls
            value["thinking"] = message.reasoning
    return value


def _template_call(call: Mapping[str, Any], traits: _Traits) -> Mapping[str, Any]:
    """Returns a call; arguments that are not an object become one for a template that does not take text."""
    if traits.short_ids:
        call = {**call, "id": _short_id(call["id"])}
    function = call["function"]
    if traits.text_arguments or not isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}


def _short_id(name: str) -> str:
    """Returns nine letters and digits for the id of a call, whatever server made it."""
    return name if _SHORT_ID.fullmatch(name) else xxhash.xxh3_64_hexdigest(name.encode())[:9]


_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


def _cleaned(value: Any, clean: Callable[[str], str], param: str, depth: int = 0) -> Any:
    """Returns a JSON value with every string cleaned, except nested SCHEMA_WORDS, which templates compare with.

    Raises:
        InvalidRequest: a noncharacter that is used as a mark, or a value nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"'{param}' is nested more than {MAX_DEPTH} levels deep", param=param)
    if isinstance(value, str):
        if _ALIAS in value or _MARK in value:
            raise InvalidRequest("U+FDD0 and U+FDD1 are noncharacters and not accepted", param=param)
        return value if depth and value in SCHEMA_WORDS else clean(value)
    if isinstance(value, Mapping):
        return {
            _cleaned(key, clean, param, depth + 1): _cleaned(inner, clean, param, depth + 1)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_cleaned(inner, clean, param, depth + 1) for inner in value]
    return value


class ControlTokens:
    """Distinguishes a template's control tokens from client text that spells them, within one encoding."""

    def __init__(self, tokenizer: Tokenizer, parts: Mapping[str, Any], controls: Iterable[str]) -> None:
        longest_first = sorted({c for c in controls if c}, key=lambda c: (-len(c), c))
        either = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._spelled = re.compile(either)
        self._written = re.compile(f"(?:{either})(?!{_MARK})")
        self._beginnings = {c[:n] for c in longest_first for n in range(1, len(c))}
        self._endings = {c[n:] for c in longest_first for n in range(1, len(c))}
        self._longest = max(map(len, longest_first), default=0)
        self._aliases = {content: f"{_ALIAS}{index}{_ALIAS}" for index, content in enumerate(longest_first)}
        self._to_mark = {content: (1, content[0] + _MARK) for content in longest_first}
        self._to_alias = {content: (len(content), alias) for content, alias in self._aliases.items()}
        self._tokenizer = self._with_aliases(parts)
        self._ids = self._translation(tokenizer)
        own = (self._tokenizer.token_to_id(content) for content in longest_first)
        self._forbidden = {i for i in own if i is not None} - set(self._ids)

    def guard(self, text: str) -> str:
        """Returns `text` with a mark inside everything that spells a control token, and at each edge where the
        template's adjacent text could complete one (also after trimming)."""
        core = text.strip()
        lead, tail = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :] if core else ""
        lengths = range(1, min(self._longest, len(core) + 1))
        ends = [len(core) - n + 1 for n in lengths if core[-n:] in self._beginnings]
        continues = any(core[:n] in self._endings for n in lengths)
        continues = continues or (len(core) < self._longest and any(core in c for c in self._aliases))
        for end in ends:  # from the last to the first: earlier positions stay valid
            core = core[:end] + _MARK + core[end:]
        core = self._replaced(self._spelled, core, self._to_mark)
        return lead + (_MARK if continues and core else "") + core + tail

    def encode_text(self, text: str, param: str) -> list[int]:
        """Returns the ids of a client's text, none of them a control token. Raises InvalidRequest as `encode`, and for
        a noncharacter that is used as a mark."""
        return self.encode(_cleaned(text, self.guard, param), param)

    def encode(self, rendered: str, param: str = "messages") -> list[int]:
        """Returns the ids of a text in which the client's parts are guarded.

        Raises:
            InvalidRequest: a control token that this tokenizer cannot encode as text.
        """
        aliased = self._replaced(self._written, rendered, self._to_alias).replace(_MARK, "")
        ids = self._tokenizer.encode_batch_fast([aliased], add_special_tokens=False)[0].ids  # releases the GIL
        forbidden = self._forbidden
        if forbidden and not all(forbidden.isdisjoint(ids[at : at + SLICE]) for at in range(0, len(ids), SLICE)):
            message = f"'{param}' contains a control token that this tokenizer cannot encode as text"
            raise InvalidRequest(message, param=param)
        ids_of = self._ids
        return [ids_of.get(i, i) for i in ids]

    def _replaced(self, pattern: re.Pattern[str], text: str, by: Mapping[str, tuple[int, str]]) -> str:
        """Returns `text` with each match replaced; `by` has how many of its characters to replace, and the new text.
        Searches slice by slice; a match may end after the slice in which it begins."""
        whole: list[str] = []
        at = 0
        for end in range(SLICE, len(text) + SLICE, SLICE):
            pieces: list[str] = []
            while at < end and (marker := pattern.search(text, at, end + self._longest)) and marker.start() < end:
                length, new = by[marker[0]]
                pieces += (text[at : marker.start()], new)
                at = marker.start() + length
            pieces.append(text[at:end])
            at = max(at, end)
            whole.append("".join(pieces))
        return "".join(whole)

    def _with_aliases(self, parts: Mapping[str, Any]) -> Tokenizer:
        added = [t | {"content": self._aliases.get(t["content"], t["content"])} for t in parts["added_tokens"]]
        return Tokenizer.from_buffer(orjson.dumps({**parts, "added_tokens": added, "post_processor": None}))

    def _translation(self, tokenizer: Tokenizer) -> dict[int, int]:
        """Maps the ids of all added tokens, also aliases, in the tokenizer with aliases to the model's ids."""
        names = {alias: content for content, alias in self._aliases.items()}
        added = self._tokenizer.get_added_tokens_decoder().items()
        pairs = ((ours, tokenizer.token_to_id(names.get(token.content, token.content))) for ours, token in added)
        return {ours: theirs for ours, theirs in pairs if theirs is not None}


_DESCRIPTION = """You may call functions. These are their signatures, one JSON object a line:
<tools>
{signatures}
</tools>
To call a function, write its name and arguments as a JSON object between tags, once for each call:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


def as_plain_messages(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], *, system: bool
) -> list[ChatMessage]:
    """Returns a conversation without calls and results of tools, with the description of `tools`, if there are any.
    `system`: the template takes system messages."""
    plain: list[ChatMessage] = []
    results = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if results:
                plain[-1] = replace(plain[-1], content=f"{plain[-1].content}\n{text}")
            else:
                plain.append(ChatMessage("user", text))
        elif message.tool_calls:
            texts = [message.content] if message.content else []
            texts += map(_call, message.tool_calls)
            plain.append(replace(message, content="\n".join(texts), tool_calls=()))
        else:
            plain.append(message)
        results = message.role == "tool"
    return _described(plain, tools, system) if tools else plain


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>'


def _described(messages: list[ChatMessage], tools: Sequence[Mapping[str, Any]], system: bool) -> list[ChatMessage]:
    signatures = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _DESCRIPTION.format(signatures=signatures)
    roles = ("system", "developer") if system else ("user",)
    at = next((i for i, message in enumerate(messages) if message.role in roles), None)
    if at is None or (system and at > 0):
        return [ChatMessage("system" if system else "user", text), *messages]
    texts = (messages[at].content, text) if system else (text, messages[at].content)
    messages[at] = replace(messages[at], content="\n\n".join(filter(None, texts)))
    return messages
