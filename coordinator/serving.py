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
from pathlib import Path
from typing import Literal, cast

from baton.core.errors import StartupError
from baton.core.model_config import parse_config, parse_config_json
from baton.core.names import host_port
from baton.runtime.batches_access import access_key
from baton.runtime.cluster_token import FLAG as TOKEN_FLAG
from baton.runtime.cluster_token import check_listening, on_loopback
from baton.runtime.config import CoordinatorConfig
from baton.runtime.event_loop import LoopWatch, collect_when_grown
from baton.runtime.model_source import resolve_model, served_name
from baton.runtime.paths import expanded
from baton.runtime.ports import bind, share, write_ready_file
from baton.runtime.tls import read_cluster_tls
from baton.runtime.token_file import read_token
from coordinator.adapters import add_adapters
from coordinator.api_keys import FROM_UP, SHORT, ApiKeys, is_short, read_api_keys
from coordinator.cluster import Cluster
from coordinator.connections import allow_connections, few_connections
from coordinator.control import serve_control
from coordinator.front_tls import read_front_tls
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


async def run_coordinator(config: CoordinatorConfig) -> None:
    """Runs the coordinator until SIGTERM or SIGINT. At SIGUSR1, or with --no-drain-workers, it finishes its requests
    and leaves the workers to another coordinator, which may already listen on its ports (--take-over).

    Raises:
        StartupError: it cannot start, or a part of it has failed.
    """
    check_options(config)
    token = read_token(config.cluster_token_file)
    check_listening("--control-host", config.control_host, token)
    keys = read_api_keys(config.api_key_file, config.api_key, os.environ.get(FROM_UP, ""))
    if is_short(config.api_key):
        log.warning(SHORT)
    front_tls = read_front_tls(config.tls_cert_file, config.tls_key_file)
    cluster_tls = read_cluster_tls(config.cluster_tls_dir, "coordinator")
    model_dir = resolve_model(config.model)
    name = config.served_model_name or served_name(config.model)
    own_model = read_own_model(model_dir)
    longest = config.max_model_len or None
    text = TextModel.load(
        model_dir,
        max_model_len=longest,
        tool_parser=config.tool_parser,
        runner=config.runner,
        pooling=config.pooling,
        matryoshka=config.matryoshka,
    )
    text.start()
    _warn_of(text, config)
    for noisy in ("uvicorn.error", "python_multipart"):
        logging.getLogger(noisy).setLevel(logging.ERROR)  # one line per malformed request concerns only its sender
    cluster = Cluster(
        config.lease_s,
        config.max_queued_requests,
        config.max_queued_tokens,
        own_model,
        token,
        config.hold_s,
        config.max_deaths,
        AdapterTable(name, config.max_loras, config.max_lora_rank),
        cast(Split, config.split),
    )
    cluster.requests.dispatcher.several_tenants = keys.has_several_tenants()
    cluster.requests.dispatcher.stream_weight = config.stream_weight
    add_adapters(cluster, config.lora, own_model.config)
    cluster.requests.dispatcher.traffic = traffic_of(config.traffic)
    loop_watch = LoopWatch()
    metrics = Metrics(name, config.metrics_compat, config.slow_request_s, keys.labelled_tenants())
    tracing = Tracing(config.otlp_endpoint) if config.otlp_endpoint else None
    grammars = GrammarCompiler(model_dir, text.vocab_size)
    generates = text.pooling.generates
    pipeline = Pipeline(cluster, text.vocabulary, loop_watch, metrics, tracing, grammars, generates=generates)
    translator = Translator(text, deadline_s=config.request_timeout_s, pools_hold=pipeline.max_model_len)
    await asyncio.to_thread(text.check)
    apart = bool(keys or front_tls)  # operators need neither keys nor certificates; clients must not reach their routes
    front = bind(config.host, config.port, "--port", "HTTP", take_over=config.take_over)
    batches_key = _batches_key(config, keys, token)
    settings = _settings(config, name, keys, "api" if apart else "all", front, batches_key)
    responses = _responses(config)
    inference = ServedModel(name, settings.version, adapters=cluster.adapters)
    app = create_app(pipeline, text, settings, inference, responses)
    allow_connections()
    if few := few_connections():
        log.warning("%s", few)
    http = HttpServer(app, front, grace_s=2.0, tls=front_tls.context if front_tls else None)
    servers, apps = {"HTTP server": http}, [app]
    if apart:
        admin = bind(config.control_host, config.admin_port, "--admin-port", "admin", take_over=config.take_over)
        share(admin)
        apps.append(create_app(pipeline, text, _settings(config, name, ApiKeys(), "admin", admin, batches_key)))
        servers["admin server"] = HttpServer(apps[-1], admin, grace_s=2.0)
    credentials = front_tls.credentials if front_tls else None
    options = settings.max_body_bytes, keys, credentials, config.strict_fields
    public = PublicServer(pipeline, translator, name, *options, inference)
    share(front)
    take_over = config.take_over
    if take_over:
        cluster.requests.holding.expect_workers(time.monotonic() + config.drain_timeout_s)
    control, control_port = await serve_control(
        cluster, config.control_host, config.control_port, cluster_tls, take_over=take_over
    )
    background: list[asyncio.Task[None]] = []
    try:
        grpc_port = await public.start(config.host, config.grpc_port, take_over=take_over)
        stop, hand_over = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _set_both, hand_over, stop)
        serving = {asyncio.create_task(server.serve(), name=title) for title, server in servers.items()}
        background += [
            *serving,
            asyncio.create_task(cluster.tick(), name="cluster tick"),
            asyncio.create_task(loop_watch.run(), name="loop watch"),
            asyncio.create_task(collect_when_grown(lambda: len(cluster.requests)), name="garbage"),
        ]
        for task in background:
            task.add_done_callback(lambda t: _end_on_failure(t, stop))
        addresses = {
            "http": host_port(config.host, http.address[1]),
            "grpc": host_port(config.host, grpc_port),
            "control": host_port(config.control_host, control_port),
        }
        if front_tls:
            addresses["scheme"] = "https"
        if apart:
            addresses["admin"] = host_port(config.control_host, servers["admin server"].address[1])
        if not generates:
            log.info("%s is served for pooling only, and needs no decode worker (see --runner)", name)
        log.info("serving %s: %s", name, addresses)
        write_ready_file(config.ready_file, addresses)

        await stop.wait()  # until a signal, or a background task fails
        if _failed(background):
            pass  # workers keep their sequences, and dial the next coordinator
        elif hand_over.is_set() or not config.drain_workers:
            for server in servers.values():
                server.hand_over()
            background.append(asyncio.create_task(public.stop(config.drain_timeout_s), name="gRPC server"))
            await cluster.finish(config.drain_timeout_s)
        else:
            await cluster.drain(config.drain_timeout_s)
        for server in servers.values():
            server.stop()
        await asyncio.wait(serving, timeout=5.0)
    finally:
        await public.stop(grace_s=2.0)
        await control.stop(1.0)
        for task in background:
            task.cancel()
        for each in apps:
            await each.state.close()
        grammars.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        await asyncio.to_thread(responses.close)
        text.close()
    if failed := _failed(background):
        raise StartupError(f"{failed[0].get_name()} failed: {failed[0].exception()}")


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


def _set_both(one: asyncio.Event, other: asyncio.Event) -> None:
    one.set()
    other.set()


def _failed(tasks: Iterable[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    return [task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None]


def _end_on_failure(task: asyncio.Task[None], stop: asyncio.Event) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s failed", task.get_name(), exc_info=task.exception())
        stop.set()
