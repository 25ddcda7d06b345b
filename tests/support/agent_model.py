"""A tiny model for agents: it thinks and calls the tool `Bash` after `[[call]]`, and answers after `[[finished]]`,
which the call prints. Its prompt has nothing of the messages but the selectors, so a long system prompt fits."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.scripted import MARKERS, make_scripted

COMMAND = "echo here: '[[finished]]'"
ANSWER = "The command printed a selector, so I am finished."
THOUGHT = "I need the shell for it."
_CALL = json.dumps({"name": "Bash", "arguments": {"command": COMMAND, "description": "Prints a word"}})
_WIDE = f"<|{'wide' * 16}|>"
"""A token that stands for so many bytes that no prompt of an agent is refused for its bytes alone."""
_TEMPLATE = (
    "{% if tools %}{# <tool_call> </think> #}"
    "{% for tool in tools %}{{ tool.function.name[:20] }} {% endfor %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content.split('[[')[1:] %}[[{{ part.split(']]')[0][:20] }}]]{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def agent_model(path: Path) -> Path:
    """Writes the checkpoint; run it in float32."""
    call = f"<think>\n{THOUGHT}\n</think>\n\n<tool_call>\n{_CALL}\n</tool_call>"
    return make_scripted(path, {"call": call, "finished": ANSWER}, template=_TEMPLATE, markers={**MARKERS, _WIDE: True})
