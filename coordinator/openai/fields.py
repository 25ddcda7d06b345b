"""Every field of the public requests that is not served, as data.

`null` always counts as not given, also for an unknown name. There are three kinds of fields besides the served ones:
- inert: they do not change the answer; accepted, and listed in the answer's `x-ignored-fields`;
- not served yet: accepted with a value that has the same effect as omitting the field, else refused by name, because
  the answer would not be what the client asked for;
- unknown: accepted and listed, unless they look like a mistake (baton/runtime/ignored_fields.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]

INERT = frozenset(
    {
        *("guided_decoding_backend", "length_penalty", "metadata", "prediction", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "request_id", "safety_identifier"),
        *("service_tier", "store", "user", "verbosity"),
    }
)
"""Inert fields of a request. Some are also in the models, which limit their size."""

_BOTH: dict[str, tuple[Any, ...]] = {
    "custom_logit_processor": (),
    "logits_processors": (),
    "lora_path": (),
    "lora_request": (),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
COMPLETION: Neutral = _BOTH | {"add_special_tokens": (True,)}
CHAT: Neutral = _BOTH | {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
}
POOLING: dict[str, tuple[Any, ...]] = {"lora_request": (), "mm_processor_kwargs": (), "truncation_side": ("left",)}
EMBEDDINGS: Neutral = POOLING | {"embed_dtype": ("float32",), "endianness": ("native", "little")}
RERANK: Neutral = POOLING | {"max_chunks_per_doc": (), "max_tokens_per_doc": (), "rank_fields": (["text"],)}
NOT_OF_EMBEDDINGS = {"messages": "'input'", "prompt": "'input'"}
NOT_OF_COMPLETIONS = {
    "max_completion_tokens": "'max_tokens'",
    "messages": "/v1/chat/completions",
    "tools": "/v1/chat/completions",
    "top_logprobs": "'logprobs'",
}
NOT_OF_CHATS = {"best_of": "'n'", "prompt": "'messages'"}
"""Fields of the other endpoint without which the answer would be another: the end of the question `did you mean`."""
MESSAGE: Neutral = {
    "function_call": (),
    "partial": (False,),  # in other APIs: continue this message
    "prefix": (False,),
}
