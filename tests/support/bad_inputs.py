"""The table of bad requests, as data: the request, and the status and param that the response must have.

Each id starts with its row of the plan (B-1 ... B-27). The model under test: context 128, 512 embeddings, 402 tokens in
its tokenizer.
"""

from __future__ import annotations

from typing import Any

from tests.support.requests_kit import CHAT, COMPLETIONS, DROP, GOOD, GOOD_RAW, Bad, chat, raw, user

NOT_JSON: dict[str, bytes] = {
    "empty": b"",
    "blank": b"  \n",
    "not json": b"hello",
    "trailing garbage": GOOD_RAW + b"x",
    "two documents": GOOD_RAW + b"\n" + GOOD_RAW,
    "array": b"[]",
    "string": b'"prompt"',
    "number": b"5",
    "null": b"null",
    "comment": b'{"prompt":"a"/*c*/}',
    "single quotes": b"{'prompt':'a'}",
    "trailing comma": b'{"prompt":"a",}',
    "cut": GOOD_RAW[:-1],
    "bad utf-8": b'{"prompt":"\xff"}',
    "overlong utf-8": b'{"prompt":"\xc0\xaf"}',
    "utf-8 surrogate": b'{"prompt":"\xed\xa0\x80"}',
    "utf-16": GOOD_RAW.decode().encode("utf-16"),
    "utf-32": GOOD_RAW.decode().encode("utf-32"),
    "two byte order marks": b"\xef\xbb\xbf\xef\xbb\xbf" + GOOD_RAW,
    "raw control character": b'{"prompt":"a\x01"}',
    "NaN": b'{"prompt":"a","temperature":NaN}',
    "Infinity": b'{"prompt":"a","temperature":Infinity}',
    "-Infinity": b'{"prompt":"a","top_p":-Infinity}',
    "5000 digits": b'{"prompt":"a","seed":' + b"1" * 5000 + b"}",
    "2000 deep array": raw("[" * 2000 + "]" * 2000),
    "100000 deep array": raw("[" * 100_000 + "]" * 100_000),
    "100000 deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "unclosed depth": b"[" * 50_000,
}

UNREADABLE: list[Bad] = [
    *(Bad(f"B-1 B-2 B-3 B-5 {name}", body, None, code="invalid_json") for name, body in NOT_JSON.items()),
    # strings that are not text
    Bad("B-2 lone surrogate", raw(r'"\ud800"'), "prompt"),
    Bad("B-2 low surrogate first", raw(r'"\udc00\ud800"'), "prompt"),
    Bad("B-2 NUL", raw(r'"a\u0000b"'), "prompt"),
    Bad("B-2 surrogate in stop", b'{"prompt":"a","stop":["\\udfff"]}', "stop[0]"),
    Bad("B-2 surrogate in user", b'{"prompt":"a","user":"\\ud900"}', "user"),
    Bad("B-2 surrogate in a key", b'{"prompt":"a","\\ud900":1}', None),
    Bad("B-2 NUL in content", b'{"messages":[{"role":"user","content":"\\u0000"}]}', "messages[0].content", path=CHAT),
    Bad("B-2 surrogate in role", b'{"messages":[{"role":"\\ud800","content":""}]}', "messages[0].role", path=CHAT),
    Bad("B-2 reserved noncharacter", user("a\ufdd0b"), "messages[0].content", path=CHAT),
    # numbers and keys
    Bad("B-3 1e400", b'{"prompt":"a","temperature":1e400}', "temperature"),
    Bad("B-3 -1e400", b'{"prompt":"a","top_p":-1e400}', "top_p"),
    Bad("B-3 400 digits as number", b'{"prompt":"a","temperature":' + b"1" * 400 + b"}", "temperature"),
    Bad("B-4 duplicate key", b'{"prompt":"a","prompt":"b"}', "prompt"),
    Bad("B-4 duplicate equal key", b'{"prompt":"a","seed":1,"seed":1}', "seed"),
    Bad("B-4 duplicate escaped key", b'{"prompt":"a","\\u0070rompt":"b"}', "prompt"),
    Bad("B-4 duplicate in logit_bias", b'{"prompt":"a","logit_bias":{"5":1,"5":2}}', "5"),
    Bad("B-4 duplicate role", b'{"messages":[{"role":"user","role":"system","content":"a"}]}', "role", path=CHAT),
    Bad("B-5 nested prompt", raw("[" * 101 + "]" * 101), "prompt"),
    Bad("B-5 nested object", raw('{"a":' * 101 + "1" + "}" * 101), "prompt"),
    Bad("B-5 nested stop", {"stop": [[[["a"]]]]}, "stop[0]"),
    Bad("B-5 many keys", {f"key{i}": 1 for i in range(50_000)}, "key256", code="unknown_parameter"),
    Bad("B-5 long misspelt key", {"k" * 1_000_000: 1, "prmpt": 1}, "prmpt", code="unknown_parameter"),
    # transport
    *(
        Bad(f"B-6 type {kind!r}", GOOD_RAW, "content-type", 415, headers={"content-type": kind})
        for kind in (
            "",
            "text/plain",
            "application/json; charset=utf-7",
            "application/json; charset=utf-16",
            "application/json, text/plain",
            "application/jsonp",
            "application/x-ndjson",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
        )
    ),
    Bad("B-6 gzip", GOOD_RAW, "content-encoding", 415, headers={"content-encoding": "gzip"}),
    Bad("B-6 br", GOOD_RAW, "content-encoding", 415, headers={"content-encoding": "br"}),
    Bad("B-7 body over the cap", b" " * (1 << 20) + GOOD_RAW, None, 413, code="request_too_large"),
    Bad("B-7 declared over 64 bits", GOOD_RAW, None, 413, headers={"content-length": "9" * 30}),
    Bad("B-8 long header", GOOD_RAW, None, 431, headers={"x-a": "b" * 9000}),
    Bad("B-8 many headers", GOOD_RAW, None, 431, headers={f"x-{i}": "b" for i in range(101)}),
    Bad("B-8 long query", GOOD_RAW, None, 414, path=COMPLETIONS + "?" + "a" * 9000),
    Bad("B-8 request id with a space", GOOD_RAW, "x-request-id", headers={"x-request-id": "a b"}),
    Bad("B-8 long request id", GOOD_RAW, "x-request-id", headers={"x-request-id": "a" * 129}),
    Bad("B-8 empty request id", GOOD_RAW, "x-request-id", headers={"x-request-id": ""}),
    *(Bad(f"B-11 {m} completions", b"", None, 405, method=m) for m in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS")),
    Bad("B-11 POST to the page", GOOD_RAW, None, 405, path="/"),
    *(Bad(f"B-11 {m} models", b"", None, 405, path="/v1/models", method=m) for m in ("POST", "DELETE")),
    *(
        Bad(f"B-11 path {path}", GOOD_RAW, None, 404, code="not_found", path=path)
        for path in (
            "/v1",
            "/v1/completions/",
            "//v1/completions",
            "/v1//completions",
            "/v1/completions;x",
            "/v1/%2e%2e/v1/completions",
            "/V1/completions",
            "/v1/images/generations",
            "/docs",
            "/v1/completions%00",
        )
    ),
    *(Bad(f"B-11 host {h!r}", GOOD_RAW, "host", headers={"host": h}) for h in ("", "a/b", "a?b", "a@b", "a b", "[::")),
]


N = (0, -1, 129, 2**31, 2**63, True, "1", 1.0, [1])

FORMAT, SCHEMA_OF = "response_format", "response_format.json_schema"
DEEP: Any = {}
for _ in range(400):
    DEEP = {"a": DEEP}
F: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CALL: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def called(**changes: Any) -> dict[str, Any]:
    """A history with a malformed tool call."""
    message = {"role": "assistant", "content": None, "tool_calls": [CALL | changes]}
    return {"messages": [{"role": "user", "content": "a"}, message]}


INVALID, MISSING, UNKNOWN = "invalid_value", "missing_required_parameter", "unknown_parameter"
TOOLS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"tools": {}}, "tools", INVALID),
    ({"tools": ["f"]}, "tools[0]", INVALID),
    ({"tools": [{}]}, "tools[0].type", MISSING),
    ({"tools": [{"type": "function"}]}, "tools[0].function", MISSING),
    ({"tools": [{"type": "web_search"} | F | {"type": "web_search"}]}, "tools[0].type", INVALID),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", MISSING),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", INVALID),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
        INVALID,
    ),
    ({"tools": [F, F]}, "tools", INVALID),
    ({"tools": [F] * 200}, "tools", INVALID),
    ({"tool_choice": "required"}, "tool_choice", INVALID),
    ({"tool_choice": F}, "tool_choice", INVALID),
    ({"tools": [F], "tool_choice": "any"}, "tool_choice", INVALID),
    ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice", INVALID),
    ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", INVALID),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", INVALID),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", INVALID),
    ({"truncate_prompt_tokens": "1"}, "truncate_prompt_tokens", INVALID),
    ({"skip_special_tokens": 0}, "skip_special_tokens", INVALID),
    ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output", INVALID),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", INVALID),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", INVALID),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", INVALID),
    (called(id=1), "messages[1].tool_calls[0].id", INVALID),
    (called(type="x"), "messages[1].tool_calls[0].type", INVALID),
    (called(function={"name": "f"}), "messages[1].tool_calls[0].function.arguments", MISSING),
]
STRUCTURED: list[tuple[dict[str, Any], str, str | None]] = [
    ({FORMAT: "text"}, FORMAT, INVALID),
    ({FORMAT: {}}, f"{FORMAT}.type", MISSING),
    ({FORMAT: {"type": "json"}}, f"{FORMAT}.type", INVALID),
    ({FORMAT: {"tpye": "text"}}, f"{FORMAT}.tpye", UNKNOWN),
    ({FORMAT: {"type": "json_schema"}}, SCHEMA_OF, INVALID),
    ({FORMAT: {"type": "json_object", "json_schema": {"name": "a"}}}, SCHEMA_OF, INVALID),
    ({FORMAT: {"type": "text", "schema": {}}}, f"{FORMAT}.schema", INVALID),
    ({FORMAT: {"type": "json_object", "schema": []}}, f"{FORMAT}.schema", INVALID),
    ({FORMAT: {"type": "json_schema", "json_schema": {}}}, f"{SCHEMA_OF}.name", MISSING),
    ({FORMAT: {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}}, f"{SCHEMA_OF}.schema", INVALID),
    ({FORMAT: {"type": "json_schema", "json_schema": {"name": "a", "shcema": {}}}}, f"{SCHEMA_OF}.shcema", UNKNOWN),
    ({"structured_outputs": {}}, "structured_outputs", INVALID),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", INVALID),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", UNKNOWN),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", INVALID),
    ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex", INVALID),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", INVALID),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", INVALID),
    ({"structured_outputs": {"choice": ["a"] * 5_000}}, "structured_outputs.choice", INVALID),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", INVALID),
    ({"guided_json": 1}, "guided_json", INVALID),
    ({"guided_json": "false"}, "guided_json", INVALID),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", INVALID),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", INVALID),
    ({"guided_json": {}, "guided_whitespace_pattern": " " * 1025}, "guided_whitespace_pattern", INVALID),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " " * 1025}},
        "structured_outputs.whitespace_pattern",
        INVALID,
    ),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_regex", INVALID),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs.regex", INVALID),
    ({"guided_json": DEEP}, "guided_json", INVALID),
    ({"guided_regex": ["a"]}, "guided_regex", INVALID),
    ({"guided_regex": "a", FORMAT: {"type": "json_object"}}, "guided_regex", INVALID),
    ({"guided_regex": "a", "ignore_eos": True}, "guided_regex", INVALID),
]

# Names under which other servers accept the location and the source of KV from a client: those of vLLM's connectors, of
# SGLang, and of the messages between the tiers here.
FABRIC_NAMES = (
    "kv_transfer_params", "do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_block_ids",
    "remote_host", "remote_port", "remote_request_id", "remote_tp_size", "tp_size", "tp_rank", "dp_rank",
    "data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_addr",
    "disagg_prefill_dp_rank", "decode_tp_size", "kv_connector", "kv_role", "kv_rank", "kv_ip", "kv_port",
    "buffer_index", "block_ids", "block_table", "slot_mapping", "handle", "signature", "nonce", "source_worker",
    "destination_worker", "prefill_worker", "decode_worker", "attempt", "incarnation", "store_address", "edge_kind",
    "generation", "lease_s", "disaggregated_params",
)  # fmt: skip

TABLE: list[Bad] = [
    *UNREADABLE,
    # the model
    Bad("B-12 unknown model", {"model": "gpt-4"}, "model", 404, "model_not_found"),
    Bad("B-12 empty model", {"model": ""}, "model", 404, "model_not_found"),
    Bad("B-12 other case", {"model": "Tiny"}, "model", 404, "model_not_found"),
    Bad("B-12 long model", {"model": "m" * 10_000}, "model", 404, "model_not_found"),
    Bad("B-12 path as model", {"model": "../tiny"}, "model", 404, "model_not_found"),
    Bad("B-12 control characters", {"model": "a\r\nb\x1b[31m"}, "model", 404, "model_not_found"),
    Bad("B-12 unknown model in chat", {"model": "x"}, "model", 404, "model_not_found", CHAT),
    Bad("B-12 unknown model by path", b"", "model", 404, "model_not_found", "/v1/models/a/b", method="GET"),
    # every served field with every wrong type
    *(
        Bad(f"B-13 {name}={value!r}", {name: value}, name)
        for names, values in (
            (("model", "user", "safety_identifier", "prompt_cache_key"), (1, True, 1.5, [], {})),
            (("max_tokens", "top_k", "seed"), (True, "5", 1.0, 1.5, [], {}, [1])),
            (("temperature", "top_p"), (True, "1", [], {}, [1.0])),
            (("ignore_eos", "stream", "return_token_ids"), (0, 1, "true", [], {}, 1.0)),
            (("stop",), (1, True, 1.5, {})),
            (("stream_options", "metadata"), (1, True, "a", [])),
            (("prompt",), (1, True, None, 1.5, {}, {"text": "a"})),
        )
        for name in names
        for value in values
    ),
    *(Bad(f"B-13 messages={v!r}", chat(v), "messages", path=CHAT) for v in (1, True, None, "hi", {}, {"role": "user"})),
    *(Bad(f"B-13 message {v!r}", chat([v]), "messages[0]", path=CHAT) for v in (1, True, None, "hi", [])),
    *(
        Bad(f"B-13 role={v!r}", chat([{"role": v, "content": "a"}]), "messages[0].role", path=CHAT)
        for v in (1, True, None, [], {}, "", "User", "function", "root", "a" * 1000)
    ),
    *(
        Bad(f"B-13 max_completion_tokens={v!r}", {"max_completion_tokens": v}, "max_completion_tokens", path=CHAT)
        for v in (True, "5", 1.5, [], {})
    ),
    # fields that do not exist, or must not
    *(
        Bad(f"B-14 {name}={value!r}", {name: value}, name, code="unknown_parameter")
        for name in (
            "temprature",
            "Prompt",
            "maxTokens",
            "max-tokens",
            "tpo_p",
            "top_j",
            "strem",
            "grammar",
            "json_object",
        )
        for value in ("x", [], 0)
    ),
    *(
        Bad(f"B-14 {name}={value!r}", {name: value}, name, code="unsupported_parameter")
        for name in ("prompt_embeds", "custom_logit_processor", "lora_path", "lora_request")
        for value in ("x", [], 0)
    ),
    *(
        Bad(f"structured output {number} {path}", fields, param, code=code, path=path)
        for path in (COMPLETIONS, CHAT)
        for number, (fields, param, code) in enumerate(STRUCTURED)
    ),
    *(
        Bad(f"tools {number}", fields, param, code=code, path=CHAT)
        for number, (fields, param, code) in enumerate(TOOLS)
    ),
    Bad("B-14 prompt in chat", {"prompt": "x"}, "prompt", code="unknown_parameter", path=CHAT),
    Bad("B-14 messages in completions", {"messages": []}, "messages", code="unknown_parameter"),
    *(
        Bad(f"B-14 {path} {name}={value!r}", {name: value}, name, code="unsupported_parameter", path=path)
        for path, fields in (
            (COMPLETIONS, {"suffix": ["x"]}),
            (
                CHAT,
                {
                    "functions": [[{"name": "f"}]],
                    "function_call": [{"name": "f"}],
                    "modalities": [["audio"], ["text", "audio"], []],
                    "audio": [{"voice": "alloy", "format": "wav"}],
                    "web_search_options": [{}],
                    "chat_template": ["", "{{ 1 }}"],
                    "documents": [[], [{"text": "x"}]],
                    "echo": [True],
                },
            ),
        )
        for name, values in fields.items()
        for value in values
    ),
    # prompts and messages
    *(Bad(f"B-14 cache_salt {salt!r:.20}", {"cache_salt": salt}, "cache_salt") for salt in ("", "a" * 257, 1, "a\0b")),
    Bad("B-15 empty prompt", {"prompt": ""}, "prompt"),
    Bad("B-15 no prompt", {"prompt": DROP}, "prompt", code="missing_required_parameter"),
    Bad("B-15 empty list", {"prompt": []}, "prompt"),
    Bad("B-15 empty list in a list", {"prompt": [[]]}, "prompt"),
    Bad("B-15 empty text in a list", {"prompt": [""]}, "prompt"),
    Bad("B-15 1000 prompts", {"prompt": ["a"] * 1000}, "prompt"),
    Bad("B-15 129 choices of three prompts", {"prompt": ["a", "b", "c"], "n": 43}, "prompt"),
    Bad("B-15 one of two is empty", {"prompt": ["a", ""]}, "prompt"),
    Bad("B-15 one of two has a wrong id", {"prompt": [[1], [10**6]]}, "prompt"),
    Bad("B-15 mixed", {"prompt": [1, "a"]}, "prompt"),
    Bad("B-15 mixed lists", {"prompt": [[1], "a"]}, "prompt"),
    Bad("B-15 null in a list", {"prompt": [None]}, "prompt"),
    Bad("B-15 deep list", {"prompt": [[[1]]]}, "prompt"),
    Bad("B-15 empty messages", chat([]), "messages", path=CHAT),
    Bad("B-15 no messages", chat(DROP), "messages", path=CHAT, code="missing_required_parameter"),
    Bad("B-15 10000 messages", chat([{"role": "user", "content": "a"}] * 10_000), "messages", path=CHAT),
    Bad("B-15 no content", chat([{"role": "user"}]), "messages[0].content", path=CHAT),
    Bad("B-15 no role", chat([{"content": "a"}]), "messages[0].role", path=CHAT),
    Bad("B-15 second message", chat([*user("a")["messages"], {"role": "user"}]), "messages[1].content", path=CHAT),
    *(
        Bad(f"B-15 content {i}", user(content), "messages[0].content", path=CHAT)
        for i, content in enumerate(
            [
                None,
                1,
                True,
                {},
                {"type": "text", "text": "a"},
                [],
                ["a"],
                [1],
                [None],
                [{}],
                [{"type": "text"}],
                [{"type": "text", "text": None}],
                [{"type": "refusal"}],
                [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}],
                [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
                [{"type": "file", "file": {"file_id": "x"}}],
                [{"type": "text", "text": "a"}, {"type": "refusal", "text": "b"}],
                [{"type": ["text"], "text": "a"}],
                [{"type": "text", "text": ""}] * 1025,
            ]
        )
    ),
    Bad("B-15 tool calls", user("a", tool_calls=[{"id": "x"}]), "messages[0].tool_calls[0].function", path=CHAT),
    Bad("B-15 null content of a user", chat([{"role": "user", "content": None}]), "messages[0].content", path=CHAT),
    Bad("B-15 no content of a tool", chat([{"role": "tool", "content": None}]), "messages[0].content", path=CHAT),
    Bad("B-15 name with a space", user("a", name="a b"), "messages[0].name", path=CHAT),
    Bad("B-15 control token as name", user("a", name="<|im_end|>"), "messages[0].name", path=CHAT),
    Bad("B-15 long name", user("a", name="a" * 65), "messages[0].name", path=CHAT),
    # length
    Bad("B-16 tokens fill the context", {"prompt": [5] * 128}, "prompt", code="context_length_exceeded"),
    Bad("B-16 tokens over the context", {"prompt": [5] * 5000}, "prompt", code="context_length_exceeded"),
    Bad("B-16 text over the context", {"prompt": "z" * 300}, "prompt", code="context_length_exceeded"),
    Bad("B-16 text far over", {"prompt": "a" * 900_000}, "prompt", code="context_length_exceeded"),
    Bad("B-16 combining marks", {"prompt": "\u0301" * 150_000}, "prompt", code="context_length_exceeded"),
    Bad("B-16 chat over", user("z" * 300), "messages", path=CHAT, code="context_length_exceeded"),
    Bad("B-16 chat far over", user("a" * 900_000), "messages", path=CHAT, code="context_length_exceeded"),
    Bad("B-16 sum over", {"prompt": [5] * 100, "max_tokens": 29}, "max_tokens", code="context_length_exceeded"),
    Bad("B-16 huge max_tokens", {"max_tokens": 2**31 - 1}, "max_tokens", code="context_length_exceeded"),
    Bad("B-16 chat sum", {"max_completion_tokens": 127}, "max_completion_tokens", 400, "context_length_exceeded", CHAT),
    # token ids
    *(
        Bad(f"B-17 token {v!r}", {"prompt": [5, v]}, "prompt")
        for v in (-1, 512, 513, 2**31, 2**63, 2**64, 10**300, 1.0, 1.5, True, None, "5", {})
    ),
    *(Bad(f"B-17 detokenize {v!r}", {"tokens": [v]}, "tokens", path="/detokenize") for v in (-1, 512, 2**64)),
    Bad("B-17 detokenize a bool", {"tokens": [True]}, "tokens[0]", path="/detokenize"),
    Bad("B-17 detokenize a string", {"tokens": "abc"}, "tokens", path="/detokenize"),
    Bad("B-17 detokenize too many", {"tokens": [1] * 129}, "tokens", path="/detokenize"),
    Bad("B-17 tokenize both", {"messages": GOOD[CHAT]["messages"]}, "prompt", path="/tokenize"),
    Bad("B-17 tokenize neither", {"prompt": DROP}, "prompt", path="/tokenize"),
    Bad("B-17 tokenize far over", {"prompt": "a" * 900_000}, "prompt", path="/tokenize"),
    # ranges
    *(Bad(f"B-18 max_tokens={v}", {"max_tokens": v}, "max_tokens") for v in (0, -1, 2**31, 2**63, -(2**63), 10**300)),
    *(
        Bad(f"B-18 max_completion_tokens={v}", {"max_completion_tokens": v, "max_tokens": 1}, name, path=CHAT)
        for name in ("max_completion_tokens",)
        for v in (0, -1, 2**31, 2**63)
    ),
    Bad("B-18 max_completion_tokens in completions", {"max_completion_tokens": 5}, "max_completion_tokens"),
    *(Bad(f"B-19 {path} n={v!r}", {"n": v}, "n", path=path) for v in N for path in (COMPLETIONS, CHAT)),
    *(Bad(f"B-19 best_of={v!r}", {"best_of": v, "n": 2}, "best_of") for v in (0, 1, 3, True, "2", 2.0, 2**31)),
    Bad("B-19 best_of alone", {"best_of": 2}, "best_of"),
    Bad("B-19 best_of in chat", {"best_of": 1}, "best_of", path=CHAT),
    *(Bad(f"B-20 temperature={v}", {"temperature": v}, "temperature") for v in (-0.01, 2.01, -1, 3, 1e308, 10**30)),
    *(Bad(f"B-20 top_p={v}", {"top_p": v}, "top_p") for v in (-1e-9, 1.01, -1, 2, 1e308)),
    *(Bad(f"B-20 top_k={v}", {"top_k": v}, "top_k") for v in (-2, 2**31, 2**63, -(2**70))),
    *(Bad(f"B-21 seed={v}", {"seed": v}, "seed") for v in (2**63, 2**64, -(2**63) - 1, 10**4000)),
    *(
        Bad(f"B-18 {path} min_tokens={v!r}", {"min_tokens": v, "max_tokens": 8}, "min_tokens", path=path)
        for v in (-1, 9, 2**31, 2**63, 1.5, True, "1")
        for path in (COMPLETIONS, CHAT)
    ),
    Bad("B-18 min_tokens over the default", {"min_tokens": 17}, "min_tokens"),
    *(Bad(f"B-20 min_p={v!r}", {"min_p": v}, "min_p") for v in (-0.01, 1.01, 1e308, False, "0", [0])),
    *(
        Bad(f"B-20 {name}={v!r}", {name: v}, name)
        for name in ("frequency_penalty", "presence_penalty")
        for v in (-2.01, 2.01, 1e308, -(10**30), True, "0", [0])
    ),
    *(
        Bad(f"B-20 repetition_penalty={v!r}", {"repetition_penalty": v}, "repetition_penalty")
        for v in (0, 0.0, -1, 101, 1e308, 1e-300, True, "1")
    ),
    *(
        Bad(f"B-22 stop_token_ids={repr(v)[:60]}", {"stop_token_ids": v}, "stop_token_ids")
        for v in ([-1], [512], [2**31], [2**63], [10**300], [*range(65)], "1", 1, {})
    ),
    *(
        Bad(f"B-22 stop_token_ids [{v!r}]", {"stop_token_ids": [v]}, "stop_token_ids[0]")
        for v in ("1", 1.5, True, None)
    ),
    *(
        Bad(f"B-23 {path} logit_bias={repr(v)[:60]}", {"logit_bias": v}, "logit_bias", path=path)
        for v in (
            *({k: 1} for k in ("x", "", "-1", "+1", " 1", "1.0", "01", "٣", "512", "2147483648", "1" * 300)),
            *({"5": v} for v in (101, -100.5, 1e308, 10**300, True, "1", None, [1], {})),
            {str(i): 1 for i in range(301)},
            [],
            "{}",
            5,
        )
        for path in (COMPLETIONS, CHAT)
    ),
    *(
        Bad(f"B-23 allowed_token_ids={repr(v)[:60]}", {"allowed_token_ids": v}, "allowed_token_ids")
        for v in ([], [-1], [512], [1, 2**63], "1", 1)
    ),
    Bad("B-23 allowed bool", {"allowed_token_ids": [True]}, "allowed_token_ids[0]"),
    *(
        Bad(f"B-23 bad_words={repr(v)[:60]}", {"bad_words": v}, "bad_words")
        for v in ("x", [""], ["a" * 257], ["a"] * 65, 5)
    ),
    Bad("B-23 bad word of 250 tokens", {"bad_words": ["\u0301z" * 120]}, "bad_words"),
    Bad("B-23 number in bad_words", {"bad_words": ["a", 5]}, "bad_words[1]"),
    *(Bad(f"B-24 logprobs={v!r}", {"logprobs": v}, "logprobs") for v in (-1, 21, 2**31, 10**300, True, "1", 1.5)),
    *(Bad(f"B-24 chat logprobs={v!r}", {"logprobs": v}, "logprobs", path=CHAT) for v in (1, 0, "true", [])),
    *(
        Bad(f"B-24 top_logprobs={v!r}", {"logprobs": True, "top_logprobs": v}, name, path=CHAT)
        for v, name in ((-1, "top_logprobs"), (21, "top_logprobs"), ("5", "top_logprobs"), (True, "top_logprobs"))
    ),
    Bad("B-24 top_logprobs alone", {"top_logprobs": 2}, "top_logprobs", path=CHAT),
    Bad("B-24 top_logprobs against", {"top_logprobs": 2, "logprobs": False}, "top_logprobs", path=CHAT),
    Bad("B-24 top_logprobs in completions", {"top_logprobs": 2}, "top_logprobs"),
    *(
        Bad(f"B-24 {path} prompt_logprobs={v!r}", {"prompt_logprobs": v}, "prompt_logprobs", path=path)
        for v in (-1, 21, 2**63, True, "1")
        for path in (COMPLETIONS, CHAT)
    ),
    Bad("B-24 prompt_logprobs streamed", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    *(Bad(f"B-24 echo={v!r}", {"echo": v}, "echo") for v in (1, "false", [])),
    Bad("B-22 65 stops", {"stop": ["a"] * 65}, "stop"),
    Bad("B-22 long stops", {"stop": ["a" * 250] * 5}, "stop"),
    Bad("B-22 a million stops", {"stop": ["a"] * 100_000}, "stop"),
    Bad("B-22 empty stop", {"stop": ""}, "stop"),
    Bad("B-22 empty stop in a list", {"stop": ["a", ""]}, "stop"),
    Bad("B-22 long stop", {"stop": "a" * 257}, "stop"),
    Bad("B-22 number in stop", {"stop": ["a", 5]}, "stop[1]"),
    Bad("B-22 null in stop", {"stop": [None]}, "stop[0]"),
    Bad("B-22 nested stop", {"stop": [["a"]]}, "stop[0]"),
    # streaming and labels
    Bad("B-27 stream_options without stream", {"stream_options": {"include_usage": True}}, "stream_options"),
    Bad("B-27 stream_options, stream false", {"stream": False, "stream_options": {}}, "stream_options"),
    Bad("B-27 unknown key", {"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
    *(
        Bad(f"B-27 {name}", {"stream": True, "stream_options": {name: 1}}, f"stream_options.{name}")
        for name in ("include_usage", "continuous_usage_stats", "include_obfuscation")
    ),
    Bad("B-27 long user", {"user": "u" * 513}, "user"),
    Bad("B-27 17 keys", {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    Bad("B-27 long key", {"metadata": {"k" * 65: ""}}, "metadata"),
    Bad("B-27 long value", {"metadata": {"k": "v" * 513}}, "metadata"),
    Bad("B-27 number as value", {"metadata": {"k": 1}}, "metadata.k"),
]
