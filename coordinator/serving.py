"""Opens the parts of the coordinator process, runs them until it is stopped, and closes them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from baton.core.errors import StartupError
from baton.core.names import host_port
from baton.models.model_config import parse_config, parse_config_json
from baton.runtime.batches_access import access_key
from baton.runtime.cluster_token import FLAG as TOKEN_FLAG
from baton.runtime.cluster_token import check_listening, on_loopback
from baton.runtime.config import CoordinatorConfig
from baton.runtime.event_loop import LoopWatch, collect_when_grown, report_violations
from baton.runtime.model_source import resolve_model, served_name
from baton.runtime.paths import expanded
from baton.runtime.ports import bind, share, write_ready_file
from baton.runtime.tls import ClusterTls, read_cluster_tls
from baton.runtime.token_file import read_token
from coordinator.adapters import add_adapters
from coordinator.api_keys import FROM_UP, SHORT, ApiKeys, is_short, read_api_keys
from coordinator.cluster import Cluster
from coordinator.connections import allow_connections, few_connections
from coordinator.control import serve_control
from coordinator.front_tls import FrontTls, read_front_tls
from coordinator.grpc.service import PublicServer
from coordinator.http.app import HttpSettings, create_app
from coordinator.http.server import HttpServer
from coordinator.inference.served import ServedModel
from coordinator.metrics import Metrics
from coordinator.options import check_options, parse_origins, traffic_of
from coordinator.pipeline import Pipeline
from coordinator.policy.adapters import AdapterTable
from coordinator.policy.joining import OwnModel
from coordinator.policy.split import Split
from coordinator.responses_store import DatabaseResponses, MemoryResponses, Responses
from coordinator.structured_output import GrammarCompiler
from coordinator.text.files import read_file
from coordinator.text.model import TextModel
from coordinator.tracing import Tracing
from coordinator.translate import Translator

log = logging.getLogger("baton.coordinator")
HTTP, ADMIN = "HTTP server", "admin server"


async def run_coordinator(config: CoordinatorConfig) -> None:
    """Runs the coordinator until SIGTERM or SIGINT. At SIGUSR1, or with --no-drain-workers, it finishes its requests
    and leaves the workers to another coordinator, which may already listen on its ports (--take-over).

    Raises:
        StartupError: it cannot start, or a part of it has failed.
    """
    check_options(config)
    access = _read_access(config)
    for noisy in ("uvicorn.error", "python_multipart"):
        logging.getLogger(noisy).setLevel(logging.ERROR)  # one line per malformed request concerns only its sender
    background: list[asyncio.Task[None]] = []
    async with AsyncExitStack() as closing:  # closes in reverse order
        core = _open_core(config, access, closing)
        report_violations(core.cluster.fail)
        await asyncio.to_thread(core.text.check)
        allow_connections()
        if few := few_connections():
            log.warning("%s", few)
        servers, public = _open_servers(config, access, core, closing)
        closing.callback(_cancel, background)
        if config.take_over:
            core.cluster.requests.holding.expect_workers(time.monotonic() + config.drain_timeout_s)
        control, control_port = await serve_control(
            core.cluster, config.control_host, config.control_port, access.cluster_tls, take_over=config.take_over
        )
        closing.push_async_callback(control.stop, 1.0)
        closing.push_async_callback(public.stop, grace_s=2.0)
        grpc_port = await public.start(config.host, config.grpc_port, take_over=config.take_over)
        stop, hand_over = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _set_both, hand_over, stop)
        serving = [asyncio.create_task(server.serve(), name=title) for title, server in servers.items()]
        background += [
            *serving,
            asyncio.create_task(core.cluster.tick(), name="cluster tick"),
            asyncio.create_task(core.loop_watch.run(), name="loop watch"),
            asyncio.create_task(collect_when_grown(lambda: len(core.cluster.requests)), name="garbage"),
        ]
        for task in background:
            task.add_done_callback(lambda t: _end_on_failure(t, stop))
        addresses = {
            "http": host_port(config.host, servers[HTTP].address[1]),
            "grpc": host_port(config.host, grpc_port),
            "control": host_port(config.control_host, control_port),
        }
        if access.front_tls:
            addresses["scheme"] = "https"
        if access.apart:
            addresses["admin"] = host_port(config.control_host, servers[ADMIN].address[1])
        if not core.text.pooling.generates:
            log.info("%s is served for pooling only, and needs no decode worker (see --runner)", core.name)
        log.info("serving %s: %s", core.name, addresses)
        write_ready_file(config.ready_file, addresses)

        await stop.wait()  # until a signal, or a background task fails
        if _failed(background):
            pass  # workers keep their sequences, and dial the next coordinator
        elif hand_over.is_set() or not config.drain_workers:
            for server in servers.values():
                server.hand_over()
            background.append(asyncio.create_task(public.stop(config.drain_timeout_s), name="gRPC server"))
            await core.cluster.finish(config.drain_timeout_s)
        else:
            await core.cluster.drain(config.drain_timeout_s)
        for server in servers.values():
            server.stop()
        await asyncio.wait(serving, timeout=5.0)
    if failed := _failed(background):
        raise StartupError(f"{failed[0].get_name()} failed: {failed[0].exception()}")


@dataclass(frozen=True, slots=True)
class _Access:
    """Who may reach the coordinator: clients by keys and certificate, workers by token and certificates."""

    keys: ApiKeys
    front_tls: FrontTls | None
    token: str
    cluster_tls: ClusterTls | None

    @property
    def apart(self) -> bool:
        """Whether operators have a port of their own: they need neither keys nor certificates, and clients must not
        reach their routes."""
        return bool(self.keys or self.front_tls)


def _read_access(config: CoordinatorConfig) -> _Access:
    token = read_token(config.cluster_token_file)
    check_listening("--control-host", config.control_host, token)
    keys = read_api_keys(config.api_key_file, config.api_key, os.environ.get(FROM_UP, ""))
    if is_short(config.api_key):
        log.warning(SHORT)
    front_tls = read_front_tls(config.tls_cert_file, config.tls_key_file)
    return _Access(keys, front_tls, token, read_cluster_tls(config.cluster_tls_dir, "coordinator"))


@dataclass(frozen=True, slots=True)
class _Core:
    """What all servers share; `name` is the model's."""

    name: str
    text: TextModel
    cluster: Cluster
    pipeline: Pipeline
    loop_watch: LoopWatch


def _open_core(config: CoordinatorConfig, access: _Access, closing: AsyncExitStack) -> _Core:
    model_dir = resolve_model(config.model)
    name = config.served_model_name or served_name(config.model)
    own_model = read_own_model(model_dir)
    text = TextModel.load(
        model_dir,
        max_model_len=config.max_model_len or None,
        tool_parser=config.tool_parser,
        runner=config.runner,
        pooling=config.pooling,
        matryoshka=config.matryoshka,
    )
    text.start()
    closing.callback(text.close)
    _warn_of(text, config)
    cluster = Cluster(
        config.lease_s,
        config.max_queued_requests,
        config.max_queued_tokens,
        own_model,
        access.token,
        config.hold_s,
        config.max_deaths,
        AdapterTable(name, config.max_loras, config.max_lora_rank),
        cast(Split, config.split),
    )
    dispatcher = cluster.requests.dispatcher
    dispatcher.several_tenants = access.keys.has_several_tenants()
    dispatcher.stream_weight = config.stream_weight
    dispatcher.traffic = traffic_of(config.traffic)
    add_adapters(cluster, config.lora, own_model.config)
    loop_watch = LoopWatch()
    metrics = Metrics(name, config.metrics_compat, config.slow_request_s, access.keys.labelled_tenants())
    tracing = None
    if config.otlp_endpoint:
        tracing = Tracing(config.otlp_endpoint)
        closing.push_async_callback(asyncio.to_thread, tracing.close)
    grammars = GrammarCompiler(model_dir, text.vocab_size)
    closing.callback(grammars.close)
    generates = text.pooling.generates
    pipeline = Pipeline(cluster, text.vocabulary, loop_watch, metrics, tracing, grammars, generates=generates)
    return _Core(name, text, cluster, pipeline, loop_watch)


def _open_servers(
    config: CoordinatorConfig, access: _Access, core: _Core, closing: AsyncExitStack
) -> tuple[dict[str, HttpServer], PublicServer]:
    """Returns the servers of HTTP, whose ports are bound, and that of gRPC, which `start` binds."""
    clients_tls = access.front_tls

    def serve(sock: socket.socket, settings: HttpSettings, *more: Any, tls: FrontTls | None = None) -> HttpServer:
        app = create_app(core.pipeline, core.text, settings, *more)
        closing.push_async_callback(app.state.close)
        return HttpServer(app, sock, grace_s=2.0, tls=tls.context if tls else None)

    front = bind(config.host, config.port, "--port", "HTTP", take_over=config.take_over)
    batches_key = _batches_key(config, access.keys, access.token)
    settings = _settings(config, core.name, access.keys, "api" if access.apart else "all", front, batches_key)
    responses = _responses(config)
    closing.push_async_callback(asyncio.to_thread, responses.close)
    inference = ServedModel(core.name, settings.version, adapters=core.cluster.adapters)
    servers = {HTTP: serve(front, settings, inference, responses, tls=clients_tls)}
    if access.apart:
        admin = bind(config.control_host, config.admin_port, "--admin-port", "admin", take_over=config.take_over)
        share(admin)
        settings_of_operators = _settings(config, core.name, ApiKeys(), "admin", admin, batches_key)
        servers[ADMIN] = serve(admin, settings_of_operators)
    translator = Translator(core.text, deadline_s=config.request_timeout_s, pools_hold=core.pipeline.max_model_len)
    public = PublicServer(
        core.pipeline,
        translator,
        core.name,
        settings.max_body_bytes,
        access.keys,
        clients_tls.credentials if clients_tls else None,
        config.strict_fields,
        inference,
    )
    share(front)
    return servers, public


def _settings(
    config: CoordinatorConfig,
    name: str,
    keys: ApiKeys,
    routes: Literal["all", "api", "admin"],
    sock: socket.socket,
    batches_key: str | None = None,
) -> HttpSettings:
    """Returns the settings of the clients' or the operators' server; only clients, which have keys, use origins."""
    return HttpSettings(
        model_name=name,
        request_timeout_s=config.request_timeout_s,
        max_body_bytes=round(config.max_body_mib * (1 << 20)),
        api_keys=keys,
        allowed_origins=() if routes == "admin" else parse_origins(config.allowed_origins),
        routes=routes,
        local_names_only=not keys and on_loopback(sock.getsockname()[0]),
        strict_fields=config.strict_fields,
        batches_address=config.batches_address,
        batches_key=batches_key,
        allow_lora_updating=config.allow_runtime_lora_updating,
    )


def _batches_key(config: CoordinatorConfig, keys: ApiKeys, token: str) -> str | None:
    """Returns what the batches process authenticates with, None if it cannot. Raises StartupError."""
    if not keys or token:
        return access_key(token)
    if config.batches_address:  # without a token, any client could run requests for any key
        raise StartupError(f"--batches-address with API keys requires {TOKEN_FLAG}")
    return None


def _responses(config: CoordinatorConfig) -> Responses:
    max_bytes = round(config.responses_mib * (1 << 20))
    if not config.store:
        return MemoryResponses(max_bytes)
    return DatabaseResponses(expanded(config.data_dir) / "responses.sqlite", max_bytes)


def _warn_of(text: TextModel, config: CoordinatorConfig) -> None:
    if config.tool_parser not in ("auto", "hermes") and text.has_chat and not text.template_has_tools:
        log.warning("the chat template has no tools: calls are in the form of hermes, and --tool-parser is ignored")
    if text.template_has_tools and text.tool_format is None:
        log.warning("the chat template writes tool calls in an unknown format: they are not parsed; see --tool-parser")
    if text.ignored_defaults:
        log.warning("generation_config: ignoring unsupported settings: %s", text.ignored_defaults)


def read_own_model(model_dir: Path) -> OwnModel:
    """Reads the model's config.json, and the digest of its tokenizer. Raises StartupError, with one line."""
    path, tokenizer = model_dir / "config.json", model_dir / "tokenizer.json"
    data = read_file(path)
    tokens = hashlib.sha256(read_file(tokenizer)).hexdigest() if tokenizer.exists() else ""
    config = parse_config(parse_config_json(data))
    return OwnModel(str(model_dir), hashlib.sha256(data).hexdigest(), config, tokens)


def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


def _set_both(one: asyncio.Event, other: asyncio.Event) -> None:
    one.set()
    other.set()


def _failed(tasks: Iterable[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    return [task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None]


def _end_on_failure(task: asyncio.Task[None], stop: asyncio.Event) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s failed", task.get_name(), exc_info=task.exception())
        stop.set()
