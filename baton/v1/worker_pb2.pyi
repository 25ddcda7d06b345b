from baton.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "timeout_ms", "token", "next_role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    timeout_ms: int
    token: str
    next_role: Role
    def __init__(self, worker_id: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., token: _Optional[str] = ..., next_role: _Optional[_Union[Role, str]] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetTrafficRequest(_message.Message):
    __slots__ = ("percent", "clear", "token")
    class PercentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    percent: _containers.ScalarMap[str, float]
    clear: bool
    token: str
    def __init__(self, percent: _Optional[_Mapping[str, float]] = ..., clear: _Optional[bool] = ..., token: _Optional[str] = ...) -> None: ...

class SetTrafficResponse(_message.Message):
    __slots__ = ("percent",)
    class PercentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    percent: _containers.ScalarMap[str, float]
    def __init__(self, percent: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("join", "events", "heartbeat", "drained", "leave", "adapter_states")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_STATES_FIELD_NUMBER: _ClassVar[int]
    join: Join
    events: StepEvents
    heartbeat: Heartbeat
    drained: Drained
    leave: Leave
    adapter_states: AdapterStates
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., events: _Optional[_Union[StepEvents, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., adapter_states: _Optional[_Union[AdapterStates, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "prefill", "assign", "abort", "drain", "heartbeat_ack", "release", "set_adapters")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_ACK_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SET_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    prefill: Prefill
    assign: Assign
    abort: Abort
    drain: Drain
    heartbeat_ack: HeartbeatAck
    release: ReleaseRecords
    set_adapters: SetAdapters
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., heartbeat_ack: _Optional[_Union[HeartbeatAck, _Mapping]] = ..., release: _Optional[_Union[ReleaseRecords, _Mapping]] = ..., set_adapters: _Optional[_Union[SetAdapters, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("worker_id", "role", "incarnation", "facts", "link_address", "host", "pids", "blocks_total", "token", "step_tokens", "max_running", "run_id", "replace", "tensor_parallel", "both_roles", "revision", "computes_prompts", "domain")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    BOTH_ROLES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    incarnation: int
    facts: _types_pb2.Compatibility
    link_address: str
    host: str
    pids: _containers.RepeatedScalarFieldContainer[int]
    blocks_total: int
    token: str
    step_tokens: int
    max_running: int
    run_id: str
    replace: bool
    tensor_parallel: int
    both_roles: bool
    revision: str
    computes_prompts: bool
    domain: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., incarnation: _Optional[int] = ..., facts: _Optional[_Union[_types_pb2.Compatibility, _Mapping]] = ..., link_address: _Optional[str] = ..., host: _Optional[str] = ..., pids: _Optional[_Iterable[int]] = ..., blocks_total: _Optional[int] = ..., token: _Optional[str] = ..., step_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., run_id: _Optional[str] = ..., replace: _Optional[bool] = ..., tensor_parallel: _Optional[int] = ..., both_roles: _Optional[bool] = ..., revision: _Optional[str] = ..., computes_prompts: _Optional[bool] = ..., domain: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run_id", "lease_ms", "heartbeat_ms", "handle_key", "tracked", "now_ms")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_KEY_FIELD_NUMBER: _ClassVar[int]
    TRACKED_FIELD_NUMBER: _ClassVar[int]
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    lease_ms: int
    heartbeat_ms: int
    handle_key: bytes
    tracked: _containers.RepeatedCompositeFieldContainer[TrackedSequence]
    now_ms: int
    def __init__(self, run_id: _Optional[str] = ..., lease_ms: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., handle_key: _Optional[bytes] = ..., tracked: _Optional[_Iterable[_Union[TrackedSequence, _Mapping]]] = ..., now_ms: _Optional[int] = ...) -> None: ...

class TrackedSequence(_message.Message):
    __slots__ = ("sequence", "next_index", "here")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    next_index: int
    here: bool
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., next_index: _Optional[int] = ..., here: _Optional[bool] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("worker_id", "incarnation", "link_address", "handle")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    link_address: str
    handle: _types_pb2.Handle
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., link_address: _Optional[str] = ..., handle: _Optional[_Union[_types_pb2.Handle, _Mapping]] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("request", "targets")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    request: _types_pb2.SequenceRequest
    targets: _containers.RepeatedCompositeFieldContainer[Target]
    def __init__(self, request: _Optional[_Union[_types_pb2.SequenceRequest, _Mapping]] = ..., targets: _Optional[_Iterable[_Union[Target, _Mapping]]] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("sequence", "targets", "attempt")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    targets: _containers.RepeatedCompositeFieldContainer[Target]
    attempt: int
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., targets: _Optional[_Iterable[_Union[Target, _Mapping]]] = ..., attempt: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("sequence", "reason", "tombstone_ms")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_MS_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    reason: str
    tombstone_ms: int
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., reason: _Optional[str] = ..., tombstone_ms: _Optional[int] = ...) -> None: ...

class ReleaseRecords(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[_types_pb2.SequenceId]
    def __init__(self, sequences: _Optional[_Iterable[_Union[_types_pb2.SequenceId, _Mapping]]] = ...) -> None: ...

class AdapterSource(_message.Message):
    __slots__ = ("digest", "path")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    digest: str
    path: str
    def __init__(self, digest: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class SetAdapters(_message.Message):
    __slots__ = ("adapters", "max_rank")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterSource]
    max_rank: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterSource, _Mapping]]] = ..., max_rank: _Optional[int] = ...) -> None: ...

class AdapterFailure(_message.Message):
    __slots__ = ("digest", "reason")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    digest: str
    reason: str
    def __init__(self, digest: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AdapterStates(_message.Message):
    __slots__ = ("loaded", "failed")
    LOADED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    loaded: _containers.RepeatedScalarFieldContainer[str]
    failed: _containers.RepeatedCompositeFieldContainer[AdapterFailure]
    def __init__(self, loaded: _Optional[_Iterable[str]] = ..., failed: _Optional[_Iterable[_Union[AdapterFailure, _Mapping]]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("timeout_ms", "next_role")
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROLE_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    next_role: Role
    def __init__(self, timeout_ms: _Optional[int] = ..., next_role: _Optional[_Union[Role, str]] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence_number", "load", "gpu")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    load: Load
    gpu: GpuUsage
    def __init__(self, sequence_number: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., gpu: _Optional[_Union[GpuUsage, _Mapping]] = ...) -> None: ...

class GpuUsage(_message.Message):
    __slots__ = ("memory_used_bytes", "memory_total_bytes", "utilisation")
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    memory_used_bytes: int
    memory_total_bytes: int
    utilisation: float
    def __init__(self, memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., utilisation: _Optional[float] = ...) -> None: ...

class HeartbeatAck(_message.Message):
    __slots__ = ("sequence_number",)
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    def __init__(self, sequence_number: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("blocks_total", "blocks_free", "running", "waiting", "prompt_tokens_computed", "tokens_generated", "kv_bytes_sent", "kv_bytes_received", "steps", "backlog_tokens", "hand_overs", "sequences", "speculation", "chunks_resent", "handles_refused", "stale_messages", "prompt_tokens_cached", "kv_bytes_reused", "links_refused", "preemptions", "preempted", "steps_ahead", "rows_discarded", "chunks_early", "step_s", "prompt_cost")
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAND_OVERS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_RESENT_FIELD_NUMBER: _ClassVar[int]
    HANDLES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    STALE_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_REUSED_FIELD_NUMBER: _ClassVar[int]
    LINKS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    STEPS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    ROWS_DISCARDED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_EARLY_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_COST_FIELD_NUMBER: _ClassVar[int]
    blocks_total: int
    blocks_free: int
    running: int
    waiting: int
    prompt_tokens_computed: int
    tokens_generated: int
    kv_bytes_sent: int
    kv_bytes_received: int
    steps: int
    backlog_tokens: int
    hand_overs: int
    sequences: int
    speculation: _types_pb2.SpeculationCounters
    chunks_resent: int
    handles_refused: int
    stale_messages: int
    prompt_tokens_cached: int
    kv_bytes_reused: int
    links_refused: int
    preemptions: int
    preempted: int
    steps_ahead: int
    rows_discarded: int
    chunks_early: int
    step_s: float
    prompt_cost: PromptCost
    def __init__(self, blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., prompt_tokens_computed: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., kv_bytes_sent: _Optional[int] = ..., kv_bytes_received: _Optional[int] = ..., steps: _Optional[int] = ..., backlog_tokens: _Optional[int] = ..., hand_overs: _Optional[int] = ..., sequences: _Optional[int] = ..., speculation: _Optional[_Union[_types_pb2.SpeculationCounters, _Mapping]] = ..., chunks_resent: _Optional[int] = ..., handles_refused: _Optional[int] = ..., stale_messages: _Optional[int] = ..., prompt_tokens_cached: _Optional[int] = ..., kv_bytes_reused: _Optional[int] = ..., links_refused: _Optional[int] = ..., preemptions: _Optional[int] = ..., preempted: _Optional[int] = ..., steps_ahead: _Optional[int] = ..., rows_discarded: _Optional[int] = ..., chunks_early: _Optional[int] = ..., step_s: _Optional[float] = ..., prompt_cost: _Optional[_Union[PromptCost, _Mapping]] = ...) -> None: ...

class PromptCost(_message.Message):
    __slots__ = ("token_s", "step_tokens", "step_s")
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    token_s: float
    step_tokens: int
    step_s: float
    def __init__(self, token_s: _Optional[float] = ..., step_tokens: _Optional[int] = ..., step_s: _Optional[float] = ...) -> None: ...

class StepEvents(_message.Message):
    __slots__ = ("step_id", "tokens", "ended", "parked", "handed_over", "load", "kv_cache_events", "alone")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    tokens: _containers.RepeatedCompositeFieldContainer[TokenEvent]
    ended: _containers.RepeatedCompositeFieldContainer[SequenceEnded]
    parked: _containers.RepeatedCompositeFieldContainer[Parked]
    handed_over: _containers.RepeatedCompositeFieldContainer[HandedOver]
    load: Load
    kv_cache_events: KVCacheEvents
    alone: _types_pb2.SequenceId
    def __init__(self, step_id: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[TokenEvent, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[SequenceEnded, _Mapping]]] = ..., parked: _Optional[_Iterable[_Union[Parked, _Mapping]]] = ..., handed_over: _Optional[_Iterable[_Union[HandedOver, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., kv_cache_events: _Optional[_Union[KVCacheEvents, _Mapping]] = ..., alone: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("sequence", "first_index", "tokens", "logprobs", "stamps", "speculation", "prompt_logprobs", "cached_tokens", "pooled")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    first_index: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    stamps: _types_pb2.StageStamps
    speculation: _types_pb2.SpeculationCounters
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    cached_tokens: int
    pooled: bytes
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., first_index: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ..., stamps: _Optional[_Union[_types_pb2.StageStamps, _Mapping]] = ..., speculation: _Optional[_Union[_types_pb2.SpeculationCounters, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., pooled: _Optional[bytes] = ...) -> None: ...

class SequenceEnded(_message.Message):
    __slots__ = ("sequence", "reason", "message", "stamps", "speculation", "code")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    reason: str
    message: str
    stamps: _types_pb2.StageStamps
    speculation: _types_pb2.SpeculationCounters
    code: _types_pb2.ErrorCode
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., stamps: _Optional[_Union[_types_pb2.StageStamps, _Mapping]] = ..., speculation: _Optional[_Union[_types_pb2.SpeculationCounters, _Mapping]] = ..., code: _Optional[_Union[_types_pb2.ErrorCode, str]] = ...) -> None: ...

class Parked(_message.Message):
    __slots__ = ("sequence", "reason")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    reason: str
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class HandedOver(_message.Message):
    __slots__ = ("sequence", "decode_worker", "bytes", "stamps")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    decode_worker: str
    bytes: int
    stamps: _types_pb2.StageStamps
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., decode_worker: _Optional[str] = ..., bytes: _Optional[int] = ..., stamps: _Optional[_Union[_types_pb2.StageStamps, _Mapping]] = ...) -> None: ...

class KVCacheEvents(_message.Message):
    __slots__ = ("stored", "evicted", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    evicted: _containers.RepeatedScalarFieldContainer[bytes]
    cleared: bool
    def __init__(self, stored: _Optional[_Iterable[bytes]] = ..., evicted: _Optional[_Iterable[bytes]] = ..., cleared: _Optional[bool] = ...) -> None: ...
