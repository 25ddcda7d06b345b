"""The messages of Anthropic's Messages API: turns of blocks, as a client sends them and as answers have them."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationInfo
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from baton.runtime.ignored_fields import IgnoredFields
from coordinator.openai.schema import MAX_PARTS
from coordinator.openai.validation import RequestObject, counted, validate
from coordinator.translate import MAX_MESSAGES

BILLING = "x-anthropic-billing-header:"
"""Claude Code begins its system prompt with a block of this text. It is for Anthropic's accounting and may differ in
each request, so that no prefix of the prompt would be cached."""
_MARKED = frozenset({"cache_control"})


class _Block(RequestObject):
    inert = _MARKED
    place = "messages.content"
    history = True


class TextBlock(_Block):
    type: Literal["text"]
    text: str


class SystemBlock(TextBlock):
    place = "system"


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    @property
    def text(self) -> str:
        """Returns the reasoning, also if the client did not want to see it."""
        return self.thinking or thinking_in(self.signature or "")


class CompactionBlock(_Block):
    """A summary, by another server, of the conversation before it; empty if it failed."""

    type: Literal["compaction"]
    content: str = ""

    @property
    def text(self) -> str:
        return self.content


class RedactedThinkingBlock(_Block):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    input: dict[str, Any] = Field(default_factory=dict)


class TextSource(RequestObject):
    place = "messages.content.source"

    type: Literal["text"]
    data: str
    media_type: str | None = None


class ContentSource(RequestObject):
    place = "messages.content.source"

    type: Literal["content"]
    content: list[TextBlock]


class DocumentBlock(_Block):
    type: Literal["document"]
    source: TextSource | ContentSource
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        source = self.source
        body = source.data if isinstance(source, TextSource) else joined(source.content)
        return "\n".join(filter(None, (self.title, self.context, body)))


class SearchResultBlock(_Block):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]

    @property
    def text(self) -> str:
        return "\n".join((self.title, self.source, joined(self.content)))


class ToolReferenceBlock(_Block):
    """Loads a tool whose definition has `defer_loading`."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: list[TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock] = Field(default_factory=list)
    is_error: bool | None = None

    @property
    def text(self) -> str:
        text = joined(self.content)
        return f"Error: {text}".rstrip() if self.is_error else text


class ReferencedTool(RequestObject):
    place = "messages.content.tool"

    type: Literal["tool_reference"]
    name: str


class ToolChangeBlock(_Block):
    """Adds or removes a tool from this place of the conversation on."""

    type: Literal["tool_addition", "tool_removal"]
    tool: ReferencedTool


Passage = TextBlock | DocumentBlock | SearchResultBlock | CompactionBlock
Block = (
    Passage
    | ToolReferenceBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolChangeBlock
)
_PASSAGES: dict[str, type[Block]] = {
    "text": TextBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
_RESULT: dict[str, type[Block]] = _PASSAGES | {"tool_reference": ToolReferenceBlock}
_BLOCKS: dict[str, dict[str, type[Block]]] = {
    "user": _PASSAGES | {"compaction": CompactionBlock, "tool_result": ToolResultBlock},
    "assistant": {
        "text": TextBlock,
        "compaction": CompactionBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
    "system": {"text": TextBlock, "tool_addition": ToolChangeBlock, "tool_removal": ToolChangeBlock},
}


class InputMessage(RequestObject):
    """One message. A `system` message applies from its place on."""

    inert = frozenset({"cache_control", "output_config"})
    place = "messages"
    history = True

    role: Literal["user", "assistant", "system"]
    content: list[Block] = Field(default_factory=list)
    clear_at: Literal["next_user_message", "never"] | None = None


class GivenTurn(RequestObject):
    """Only for the description of `messages`; `parsed_turns` checks them."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def joined(blocks: list[Any]) -> str:
    return "\n".join(filter(None, (block.text for block in blocks)))


def _runs_at_anthropic(kind: str) -> bool:
    """Returns whether a block of the history is a call or a result of a tool that Anthropic's servers run."""
    return kind in ("server_tool_use", "mcp_tool_use") or (kind.endswith("_tool_result") and kind != "tool_result")


def _blocks(value: Any, known: Mapping[str, type[Block]], param: str, ignored: IgnoredFields) -> list[Block]:
    if isinstance(value, str):
        return [TextBlock(type="text", text=value)]
    if not isinstance(value, list):
        raise InvalidRequest(f"'{param}': must be a string or an array of blocks", param=param)
    if len(value) > MAX_PARTS:
        raise InvalidRequest(f"'{param}': at most {MAX_PARTS} blocks, not {len(value)}", param=param)
    blocks = []
    for number, given in enumerate(value):
        place = f"{param}[{number}]"
        if not isinstance(given, dict):
            raise InvalidRequest(f"'{place}': must be an object", param=place)
        kind = given.get("type")
        if not isinstance(kind, str):
            raise _unknown_block("", known, place)
        if kind not in known and _runs_at_anthropic(kind):
            ignored.add("messages.content", kind)
            continue
        if kind == "redacted_thinking":
            ignored.add("messages.content", kind)
        if (model := known.get(kind)) is None:
            raise _unknown_block(kind, known, place)
        blocks.append(validate(model, _with_blocks(given, place, ignored), ignored, path=place))
    return blocks


def _unknown_block(kind: str, known: Mapping[str, type[Block]], place: str) -> InvalidRequest:
    if kind in ("image", "document", "container_upload"):
        return InvalidRequest(f"'{place}': {kind} blocks are not supported here: text only", param=place)
    message = f"'{place}.type': must be one of {', '.join(known)}"
    return InvalidRequest(message, param=f"{place}.type")


def _with_blocks(given: dict[str, Any], place: str, ignored: IgnoredFields) -> dict[str, Any]:
    """Returns a block whose own blocks are checked: the content of a result of a tool, or of the source of a
    document."""
    kind = given["type"]
    if kind == "tool_result" and given.get("content") is not None:
        return given | {"content": _blocks(given["content"], _RESULT, f"{place}.content", ignored)}
    source = given.get("source")
    if kind == "document" and isinstance(source, dict):
        form = source.get("type")
        if form not in ("text", "content"):
            message = f"'{place}.source': only documents of text are supported: 'type': 'text' or 'content'"
            raise InvalidRequest(message, param=f"{place}.source")
        if form == "content":
            blocks = _blocks(source.get("content"), {"text": TextBlock}, f"{place}.source.content", ignored)
            return given | {"source": ContentSource(type="content", content=blocks)}  # type: ignore[arg-type]
    return given


def parsed_turns(value: Any, info: ValidationInfo[IgnoredFields]) -> list[InputMessage]:
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("messages", "must be a non-empty array of messages")
    turns = []
    for number, given in enumerate(counted(MAX_MESSAGES, value)):
        place = f"messages[{number}]"
        if not isinstance(given, dict):
            raise InvalidRequest(f"'{place}': must be an object", param=place)
        role = given.get("role")
        if not isinstance(role, str) or role not in _BLOCKS:
            message = f"'{place}.role': must be one of {', '.join(_BLOCKS)}; use 'system' for a system prompt"
            raise InvalidRequest(message, param=f"{place}.role")
        content = given.get("content")
        if content is None and role != "system":
            message = f"'{place}.content' is required"
            raise InvalidRequest(message, code="missing_required_parameter", param=f"{place}.content")
        blocks = [] if content is None else _blocks(content, _BLOCKS[role], f"{place}.content", info.context)
        turns.append(validate(InputMessage, given | {"content": blocks}, info.context, path=place))
    return turns


def parsed_system(value: Any, info: ValidationInfo[IgnoredFields]) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("system", "must be a string or an array of text blocks")
    texts = []
    for number, given in enumerate(counted(MAX_PARTS, value)):
        text = validate(SystemBlock, given, info.context, path=f"system[{number}]").text
        if text.startswith(BILLING):
            info.context.add("system", BILLING.rstrip(":"))
        else:
            texts.append(text)
    return "\n".join(texts)


_PREFIX = "baton1."
MAX_CHARS = 1 << 20
"""Of the text in a signature: a few kilobytes may decompress to megabytes."""


def signature(hidden: str) -> str:
    """Returns a signature that holds a text, perhaps an empty one."""
    return _PREFIX + base64.b64encode(zlib.compress(hidden.encode())).decode()


def thinking_in(signature: str) -> str:
    """Returns the text in a signature, at most MAX_CHARS of it; empty if another server made it."""
    if not signature.startswith(_PREFIX):
        return ""
    try:
        packed = base64.b64decode(signature.removeprefix(_PREFIX), validate=True)
        return zlib.decompressobj().decompress(packed, MAX_CHARS).decode(errors="ignore").replace("\0", "")
    except (binascii.Error, ValueError, zlib.error):
        return ""
