"""The HTTP front end over the pipeline: OpenAI's endpoints, Anthropic's messages, and endpoints about the server under
the names that vLLM and SGLang use.

A request: Guard -> route -> BodyReader -> validation.parse by BodyParser -> Translator -> GenerationResponse. Every
fault in a request is raised as an exception, and one function, `error_response`, turns it into an answer.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from baton.core.errors import BatonError, InvalidRequest, NotFound
from baton.core.sampling_limits import check_count
from baton.runtime.event_loop import off_loop
from baton.runtime.status import HttpProblem
from coordinator.anthropic.render import MessagesRender, model_object, model_page
from coordinator.anthropic.schema import CountTokensBody, MessagesBody
from coordinator.api_keys import ApiKeys
from coordinator.http.batches import BatchesClient, BatchesProxy, limit_of
from coordinator.http.body import BodyParser, BodyReader
from coordinator.http.errors import (
    MESSAGES,
    REQUEST_ID,
    error_response,
    is_for_anthropic,
    json_response,
)
from coordinator.http.generation import (
    ADAPTER,
    SPLIT_HEADER,
    EchoOnly,
    GenerationResponse,
    owned,
    time_limit_s,
    unique_id,
)
from coordinator.http.guard import CLIENT, IGNORED, Guard, Names
from coordinator.http.inference import InferenceRoutes
from coordinator.http.openapi import add_route, describe
from coordinator.http.pooling import PoolingRoutes
from coordinator.http.responses import KeptResponses
from coordinator.inference.served import ServedModel
from coordinator.metrics import CONTENT_TYPE
from coordinator.openai import schema
from coordinator.openai.render import ChatRender, CompletionRender, Head, Render
from coordinator.openai.responses import ResponsesBody
from coordinator.openai.responses_items import Item
from coordinator.openai.responses_render import ResponsesRender
from coordinator.openai.validation import ModelBody, RequestObject, parse
from coordinator.pipeline import Pipeline
from coordinator.recent import KEPT, Record
from coordinator.responses_store import MemoryResponses, Responses
from coordinator.submission import LARGE_ENTRIES, Submission
from coordinator.text.chat import ChatMessage, Rendering
from coordinator.text.model import TextModel, tokens_json
from coordinator.text.tool_calls import THINK, make_parser
from coordinator.translate import Translator, check_messages

_T = TypeVar("_T", bound=ModelBody)
_O = TypeVar("_O", bound=RequestObject)
MODEL = "baton.model"
"""The scope key of the model's name as the client gave it."""
_PERMISSIONS = ("allow_sampling", "allow_logprobs", "allow_view")
_NOT_PERMITTED = ("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking")
_QUEUED_PATHS = frozenset(["/v1/completions", "/v1/chat/completions", "/v1/responses", MESSAGES])
"""Requests to them wait in the queue, and are refused while that has no room for them."""
MAX_RESPONSES_BYTES = 64 << 20
MAX_ECHO_CHARS = 4 * 1024 * 1024
PAGE = Path(__file__).with_name("page.html").read_bytes()
_PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """`model_name` is what clients call the model; `created` when it was made known, in Unix seconds.
    `routes`: serve the routes for clients, those for operators, or both. `local_names_only`: see `guard.Names`.
    `allow_lora_updating`: operators may load and unload LoRA adapters. `batches_address` is that of the batches
    process, `batches_key` what it authenticates with (`access_key`)."""

    model_name: str
    version: str = field(default_factory=lambda: _installed_version())
    created: int = field(default_factory=lambda: int(time.time()))
    request_timeout_s: float = 600.0
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    routes: Literal["all", "api", "admin"] = "all"
    local_names_only: bool = False
    strict_fields: bool = False
    batches_address: str = ""
    batches_key: str | None = None
    allow_lora_updating: bool = False


def create_app(
    pipeline: Pipeline,
    text_model: TextModel,
    settings: HttpSettings,
    inference: ServedModel | None = None,
    responses: Responses | None = None,
) -> Starlette:
    """Builds the application. It owns only the process that parses large bodies, and the connections to the batches
    process, which `app.state.close()` ends: pipeline and text model outlive it."""
    app = Starlette()
    app.router.redirect_slashes = False
    front = _Front(pipeline, text_model, settings, responses)
    for_all = (
        ("GET", "/", front.page, "text/html"),
        ("GET", "/live", front.live, "Live"),
        ("GET", "/health", front.ready, "Ready"),
        ("GET", "/ready", front.ready, "Ready"),
    )
    api = (
        ("POST", "/v1/completions", front.completions, "Completion", schema.CompletionBody),
        ("POST", "/v1/chat/completions", front.chat_completions, "ChatCompletion", schema.ChatBody),
        ("POST", "/v1/responses", front.responses, "Response", ResponsesBody),
        ("GET", "/v1/responses/{response_id}", front.kept.answer, "Response"),
        ("DELETE", "/v1/responses/{response_id}", front.kept.delete, "ResponseDeleted"),
        ("GET", "/v1/responses/{response_id}/input_items", front.kept.input_items, "ItemList"),
        ("POST", MESSAGES, front.messages, "Message", MessagesBody),
        ("POST", f"{MESSAGES}/count_tokens", front.count_tokens, "TokenCount", CountTokensBody),
        ("GET", "/v1/models", front.models, "ModelList"),
        ("GET", "/v1/models/{model_id:path}", front.model, "Model"),
        ("POST", "/tokenize", front.tokenize, "Tokens", schema.TokenizeBody),
        ("POST", "/detokenize", front.detokenize, "Text", schema.DetokenizeBody),
        ("GET", "/version", front.version, "Version"),
        ("GET", "/get_model_info", front.model_info, "ModelInfo"),
        ("GET", "/tokenizer_info", front.tokenizer_info, "TokenizerInfo"),
    )
    admin = (
        ("GET", "/metrics", front.metrics, "text/plain"),
        ("GET", "/workers", front.workers, "Workers"),
        ("POST", "/expect_workers", front.expect_workers, "Live"),
        ("POST", "/v1/load_lora_adapter", front.load_adapter, "text/plain", schema.LoadAdapterBody),
        ("POST", "/v1/unload_lora_adapter", front.unload_adapter, "text/plain", schema.UnloadAdapterBody),
        ("GET", "/server_info", front.server_info, "ServerInfo"),
        ("GET", "/loads", front.loads, "Loads"),
        ("GET", "/requests", front.requests, "Requests"),
        ("GET", "/requests/{request_id:path}", front.request, "Requests"),
    )
    inference = inference or ServedModel(settings.model_name, settings.version, adapters=pipeline.adapters)
    if settings.routes != "admin":
        parts = front.reader, front.parser, settings.strict_fields
        InferenceRoutes(pipeline, front.translator, inference, *parts).add_to(app)
        PoolingRoutes(pipeline, front.translator, front.read_request, front.make_head).add_to(app)
    if front.batches is not None and settings.routes != "admin":
        BatchesProxy(
            app,
            front.batches,
            settings.api_keys,
            front.reader,
            settings.allowed_origins,
            pipeline.ignored,
            settings.strict_fields,
        )
    elif settings.routes != "admin":
        for path in ("/v1/files", "/v1/batches"):
            app.router.routes.append(Route(path, front.no_batches, methods=["GET", "POST"], include_in_schema=False))

    async def close() -> None:
        front.parser.close()
        if front.batches is not None:
            await front.batches.close()

    app.state.close = close
    served: tuple[tuple[Any, ...], ...] = {"all": (*api, *admin), "api": api, "admin": admin}[settings.routes]
    for route in (*for_all, *served):
        add_route(app, *route)
    # The router tries one route after the other.
    app.router.routes.sort(key=lambda route: not isinstance(route, Route) or route.path not in _QUEUED_PATHS)
    for error in (BatonError, HttpProblem, HTTPException):
        app.add_exception_handler(error, _answer_error)
    names = Names(settings.allowed_origins) if settings.local_names_only else None
    app.add_middleware(
        Guard,
        answered=pipeline.answered,
        keys=settings.api_keys,
        names=names,
        batches_key=settings.batches_key,
        check_room=front.check_room,
        queued_paths=_QUEUED_PATHS if settings.routes != "admin" else (),
    )
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=[
                "x-request-id",
                "request-id",
                "x-ignored-fields",
                "server-timing",
                "retry-after",
                SPLIT_HEADER,
            ],
            max_age=600,
        )
    document = cache(partial(describe, app, settings.version))

    async def openapi(request: Request) -> Response:
        return json_response(document())

    app.router.routes.append(Route("/openapi.json", openapi, include_in_schema=False))
    return app


def _installed_version() -> str:
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "0"


async def _answer_error(request: Request, error: Exception) -> Response:
    response = error_response(error, request.scope)
    if isinstance(error, HTTPException) and error.status_code == 405:  # the router names only the first route's methods
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        methods = {method for route in routes for method in route.methods}
        response.headers["allow"] = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
    return response


class _Front:
    def __init__(
        self, pipeline: Pipeline, text: TextModel, settings: HttpSettings, responses: Responses | None
    ) -> None:
        self.kept = KeptResponses(responses or MemoryResponses(MAX_RESPONSES_BYTES))
        address, key = settings.batches_address, settings.batches_key or ""
        self.batches = BatchesClient(address, key) if address else None
        self._pipeline = pipeline
        self._text = text
        self._settings = settings
        self.reader = BodyReader(settings.max_body_bytes, settings.body_timeout_s)
        self.parser = BodyParser()
        self.translator = Translator(text, deadline_s=settings.request_timeout_s, pools_hold=pipeline.max_model_len)
        self._fingerprint = f"baton-{settings.version}"
        granted = dict.fromkeys(_PERMISSIONS, True) | dict.fromkeys(_NOT_PERMITTED, False)
        self._permission = {"id": f"modelperm-{settings.created}", "object": "model_permission", **granted}
        self._permission |= {"created": settings.created, "organization": "*", "group": None}

    async def completions(self, request: Request) -> Response:
        body = await self.read_body(request, schema.CompletionBody)
        options, request_id = body.options(), unique_id(request)
        params, submissions = self.translator.checked(options), []
        for number, prompt in enumerate(body.prompt):
            name = request_id if len(body.prompt) == 1 else f"{request_id}-{number}"
            submit = self.translator.from_text if isinstance(prompt, str) else self.translator.from_token_ids
            submission = await submit(name, prompt, options, params=params)  # type: ignore[arg-type]
            submissions.append(owned(submission, request))
            await asyncio.sleep(0)  # up to 128 short prompts are encoded on the event loop
        echos = None
        if body.echo:
            echos = tuple([p if isinstance(p, str) else await self._text.decode_async(p) for p in body.prompt])
            check_count("echo", sum(map(len, echos)) * submissions[0].n, MAX_ECHO_CHARS, "characters in all choices")
        return self._generate(request, submissions, body, CompletionRender, echos=echos)

    async def chat_completions(self, request: Request) -> Response:
        body = await self.read_body(request, schema.ChatBody)
        submission, more = await self._conversation(request, body)
        return self._generate(request, [submission], body, ChatRender, **more)

    async def responses(self, request: Request) -> Response:
        body = await self.read_body(request, ResponsesBody)
        before: list[Item] = []
        if body.previous_response_id is not None:
            before = await self.kept.conversation(request.scope[CLIENT], body.previous_response_id)
        submission, more = await self._conversation(request, body, body.chat(before))
        head = self.make_head(request, [submission], logprobs=body.shows_logprobs, **more)
        keep = None if body.store is False else self.kept.keeper(request.scope[CLIENT], before, body.input)
        render = ResponsesRender(head, body, keep)
        return GenerationResponse(self._pipeline, [submission], render, stream=bool(body.stream))

    async def messages(self, request: Request) -> Response:
        body = await self.read_body(request, MessagesBody)
        submission, more = await self._conversation(request, body)
        render = MessagesRender(self.make_head(request, [submission], **more), body, submission.max_tokens)
        generator = self._pipeline if body.max_tokens else EchoOnly(self._pipeline)
        return GenerationResponse(generator, [submission], render, stream=bool(body.stream))

    async def count_tokens(self, request: Request) -> Response:
        with self._pipeline.admitted(request.scope[CLIENT]):
            body = await self.read_body(request, CountTokensBody)
            messages = body.chat()
            check_messages(messages)
            ids = await self._text.encode_chat_async(messages, body.rendering())
        return json_response({"input_tokens": len(ids)})

    async def _conversation(
        self,
        request: Request,
        body: schema.ChatBody | ResponsesBody | MessagesBody,
        messages: Sequence[ChatMessage] | None = None,
    ) -> tuple[Submission, dict[str, Any]]:
        """Returns the submission, and the arguments of `Head` about its tools."""
        text, tools, options = self._text, body.tooling(), body.options()
        if tools.may_be_called and (tools.forced or text.tool_format):
            constraint = tools.constraint(
                self._tool_format(), text.marker_ids, options.constraint, options.json_whitespace
            )
            options = replace(options, constraint=constraint)
        request_id, how = unique_id(request), body.rendering()
        messages = messages or body.chat()
        param = "input" if isinstance(body, ResponsesBody) else "messages"
        submission = await self.translator.from_messages(request_id, messages, options, how=how, param=param)
        submission = owned(submission, request)
        free = options.constraint is None  # output that must match a grammar has no reasoning before it
        new_parser = partial(
            make_parser,
            text.tool_format,
            tools.functions,
            thinks=free and text.thinks,
            thinking=free and (text.prompt_ends_in_reasoning(submission.prompt) or _continues_reasoning(messages, how)),
            one_call=not tools.parallel,
        )
        if new_parser() is not None:
            shown = submission.shown_token_ids.union(text.vocabulary.special_ids.intersection(text.marker_ids.values()))
            submission = replace(submission, shown_token_ids=shown, new_parser=new_parser)
        return submission, {"named_tool": bool(tools.named)}

    async def models(self, request: Request) -> Response:
        if is_for_anthropic(request.scope):
            models = [self._anthropic_model(name) for name in self._names()]
            return json_response(model_page(models, request.query_params))
        return json_response({"object": "list", "data": [self._model(name) for name in self._names()]})

    async def model(self, request: Request, model_id: str) -> Response:
        self._adapter(model_id)
        of_api = self._anthropic_model if is_for_anthropic(request.scope) else self._model
        return json_response(of_api(model_id))

    async def load_adapter(self, request: Request) -> Response:
        body = await self._operation(request, schema.LoadAdapterBody)
        await self._pipeline.load_adapter(body.lora_name, body.lora_path, replace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        body = await self._operation(request, schema.UnloadAdapterBody)
        self._pipeline.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def tokenize(self, request: Request) -> Response:
        with self._pipeline.admitted(request.scope[CLIENT]):
            return await self._tokens(await self.read_body(request, schema.TokenizeBody))

    async def _tokens(self, body: schema.TokenizeBody) -> Response:
        if body.prompt is not None:
            ids = await self._text.encode_async(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            messages = body.chat()
            check_messages(messages)
            ids = await self._text.encode_chat_async(messages, body.rendering())
        listing = (self._text.tokenizer, ids, self.translator.max_model_len(), bool(body.return_token_strs))
        answer = await off_loop(len(ids) > LARGE_ENTRIES, tokens_json, *listing)
        return Response(answer, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        with self._pipeline.admitted(request.scope[CLIENT]):
            return await self._text_of(await self.read_body(request, schema.DetokenizeBody))

    async def _text_of(self, body: schema.DetokenizeBody) -> Response:
        if len(body.tokens) > self._text.max_model_len:
            raise InvalidRequest(f"at most {self._text.max_model_len} tokens", param="tokens")
        if body.tokens:
            self.translator.check_token_ids(body.tokens, param="tokens")
        return json_response({"prompt": await self._text.decode_async(body.tokens, skip_special_tokens=False)})

    async def no_batches(self, request: Request) -> Response:
        message = (
            "files and batches are not served: start `python -m batches --data-dir DIR`, and set --batches-address"
        )
        raise InvalidRequest(message, code="not_enabled")

    async def page(self) -> Response:
        return Response(PAGE, headers=_PAGE_HEADERS, media_type="text/html")

    async def live(self) -> Response:
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        ready, reason = self._pipeline.ready()
        if ready:
            return json_response({"ready": True})
        return json_response({"ready": False, "reason": reason}, http=503, headers={"retry-after": "1"})

    async def workers(self) -> Response:
        return json_response(self._pipeline.workers())

    async def expect_workers(self) -> Response:
        self._pipeline.expect_workers()
        return await self.live()

    async def server_info(self) -> Response:
        workers = [w for w in self._pipeline.workers()["workers"] if w["state"] != "lost"]
        return json_response(
            {
                "version": self._settings.version,
                "model": self._settings.model_name,
                "max_model_len": self.translator.max_model_len(),
                "vocab_size": self._text.vocab_size,
                "tool_parser": self._text.tool_format,
                "workers": {role: sum(w["role"] == role for w in workers) for role in ("prefill", "decode")},
            }
        )

    async def model_info(self) -> Response:
        # As in SGLang.
        return json_response(
            {
                "model_path": self._settings.model_name,
                "tokenizer_path": self._settings.model_name,
                "is_generation": self._text.pooling.generates,
                "has_chat_template": self._text.has_chat,
                "max_model_len": self.translator.max_model_len(),
                "vocab_size": self._text.vocab_size,
            }
        )

    async def loads(self) -> Response:
        # As in SGLang: one entry, because the caller has one address to send requests to.
        cluster = self._pipeline.workers()
        own = cluster["coordinator"]
        decode = [w for w in cluster["workers"] if w["role"] == "decode" and w["state"] != "lost"]
        used = sum(w["blocks_total"] - w["blocks_free"] for w in decode)
        total = sum(w["blocks_total"] for w in decode)
        load = {
            "dp_rank": 0,
            "num_reqs": own["requests"],
            "num_running_reqs": own["requests"] - own["queued"],
            "num_waiting_reqs": own["queued"],
            "num_choices": own["choices"],
            "token_usage": round(used / total, 4) if total else 0.0,
        }
        return json_response([load])

    async def tokenizer_info(self) -> Response:
        # What a client needs besides /tokenize to render prompts itself.
        names = self._text.special_tokens
        return json_response(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "vocab_size": self._text.vocab_size,
                "model_max_length": self._text.max_model_len,
                "chat_template": self._text.chat_template,
                **{name: names.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
                "eos_token_ids": list(self._text.eos_token_ids),
            }
        )

    async def requests(self, request: Request) -> Response:
        limit = limit_of(request, KEPT)
        return json_response(await off_loop(limit > 50, _as_json, self._pipeline.requests(limit)))

    async def request(self, request_id: str) -> Response:
        timelines = self._pipeline.request(request_id)
        if not timelines:
            named = f"request {request_id[:100]!r}"
            message = f"{named} is not among the running ones and the last {KEPT}; refused ones are not recorded"
            raise NotFound(message, code="request_not_found", param="request_id")
        return json_response(await off_loop(len(timelines) > 50, _as_json, timelines))

    async def metrics(self) -> Response:
        batches = None if self.batches is None else await self.batches.figures() or {}
        return Response(await self._pipeline.metrics(batches), headers={"content-type": CONTENT_TYPE})

    async def version(self) -> Response:
        return json_response({"version": self._settings.version})

    async def read_request(self, request: Request, model: type[_T]) -> _T:
        """Reads the body of a request to another path that will wait in the queue, unless that has no room for it."""
        self.check_room(request.scope)
        return await self.read_body(request, model)

    def check_room(self, scope: Scope) -> None:
        """Refuses a request, of which only the head is known, that would have no room in the queue."""
        self._pipeline.check_room(scope[CLIENT], time_limit_s(Request(scope)))

    async def read_body(self, request: Request, model: type[_T]) -> _T:
        read = partial(parse, model, strict=self._settings.strict_fields)
        body = await self.parser.parse(read, await self.reader.read(request))
        named = body.ignored
        name = self._settings.model_name if body.model is None else body.model
        if name not in self._names() and name.startswith(body.stand_ins):
            named, name = named | {"model"}, self._settings.model_name
        request.scope[MODEL], request.scope[ADAPTER] = name, self._adapter(name)
        request.scope[IGNORED] = named
        self._pipeline.ignored(request.url.path, named)
        return body

    async def _operation(self, request: Request, model: type[_O]) -> _O:
        if not self._settings.allow_lora_updating:
            message = "adapters are loaded at start, by --lora; --allow-runtime-lora-updating permits this request"
            raise InvalidRequest(message, code="not_enabled")
        read = partial(parse, model, strict=self._settings.strict_fields)
        body = await self.parser.parse(read, await self.reader.read(request))
        request.scope[IGNORED] = body.ignored
        self._pipeline.ignored(request.url.path, body.ignored)
        return body

    def _adapter(self, name: str) -> str:
        """Returns the digest of the adapter of that name; empty for the model itself. Raises NotFound."""
        return self._pipeline.adapters.chosen(name, self._settings.model_name)

    def _names(self) -> list[str]:
        """Returns the names that clients may give as the model: its own, and those of its LoRA adapters."""
        return [self._settings.model_name, *(adapter.name for adapter in self._pipeline.adapters)]

    def _tool_format(self) -> str:
        """Returns the format of tool calls. Raises InvalidRequest if it is unknown."""
        if self._text.tool_format is None:
            message = "calls cannot be forced: their format in this model's chat template is unknown"
            raise InvalidRequest(message, param="tool_choice")
        return self._text.tool_format

    def _anthropic_model(self, name: str) -> dict[str, Any]:
        adapter = self._pipeline.adapters.get(name)
        created = adapter.created if adapter else self._settings.created
        return model_object(name, created, self.translator.max_model_len())

    def _model(self, name: str) -> dict[str, Any]:
        adapter = self._pipeline.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": adapter.created if adapter else self._settings.created,
            "owned_by": "baton",
            "root": adapter.source.path if adapter else name,  # this and the fields below as in vLLM
            "parent": self._settings.model_name if adapter else None,
            "permission": [self._permission],
            "max_model_len": self.translator.max_model_len(),
        }

    def _generate(
        self,
        request: Request,
        submissions: Sequence[Submission],
        body: schema.GenerationBody,
        render: type[Render],
        **more: Any,
    ) -> Response:
        """Builds the answer; `more` holds further arguments of `Head`."""
        stream_options = body.stream_options
        echo_only = isinstance(body, schema.CompletionBody) and body.echo_only
        generator = EchoOnly(self._pipeline) if echo_only else self._pipeline
        head = self.make_head(
            request,
            submissions,
            include_usage=bool(stream_options and stream_options.include_usage),
            continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
            token_ids=bool(body.return_token_ids),
            timeline=bool(body.return_timeline),
            logprobs=submissions[0].sampling.logprobs is not None,
            prompt_logprobs=body.prompt_logprobs is not None,
            **more,
        )
        return GenerationResponse(generator, submissions, render(head), stream=bool(body.stream))

    def make_head(self, request: Request, submissions: Sequence[Submission], **more: Any) -> Head:
        return Head(
            request_id=request.scope[REQUEST_ID],
            unique_id=submissions[0].request_id,
            model=request.scope.get(MODEL, self._settings.model_name),
            created=int(time.time()),
            fingerprint=self._fingerprint,
            vocabulary=self._text.vocabulary,
            prompts=tuple(each.prompt for each in submissions),
            n=submissions[0].n,
            shown_ids=submissions[0].shown_token_ids,
            **more,
        )


def _as_json(records: Sequence[Record]) -> dict[str, Any]:
    return {"requests": [record.as_json() for record in records]}


def _continues_reasoning(messages: Sequence[ChatMessage], how: Rendering) -> bool:
    """Returns whether the model continues a message within its reasoning."""
    begin, end = (messages[-1].content.rfind(tag) for tag in THINK)
    return how.continue_final_message and begin > end
