"""Chat templates with tools in the formats of several model families, and texts with calls in each format."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

HERMES = """{%- if tools %}<|im_start|>system
You may call functions. They are: <tools>
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>. Write <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% if message.tool_calls %}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA3 = """{%- if tools %}<|start_header_id|>system<|end_header_id|>

Answer with {"name": NAME, "parameters": OBJECT} to call one of
{%- for tool in tools %} {{ tool.function | tojson(indent=4) }}{% endfor %}<|eot_id|>{% endif %}
{%- for message in messages %}<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{% if message.tool_calls %}{{ {"name": message.tool_calls[0].function.name, "parameters": message.tool_calls[0].function.arguments} | tojson }}{% else %}{{ message.content }}{% endif %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""  # noqa: E501
MISTRAL = """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | list | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}{% if message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('tool call ids have 9 characters') }}{% endif %}
{{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}{% endfor %}]</s>
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('tool call ids have 9 characters') }}{% endif %}
{{- '[TOOL_RESULTS]' }}{{ message.content }}[/TOOL_RESULTS]
{%- elif message.role == 'user' %}[INST]{{ message.content }}[/INST]{% else %}{{ message.content }}</s>{% endif %}
{%- endfor %}"""
HARMONY = """{%- if tools %}<|start|>developer<|message|># Tools
namespace functions {
{%- for tool in tools %} type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }});{% endfor %}
}<|end|>{% endif %}
{%- for message in messages %}<|start|>{{ message.role }}
{%- if message.tool_calls %}<|channel|>commentary to=functions.{{ message.tool_calls[0].function.name }} <|constrain|>json
{%- endif %}<|message|>{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""  # noqa: E501
QWEN3_CODER = """{%- if tools %}<|im_start|>system
Functions: {% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}Write <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> </function> </tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GLM45 = """[gMASK]<sop>{%- if tools %}<|system|>
Functions: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
{%- endif %}{%- for message in messages %}<|{{ message.role }}|>
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments | items %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
DEEPSEEK_V31 = """{%- if tools %}Functions:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}{%- endif %}{%- for message in messages %}<｜{{ message.role }}｜>{{ message.content }}
{%- if message.tool_calls %}<｜tool▁calls▁begin｜>{% for call in message.tool_calls -%}
<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"""
DEEPSEEK_V3 = DEEPSEEK_V31.replace("<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>").replace(
    "name }}<｜tool▁sep｜>{{ call.function.arguments | tojson }}",
    'name }}{{ "\\n```json\\n" }}{{ call.function.arguments | tojson }}{{ "\\n```" }}',
)
TEMPLATES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "harmony": HARMONY,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
}

ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"city": "Paris"},
    {"a": 1, "b": -2.5e-3, "c": None, "d": True},
    {"text": 'He said: "{no} [call]; </tool_call>"'},
    {"path": "C:\\temp\\new", "tail": "\\"},
    {"lines": "one\ntwo\ttabbed\r\n", "quote": '"\\"\''},
    {"deep": {"er": [{"est": [[], {}, [1, [2, {"x": "}]"}]]]}]}},
    {"name": "not the function", "arguments": {"name": "nor this"}},
    {"日本": "ünïcødé 🎉", "": ""},
    {"list": list(range(40)), "long": "word " * 60},
)
_KINDS: dict[type, str] = {
    dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {key: {"type": _KINDS[type(value)]} for each in ARGUMENTS for key, value in each.items()},
}
"""Of all of these arguments."""
NAMES = ("get_weather", "f", "a.b-c_d", "search")
LEADS = ("", "Let me look. ", 'I\'ll call {two} "things":\n')


@dataclass(frozen=True)
class ToolCallText:
    """A model's text, and its parsed contents."""

    text: str
    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    reasoning: str = ""


def tool_call_texts(form: str, count: int) -> list[ToolCallText]:
    """Returns `count` texts in a family's format, each with 1 to 3 calls."""
    chosen, made = random.Random(form), []
    while len(made) < count:
        number = len(made)
        picked = [ARGUMENTS[number % len(ARGUMENTS)], *chosen.choices(ARGUMENTS, k=chosen.randint(0, 2))]
        calls = [(chosen.choice(NAMES), arguments) for arguments in picked]
        ascii_only, indent = chosen.random() < 0.3, chosen.choice([None, None, 2])
        lead = LEADS[number % len(LEADS)]

        def dumps(value: Any, ascii_only: bool = ascii_only, indent: int | None = indent) -> str:
            return json.dumps(value, ensure_ascii=ascii_only, indent=indent)

        made.append(WRITERS[form](lead, calls, dumps, number))
    return made


def _hermes(lead: str, calls: list[Any], dumps: Any, number: int) -> ToolCallText:
    between = "\n" if number % 2 else ""
    blocks = [f"<tool_call>\n{dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls]
    if number % 5 == 4:  # the keys in the other order
        blocks = [f"<tool_call>{dumps({'arguments': a, 'name': n})}</tool_call>" for n, a in calls]
    return ToolCallText(lead + between.join(blocks) + between, lead, tuple(calls))


def _llama3(lead: str, calls: list[Any], dumps: Any, number: int) -> ToolCallText:
    tag = "<|python_tag|>" if lead or number % 2 else ""
    objects = [
        dumps({"name": n, "parameters": a} | ({"type": "function"} if number % 3 == 0 else {})) for n, a in calls
    ]
    return ToolCallText(lead + tag + "; ".join(objects), lead, tuple(calls))


def _mistral(lead: str, calls: list[Any], dumps: Any, number: int) -> ToolCallText:
    if number % 2:
        return ToolCallText(lead + "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls), lead, tuple(calls))
    listed = dumps([{"name": n, "arguments": a} for n, a in calls])
    return ToolCallText(f"{lead}[TOOL_CALLS] {listed}", lead, tuple(calls))


def _harmony(lead: str, calls: list[Any], dumps: Any, number: int) -> ToolCallText:
    reasoning = "They want <calls>. " if number % 2 else ""
    parts = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
    parts += [f"<|channel|>commentary<|message|>{lead}<|end|>"] if lead else []
    for n, a in calls:
        constrain = " <|constrain|>json" if number % 3 else " json"
        parts.append(f"<|channel|>commentary to=functions.{n}{constrain}<|message|>{dumps(a)}<|call|>")
    return ToolCallText("<|start|>assistant".join(parts), lead, tuple(calls), reasoning)


def _qwen3_coder(lead: str, calls: list[Any], dumps: Any, number: int) -> ToolCallText:
    def value(given: Any) -> str:
        if isinstance(given, str):
            return given
        return str(given) if number % 2 else str(dumps(given))  # Python's spelling, or JSON

    blocks = []
    for n, a in calls:
        arguments = "".join(f"<parameter={key}>\n{value(given)}\n</parameter>\n" for key, given in a.items())
        opened = "" if number % 7 == 6 else "<tool_call>\n"  # as these models sometimes do
        blocks.append(f"{opened}<function={n}>\n{arguments}</function>\n</tool_call>")
    return ToolCallText(lead + "\n".join(blocks), lead, tuple(calls))


def _glm45(lead: str, calls: list[Any], dumps: Any, number: int) -> ToolCallText:
    line = "" if number % 2 else "\n"
    blocks = []
    for n, a in calls:
        values = {key: given if isinstance(given, str) else dumps(given) for key, given in a.items()}
        arguments = [
            f"<arg_key>{key}</arg_key>{line}<arg_value>{text}</arg_value>{line}" for key, text in values.items()
        ]
        blocks.append(f"<tool_call>{n}{line}{''.join(arguments)}</tool_call>")
    return ToolCallText(lead + "\n".join(blocks), lead, tuple(calls))


def _deepseek_v3(lead: str, calls: list[Any], dumps: Any, number: int) -> ToolCallText:
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    blocks = [f"{begin}function{sep}{n}\n```json\n{dumps(a)}\n```{end}" for n, a in calls]
    if number % 5 == 4:  # as some templates write it
        blocks = [f"{begin} {dumps({'name': n, 'parameters': a})} {end}" for n, a in calls]
    text = f"{lead}<｜tool▁calls▁begin｜>" + "\n".join(blocks) + "<｜tool▁calls▁end｜>"
    return ToolCallText(text, lead, tuple(calls))


def _deepseek_v31(lead: str, calls: list[Any], dumps: Any, number: int) -> ToolCallText:
    blocks = [f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>" for n, a in calls]
    return ToolCallText(f"{lead}<｜tool▁calls▁begin｜>{''.join(blocks)}<｜tool▁calls▁end｜>", lead, tuple(calls))


WRITERS = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "harmony": _harmony,
    "qwen3_coder": _qwen3_coder,
    "glm45": _glm45,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
}
