"""Incremental parsing of tool calls and reasoning in the text of a model, however the text is split.

Each family of models writes calls in its own form, as specified in its chat template:

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>     Qwen 2.5 and 3, Hermes
    llama3        {"name": "f", "parameters": {...}}; {...}                    Llama 3.1 and later
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], newer: [TOOL_CALLS]f[ARGS]{...}
    harmony       <|channel|>commentary to=functions.f<|message|>{...}<|call|>  gpt-oss
    qwen3_coder   <tool_call><function=f><parameter=a>1</parameter></function></tool_call>  also Qwen 3.5 and later
    glm45         <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>  GLM 4.5 and later
    deepseek_v3   <｜tool▁call▁begin｜>function<｜tool▁sep｜>f and a block of JSON, then <｜tool▁call▁end｜>  V3, R1
    deepseek_v31  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

Reasoning is between <think> and </think>, in harmony in the analysis channel. An apparent call that ends before its
name is recognized, or turns out not to be one, is text; the calls after it are calls. A marker ends a call whose braces
are not closed.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.text.object_calls import (
    CALL_BEGIN,
    CALL_END,
    CALL_SEP,
    CALLS_BEGIN,
    CALLS_END,
    DeepSeekParser,
    HermesParser,
    LlamaParser,
    MistralParser,
)
from coordinator.text.parser import Event, Parser, Text
from coordinator.text.tagged_calls import Functions, GlmParser, QwenCoderParser

FORMATS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "deepseek_v3": (CALLS_BEGIN, CALL_BEGIN, CALL_SEP, CALL_END, CALLS_END),
    "deepseek_v31": (CALLS_BEGIN, CALL_BEGIN, CALL_SEP, CALL_END, CALLS_END),
}
"""The forms by name, with their markers; markers that are special tokens are kept in the text."""
THINK = ("<think>", "</think>")


def detect_format(template: str) -> str | None:
    """Returns the form of calls in a chat template, None if it has no tools or an unknown form."""
    if "tools" not in template:
        return None
    if "<|channel|>" in template and "<|start|>" in template:
        return "harmony"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        if "<arg_key>" in template:
            return "glm45"
        return "qwen3_coder" if "<function=" in template else "hermes"
    if CALLS_BEGIN in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and "parameters" in template):
        return "llama3"
    return None


def make_parser(
    form: str | None, functions: Functions, *, thinks: bool, thinking: bool = False, one_call: bool = False
) -> Parser | None:
    """Returns a parser of calls in this form, if there are functions to call, and of reasoning, if the model `thinks`;
    `thinking`: the prompt ends within its reasoning; `one_call`: only the first call is returned. None if there is
    nothing to parse."""
    parser: Parser | None = None
    match form if functions else None:
        case "hermes":
            parser = HermesParser()
        case "llama3":
            parser = LlamaParser(frozenset(functions))
        case "mistral":
            parser = MistralParser()
        case "qwen3_coder":
            parser = QwenCoderParser(functions)
        case "glm45":
            parser = GlmParser(functions)
        case "deepseek_v3" | "deepseek_v31":
            parser = DeepSeekParser()
    harmony = form == "harmony"  # it reads reasoning by itself
    if harmony and (thinks or functions):
        parser = HarmonyParser(calls=bool(functions))
    if parser is not None:
        parser.one_call = one_call
    return ThinkParser(parser, thinking) if thinks and not harmony else parser


class HarmonyParser(Parser):
    """Parses consecutive messages: a head, which names the channel and perhaps a tool, and a body. State: the method
    that receives the current body."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self._calls = calls
        self._give: Callable[[str], None] = self._emit_text
        self._state = self._begin

    @property
    def reasoning(self) -> bool:
        return self._state == self._body and self._give == self._emit_reasoning

    def _begin(self) -> bool:
        """Detects messages, or text that a grammar forced. The prompt ends with the role, which a tool's name may
        follow."""
        if not self._pending:
            return False
        heads = ("<|channel|>", "<|start|>", " to=")
        if any(head.startswith(self._pending[: len(head)]) for head in heads):
            if not self._pending.startswith(heads):
                return False
            return self._go(self._head if self._pending.startswith(" to=") else self._between)
        return self._go(self._as_text)

    def _between(self) -> bool:
        _, marker = self._up_to("<|channel|>", "<|start|>")
        return bool(marker) and self._go(self._head)

    def _head(self) -> bool:
        if "<|message|>" not in self._pending:
            return False
        head, _ = self._up_to("<|message|>")
        head = head.replace("<|channel|>", " ").replace("<|constrain|>", " ")
        to = next((word.removeprefix("to=") for word in head.split() if word.startswith("to=")), "")
        if to and self._calls:
            self._begin_call(to.removeprefix("functions."))
            self._give = self._emit_arguments
        else:
            self._give = self._emit_reasoning if "analysis" in head.split() else self._emit_text
        return self._go(self._body)

    def _body(self) -> bool:
        text, marker = self._up_to("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        self._give(text)
        return bool(marker) and self._go(self._head if marker == "<|start|>" else self._between)

    def finish(self) -> list[Event]:
        if self._state == self._body:
            self._give(self._pending)
            self._pending = ""
        return super().finish()


class ThinkParser(Parser):
    """Separates the reasoning, and passes the remaining text to another parser. State: content that may be the
    beginning of an end tag, and whether one was just dropped."""

    def __init__(self, behind: Parser | None, thinking: bool) -> None:
        super().__init__()
        self._parser = behind
        self._content, self._blank = "", False
        self._state = self._thinks if thinking else self._begin

    @property
    def reasoning(self) -> bool:
        return self._state == self._thinks

    def _begin(self) -> bool:
        text = self._pending.lstrip()
        if "<think>".startswith(text[:7]) and len(text) < 7:
            return False
        thinks = text.startswith("<think>")
        if thinks:
            self._pending = text.removeprefix("<think>")
        return self._go(self._thinks if thinks else self._outside)

    def _thinks(self) -> bool:
        text, marker = self._up_to("</think>")
        self._emit_reasoning(text)
        return bool(marker) and self._go(self._after_think)

    def _after_think(self) -> bool:
        """Skips the blank lines after the reasoning."""
        return self._skip() and self._go(self._outside)

    def _outside(self) -> bool:
        text, self._pending = self._pending, ""
        self._filter([Text(text)] if self._parser is None else self._parser.push(text))
        return False

    def _filter(self, events: list[Event]) -> None:
        """Passes events on, without end tags in the content and the blank lines after them: the reasoning began in the
        prompt, or the model left its beginning out."""
        for event in events:
            if not isinstance(event, Text):
                self._emit_text(self._content)
                self._content, self._blank = "", False
                self._events.append(event)
                continue
            self._content += event.text
            while True:
                self._content = self._content.lstrip() if self._blank else self._content
                self._blank = self._blank and not self._content
                before, tag, after = self._content.partition("</think>")
                if not tag:
                    break
                self._emit_text(before)
                self._content, self._blank = after, True
            keep = max(n for n in range(8) if n == 0 or self._content.endswith("</think>"[:n]))
            self._emit_text(self._content[: len(self._content) - keep])
            self._content = self._content[len(self._content) - keep :]

    def finish(self) -> list[Event]:
        if self._state == self._thinks:
            self._emit_reasoning(self._pending)
        else:
            self._filter([Text(self._pending)] if self._parser is None else self._parser.push(self._pending))
        self._pending = ""
        if self._parser is not None:
            self._filter(self._parser.finish())
        self._emit_text(self._content)
        self._content = ""
        return self._taken()
