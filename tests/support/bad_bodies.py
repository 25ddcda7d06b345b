"""Requests that are bad as HTTP or JSON, independently of their fields: bytes, keys, depth, headers, methods, paths."""

from __future__ import annotations

from tests.support.requests_kit import CHAT, COMPLETIONS, GOOD_RAW, Bad, raw, user

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
