"""Writes the parts of the documentation that are derived from the code, between markers in the pages.

    python -m tests.docs.generate        rewrites the pages of `PAGES`
    tests/docs/test_generated.py         fails when a page differs from what this would write

A part is the text between `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from pydantic import BaseModel

from batches import store as batch_store
from baton.core import errors
from baton.core.sampling_limits import MAX_GRAMMAR_CHARS
from baton.runtime import first_message, status
from baton.runtime.config import BatchesConfig, CoordinatorConfig, WorkerConfig
from baton.v1 import serving_pb2, types_pb2
from coordinator import connections as connection_limits
from coordinator import pooled as pooled_inputs
from coordinator import structured_output, translate
from coordinator.grpc import service as grpc_service
from coordinator.http import app as http_app
from coordinator.http import batches as http_batches
from coordinator.http import body as http_body
from coordinator.http import guard as http_guard
from coordinator.http import server as http_server
from coordinator.http.app import HttpSettings, create_app
from coordinator.metrics import Metrics
from coordinator.metrics_vllm import DERIVED, NAMES
from coordinator.openai import schema as openai_schema
from coordinator.openai import structured, validation
from coordinator.openai.pooling import ClassifyBody, EmbeddingsBody, RerankBody, ScoreBody
from coordinator.policy import grammar_queue
from launch import served_models
from launch.kubernetes.config import KubernetesConfig
from launch.up_config import DoctorConfig, UpConfig
from tests.coordinator.test_metrics import CLUSTER
from tests.support.fake_generator import FakeGenerator

ROOT = Path(__file__).parents[2]

ENDPOINTS = {
    "POST /v1/completions": "a prompt as text or token ids; streamed or whole",
    "POST /v1/chat/completions": "messages through the model's chat template; streamed or whole",
    "POST /v1/responses": "items through the chat template; streamed or whole, see [responses](#responses)",
    "GET /v1/responses/{response_id}": "a stored answer",
    "DELETE /v1/responses/{response_id}": "removes it",
    "GET /v1/responses/{response_id}/input_items": "the items that it answered; `order=asc`: the first one first",
    "POST /v1/messages": "Anthropic's messages through the chat template; streamed or whole, see [messages](#messages)",
    "POST /v1/messages/count_tokens": "the number of tokens in the prompt of such a request",
    "POST /v1/embeddings": "vectors of texts, see [embeddings and scores](#embeddings-and-scores)",
    "POST /classify": "labels of texts, by a model with a classification head",
    "POST /score": "how close texts are, one with many or pair by pair",
    "POST /v1/score": "the same",
    "POST /rerank": "documents by how close they are to a query, as Jina and Cohere have it",
    "POST /v1/rerank": "the same",
    "POST /v2/rerank": "the same",
    "GET /v1/models": "the model and its LoRA adapters, with `max_model_len`; in Anthropic's form for its clients",
    "GET /v1/models/{model_id}": "one of these entries; 404 for any other name",
    "POST /tokenize": "`prompt`, or `messages` with `tools` and the template's other fields, to token ids",
    "POST /detokenize": "`tokens` to text, special tokens shown",
    "GET /health": "200 while requests are accepted: each role that they need has a ready worker, or had one less than "
    "`--hold-s` ago, or an autoscaler keeps none until one arrives; else 503 with the reason",
    "GET /ready": "the same",
    "GET /": "a page with a chat box, the pools and the last requests",
    "GET /live": "200 while the coordinator runs",
    "GET /metrics": "Prometheus metrics, see [operations](operations.md)",
    "GET /requests": "the requests that run and the last 1,000, each with its timeline; `limit`, 100 unless given",
    "GET /requests/{request_id}": "the choices of one, see"
    " [where the time went](operations.md#where-the-time-of-a-request-went)",
    "GET /workers": "the table of workers, see [operations](operations.md)",
    "POST /expect_workers": "from an autoscaler: there are no workers on purpose, and a request starts some;"
    " `/ready` is 200 for another `--hold-s`",
    "POST /v1/load_lora_adapter": "`lora_name`, `lora_path`, `load_inplace`: loads a [LoRA"
    " adapter](models.md#lora-adapters) at all workers, with `--allow-runtime-lora-updating`",
    "POST /v1/unload_lora_adapter": "`lora_name`: removes its name; running requests finish with it",
    "GET /version": "the version of Baton",
    "GET /server_info": "model, version, and how many workers of each role there are",
    "GET /loads": "requests that run and wait, as SGLang has it, and their choices (`num_choices`)",
    "GET /get_model_info": "the model, as SGLang has it",
    "GET /tokenizer_info": "special tokens and chat template, as vLLM has it",
    "GET /v2": "name, version and extensions of the server, see [Open Inference Protocol](#open-inference-protocol)",
    "GET /v2/health/live": "200 while the coordinator runs",
    "GET /v2/health/ready": "200 while requests are accepted, else 503 with the reason",
    "GET /v2/models/stats": "counts and durations of inference requests",
    "POST /v2/repository/index": "the one model and whether it is ready",
    "GET /v2/models/{name}": "the model's inputs and outputs",
    "GET /v2/models/{name}/ready": "200 while it can be used",
    "GET /v2/models/{name}/config": "its configuration in Triton's form",
    "GET /v2/models/{name}/stats": "counts and durations of its requests",
    "POST /v2/models/{name}/infer": "tensors in, tensors out",
    "POST /v2/models/{name}/generate": "Triton's generate extension: a text",
    "POST /v2/models/{name}/generate_stream": "the same as events, a piece of text each",
    "GET /openapi.json": "an OpenAPI description of the above",
}

MEANINGS = {
    "model": "the served name, or that of a [LoRA adapter](models.md#lora-adapters); may be left out: the model itself",
    "prompt": "text or token ids, or a list of these: as many prompts, with `n` choices each, in their order",
    "messages": "1 or more of the fields below",
    "max_tokens": "at least 1, with `echo` also 0; completions default to 16, chat to the rest of `max_model_len`",
    "max_completion_tokens": "newer name of `max_tokens`, goes before it",
    "temperature": "0 to 2; 0 is greedy",
    "top_p": "0 to 1; 0 allows only the most likely token",
    "top_k": "-1 and 0: off",
    "seed": "64-bit integer; the same seed and parameters give the same noise",
    "stop": "a string or up to 64; the text ends before the first that appears",
    "n": "1 to 128 choices from one prompt, each with its own noise",
    "best_of": "only the same as `n`",
    "min_p": "0 to 1; keeps tokens at least that many times as likely as the likeliest; 0: off",
    "repetition_penalty": "0.01 to 100; above 1 makes tokens of prompt and output less likely",
    "frequency_penalty": "-2 to 2, times how often a token is in the output",
    "presence_penalty": "-2 to 2, once for every token in the output",
    "logit_bias": "object of token ids and numbers from -100 to 100, added to their logits",
    "min_tokens": "no end by EOS, stop token or stop string before so many tokens; at most `max_tokens`",
    "stop_token_ids": "end the choice like EOS; the one that did is `stop_reason`",
    "bad_words": "texts that the output will not contain, as the tokenizer writes them alone and after a space",
    "allowed_token_ids": "only these may be chosen",
    "logprobs": "completions: 0 to 20, so many of the likeliest tokens at each; chat: true or false",
    "top_logprobs": "0 to 20, needs `logprobs`",
    "prompt_logprobs": "0 to 20; log-probabilities of the prompt's tokens, in vLLM's form; not with `stream`",
    "echo": "puts the prompt in front of the text, and of `logprobs`",
    "suffix": "the text after the gap that the output fills, for Qwen2.5-Coder, CodeGemma, StarCoder, DeepSeek-Coder, "
    "CodeLlama, Codestral: refused if the tokenizer has no tokens for it, with token ids, `echo` and "
    "`truncate_prompt_tokens`",
    "priority": "-100 to 100; lower goes first wherever requests wait; not before what the API key allows",
    "cache_salt": "1 to 256 characters; KV is reused only between requests of the same salt, see"
    " [prefix reuse](prefix-reuse.md)",
    "ignore_eos": "generate on past the end-of-sequence token",
    "return_token_ids": "adds `token_ids` to each choice or event",
    "return_timeline": "adds `timeline` to each choice, in a stream to its last event: where its time went, see"
    " [operations](operations.md#where-the-time-of-a-request-went)",
    "tools": "up to 128 functions that the model may call: see [tools](#tools)",
    "tool_choice": "`none`, `auto`, `required`, or a function by name",
    "parallel_tool_calls": "`false`: an answer has one call; further ones are left out",
    "include_stop_str_in_output": "`true`: a text that a stop string ends, ends with it",
    "skip_special_tokens": "`false`: special tokens are in the text, but for the one that ends it",
    "truncate_prompt_tokens": "so many tokens of the prompt are taken, the last ones",
    "add_generation_prompt": "`false`: the beginning of an answer is not put behind the messages",
    "continue_final_message": "`true`: the model goes on with the last message",
    "chat_template_kwargs": "further variables of the chat template, such as `enable_thinking`",
    "stream": "server-sent events, ended by `data: [DONE]`",
    "response_format": "`text`, `json_schema` with `json_schema.schema`, or `json_object`, also with `schema`: see"
    " [structured output](#structured-output)",
    "structured_outputs": "one of `json`, `json_object`, `regex`, `choice` and `grammar` (Lark), as vLLM has them;"
    " `whitespace_pattern`, `disable_any_whitespace`",
    "guided_json": "older name of `structured_outputs.json`",
    "guided_regex": "older name of `structured_outputs.regex`",
    "guided_choice": "older name of `structured_outputs.choice`",
    "guided_grammar": "older name of `structured_outputs.grammar`",
    "guided_whitespace_pattern": "older name of `structured_outputs.whitespace_pattern`",
    "stream_options": "needs `stream`; `include_usage`, `continuous_usage_stats`, `include_obfuscation` (inert)",
}
POOLED = {
    "model": "the served name; may be left out",
    "input": "a text or token ids, or a list of up to 2,048 of these",
    "encoding_format": "`float` or `base64`: little-endian float32, which OpenAI's clients ask for by themselves",
    "dimensions": "only the first so many, with length 1 again; refused unless the model's config.json has"
    " `is_matryoshka` or lists it in `matryoshka_dimensions`, or with `--matryoshka`",
    "normalize": "`false`: vectors as the model has them; `true`: of length 1; else as the model's directory says",
    "text_1": "a text or a list of texts",
    "text_2": "as many as `text_1`, or any number if that is one",
    "query": "a text",
    "documents": "up to 2,048 texts, each a string or an object with `text`",
    "top_n": "only the best so many; 0: all",
    "return_documents": "`false`: without their texts",
    "use_activation": "`false`: the scores of a classification head as they are, else the sigmoid of one or the softmax"
    " of several",
    "truncate_prompt_tokens": "so many tokens of each text are taken, the last ones; -1: as many as fit; left out: a"
    " text that does not fit is refused",
    "add_special_tokens": "`false`: without those that the tokenizer adds, such as BOS",
    "priority": "-100 to 100; lower goes first wherever requests wait",
    "cache_salt": "1 to 256 characters; KV is reused only between requests of the same salt",
}
INERT = ("user", "safety_identifier", "prompt_cache_key", "metadata")

LIMITS = (
    ("stop strings", str(translate.MAX_STOPS)),
    ("characters of a stop string", f"{translate.MAX_STOP_CHARS:,}"),
    ("characters of all stop strings together", f"{translate.MAX_STOP_CHARS_IN_ALL:,}"),
    ("choices of a request (prompts times `n`)", f"{translate.MAX_CHOICES:,}"),
    ("texts of embeddings, score or rerank", f"{pooled_inputs.MAX_INPUTS:,}"),
    ("messages", f"{translate.MAX_MESSAGES:,}"),
    ("characters of a schema or grammar", f"{MAX_GRAMMAR_CHARS:,}"),
    ("time to compile a grammar", f"{structured_output.COMPILE_S:g} s"),
    ("grammars of a client that wait to be compiled", str(grammar_queue.MAX_WAITING)),
    ("alternatives of a choice", f"{structured.MAX_ALTERNATIVES:,}"),
    ("characters of a whitespace pattern", f"{structured.MAX_WHITESPACE_CHARS:,}"),
    ("characters of an echoed prompt, in all choices together", f"{http_app.MAX_ECHO_CHARS:,}"),
    ("parts of one message", f"{openai_schema.MAX_PARTS:,}"),
    ("body", f"{CoordinatorConfig().max_body_mib:g} MiB (`--max-body-mib` of the coordinator)"),
    ("body of a new batch", f"{http_batches.MAX_BODY_BYTES >> 10} KiB"),
    (
        "batches that have not ended",
        f"{batch_store.MAX_UNFINISHED_OF_OWNER:,} of an owner, {batch_store.MAX_UNFINISHED:,} of all",
    ),
    (
        f"bodies over {http_body.INLINE_BYTES >> 10} KiB that wait to be parsed, together",
        f"{http_body.MAX_WAITING_BYTES >> 20} MiB",
    ),
    (f"values in a body over {http_body.INLINE_BYTES >> 10} KiB", f"{http_body.MAX_VALUES:,}"),
    ("time for a body to arrive", f"{HttpSettings('').body_timeout_s:g} s"),
    ("time a client may take nothing of its answer", f"{http_server.SEND_TIMEOUT_S:g} s"),
    ("headers", f"{http_guard.MAX_HEADERS}, {http_guard.MAX_HEADER_BYTES:,} bytes each"),
    ("head as a whole", f"{http_guard.MAX_HEAD_BYTES:,} bytes"),
    ("path and query", f"{http_guard.MAX_TARGET_BYTES:,} bytes"),
    ("characters of a request id", str(http_guard.MAX_ID_CHARS)),
    ("time for a head to arrive", f"{http_server.HEAD_TIMEOUT_S:g} s"),
    ("HTTP connections", f"{connection_limits.MAX_CONNECTIONS:,}"),
    ("of them, from one address that is not loopback", f"{connection_limits.ONE_ADDRESS:.0%}"),
    ("gRPC connections, of all", f"{connection_limits.GRPC:.0%}"),
    (
        "gRPC message",
        f"{grpc_service.MAX_MESSAGE_BYTES >> 20} MiB, {grpc_service.TOKEN_BYTES} bytes for each token of the context "
        "if that is more; no more than a body",
    ),
    ("time for a gRPC message to arrive", f"{first_message.RECEIVE_S:g} s"),
    ("gRPC messages that arrive at a time, of all connections", f"{first_message.MAX_ARRIVING:,}"),
    ("requests of a connection that wait for an answer (pipelined)", str(http_server.MAX_PIPELINED)),
    ("gRPC streams of a connection", f"{grpc_service.MAX_CONCURRENT_STREAMS:,}"),
    ("time of a request", f"{CoordinatorConfig().request_timeout_s:g} s (`--request-timeout-s` of the coordinator)"),
    (
        "requests and prompt tokens that wait",
        f"{CoordinatorConfig().max_queued_requests:,} and {CoordinatorConfig().max_queued_tokens:,}",
    ),
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(value: object) -> str:
    return f"`{value}`"


def options(cls: type[Any], without: type[Any] | None = None) -> str:
    """One row per option of a process."""
    rows = []
    known = {f.name for f in fields(without)} if without else set()
    for f in (f for f in fields(cls) if f.name not in known):
        meta, default = f.metadata, f.default
        shown = (
            {True: "on", False: "off", "": "none"}[default]
            if isinstance(default, bool | str) and (isinstance(default, bool) or default == "")
            else f"{default:g}"
            if isinstance(default, float)
            else str(default)
        )
        flag = "--" + f.name.replace("_", "-")
        names = f"`{flag}`" + (f", `--no-{flag[2:]}`" if isinstance(default, bool) else "")
        limits = [f"at least {meta['low']:g}"] if meta["low"] else []
        limits += [f"at most {meta['high']:g}"] if meta["high"] is not None and meta["high"] < 1 << 20 else []
        text = meta["help"] + (f" ({', '.join(limits)})" if limits else "")
        text += f": {', '.join(map(code, meta['choices']))}" if meta["choices"] else ""
        rows.append((names, shown, text))
    return table(("option", "default", "meaning"), rows)


def endpoints() -> str:
    app = create_app(FakeGenerator(), None, HttpSettings("m"))  # type: ignore[arg-type]
    found = []
    for route in (route for route in app.routes if route.include_in_schema or route.path == "/openapi.json"):  # type: ignore[attr-defined]
        for method in sorted(route.methods - {"HEAD"}):  # type: ignore[attr-defined]
            path = route.path.replace(":path", "")  # type: ignore[attr-defined]
            found.append(f"{method} {path}")
    found = [name for name in found if "/versions/{version}" not in name]  # the same, for the only version
    if set(found) != set(ENDPOINTS):
        raise SystemExit(f"endpoints to describe in {__file__}: {set(found) ^ set(ENDPOINTS)}")
    return table(("endpoint", "what it gives"), [(code(name), text) for name, text in ENDPOINTS.items()])


def served() -> str:
    completion, chat = openai_schema.CompletionBody.model_fields, openai_schema.ChatBody.model_fields
    names = [n for n in dict.fromkeys([*completion, *chat]) if n not in INERT]
    if set(names) != set(MEANINGS):
        raise SystemExit(f"fields to describe in {__file__}: {set(names) ^ set(MEANINGS)}")
    rows = []
    for name in names:
        where = "both" if name in completion and name in chat else "completions" if name in completion else "chat"
        alias = (completion.get(name) or chat[name]).validation_alias
        others = ", ".join(code(other) for other in getattr(alias, "choices", ())[1:])
        rows.append((code(name), where, MEANINGS[name] + (f"; also named {others}" if others else "")))
    return table(("field", "where", "meaning"), rows)


def pooled() -> str:
    bodies: dict[str, type[BaseModel]] = {
        "embeddings": EmbeddingsBody,
        "classify": ClassifyBody,
        "score": ScoreBody,
        "rerank": RerankBody,
    }
    names = [n for n in dict.fromkeys(n for body in bodies.values() for n in body.model_fields) if n not in INERT]
    if set(names) != set(POOLED):
        raise SystemExit(f"fields to describe in {__file__}: {set(names) ^ set(POOLED)}")
    rows = []
    for name in names:
        places = {where: body.model_fields[name] for where, body in bodies.items() if name in body.model_fields}
        where = "all" if len(places) == len(bodies) else ", ".join(places)
        aliases = getattr(next(iter(places.values())).validation_alias, "choices", ())[1:]
        others = ", ".join(map(code, aliases))
        rows.append((code(name), where, POOLED[name] + (f"; also named {others}" if others else "")))
    return table(("field", "where", "meaning"), rows)


def inert() -> str:
    return ", ".join(map(code, sorted(validation.INERT)))


def vllm_metrics() -> str:
    known = {metric.name: metric for metric in Metrics("", "vllm").everything(CLUSTER).collect()}
    meanings = {name: code(_exported(known[own])) for own, names in NAMES.items() for name in names} | DERIVED
    rows = ((code(_exported(known[name])), known[name].type, meanings[name]) for name in meanings)
    return table(("vLLM", "type", "Baton"), rows)


def _exported(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def neutral() -> str:
    completion, chat = validation.COMPLETION, validation.CHAT
    rows = []
    for name in sorted({*completion, *chat}):
        same = name in completion and name in chat and completion[name] == chat[name]
        for where, found in (("both", completion),) if same else (("completions", completion), ("chat", chat)):
            if name in found:
                rows.append((code(name), where, _accepted(found[name])))
    return table(("field", "where", "accepted values"), rows)


def _accepted(values: tuple[Any, ...]) -> str:
    unique = [v for v in values if not isinstance(v, float)]
    import json

    return ", ".join(code(v) for v in ["null", *map(json.dumps, unique)])


def message_fields() -> str:
    rows = [(code(n), "served") for n in openai_schema.MessageBody.model_fields]
    rows += [(code(n), "only " + _accepted(v)) for n, v in validation.MESSAGE.items()]
    rows += [("any other", "ignored, and named in `x-ignored-fields`")]
    return table(("field of a message", ""), rows)


def metrics() -> str:
    made = Metrics().everything(CLUSTER)
    rows = []
    for metric in made.collect():
        rows.append((code(_exported(metric)), metric.type, metric.documentation))
    return table(("name", "type", "meaning"), rows)


def grpc_fields() -> str:
    rows = []
    for message, known, prefix in (
        (serving_pb2.GenerateRequest, grpc_service.SERVED, ""),
        (types_pb2.SamplingParams, grpc_service.SERVED_SAMPLING, "sampling."),
    ):
        for field in message.DESCRIPTOR.fields:
            if field.name in known:
                meaning = "served"
            elif field.name in grpc_service.NEUTRAL:
                meaning = "only unset or " + ", ".join(f"`{v}`" for v in grpc_service.NEUTRAL[field.name]).lower()
            else:
                meaning = "only unset"
            rows.append((code(prefix + field.name), meaning))
    return table(("field", ""), rows)


def error_table() -> str:
    rows = []
    for cls in _tree(errors.BatonError):
        row = status.row(cls(""))
        retry = {True: "yes", False: "no", None: ""}[row.retry]
        rows.append(
            (code(cls.__name__), code(cls.code), str(row.http), row.grpc, row.type, retry, "no" if row.hide else "yes")
        )
    head = ("error", "usual `code`", "HTTP", "gRPC", "`type`", "`x-should-retry`", "message shown")
    return table(head, rows)


def _tree(cls: type[errors.BatonError]) -> list[type[errors.BatonError]]:
    below = [c for c in cls.__subclasses__() if c.__module__ == errors.__name__]
    return [c for sub in below for c in (sub, *_tree(sub))]


def limits() -> str:
    return table(("limit", "value"), LIMITS)


def models() -> str:
    """The architectures that transformers implements, by what became of each."""
    by_outcome: dict[str, list[str]] = {}
    for kind, _, _, proven in served_models.rows():
        by_outcome.setdefault(proven.split(": no tiny")[0], []).append(kind)
    order = sorted(by_outcome, key=lambda proven: (-len(by_outcome[proven]), proven))
    return table(("outcome", "`model_type`"), ((proven, ", ".join(by_outcome[proven])) for proven in order))


PARTS: dict[str, Callable[[], str]] = {
    "up": lambda: options(UpConfig),
    "doctor": lambda: options(DoctorConfig, UpConfig),
    "kubernetes": lambda: options(KubernetesConfig),
    "coordinator": lambda: options(CoordinatorConfig),
    "batches": lambda: options(BatchesConfig),
    "worker": lambda: options(WorkerConfig),
    "endpoints": endpoints,
    "served": served,
    "pooled": pooled,
    "inert": inert,
    "metrics": metrics,
    "vllm_metrics": vllm_metrics,
    "neutral": neutral,
    "message": message_fields,
    "grpc": grpc_fields,
    "errors": error_table,
    "limits": limits,
    "models": models,
}
PAGES = ("docs/api.md", "docs/coming-from-vllm.md", "docs/configuration.md", "docs/models.md", "docs/operations.md")
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def fresh(page: str) -> str:
    """The text of `page` with its parts regenerated."""
    return _PART.sub(lambda m: f"{m[1]}{PARTS[m[2]]()}\n{m[3]}", page)


def names(page: str) -> list[str]:
    return [m[2] for m in _PART.finditer(page)]


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(fresh(path.read_text(encoding="utf-8")), encoding="utf-8")
