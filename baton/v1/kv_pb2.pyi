from baton.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkRequest(_message.Message):
    __slots__ = ("hello", "offer", "chunk", "abort", "edge_open", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    EDGE_OPEN_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    offer: Offer
    chunk: Chunk
    abort: AbortTransfer
    edge_open: EdgeOpen
    ping: Ping
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., abort: _Optional[_Union[AbortTransfer, _Mapping]] = ..., edge_open: _Optional[_Union[EdgeOpen, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class LinkResponse(_message.Message):
    __slots__ = ("welcome", "accept", "refuse", "posted", "ack", "abort", "edge_ready", "pong")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    POSTED_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    EDGE_READY_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    welcome: LinkWelcome
    accept: Accept
    refuse: Refuse
    posted: Posted
    ack: Ack
    abort: AbortTransfer
    edge_ready: EdgeReady
    pong: Ping
    def __init__(self, welcome: _Optional[_Union[LinkWelcome, _Mapping]] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., posted: _Optional[_Union[Posted, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., abort: _Optional[_Union[AbortTransfer, _Mapping]] = ..., edge_ready: _Optional[_Union[EdgeReady, _Mapping]] = ..., pong: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("prefill_worker", "prefill_incarnation", "run_id", "tensor_parallel", "token", "gpus", "facts")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    prefill_incarnation: int
    run_id: str
    tensor_parallel: int
    token: str
    gpus: _containers.RepeatedScalarFieldContainer[str]
    facts: _types_pb2.Compatibility
    def __init__(self, prefill_worker: _Optional[str] = ..., prefill_incarnation: _Optional[int] = ..., run_id: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., token: _Optional[str] = ..., gpus: _Optional[_Iterable[str]] = ..., facts: _Optional[_Union[_types_pb2.Compatibility, _Mapping]] = ...) -> None: ...

class LinkWelcome(_message.Message):
    __slots__ = ("decode_worker", "store_host", "store_port", "tensor_parallel", "store_nonce", "staging_bytes", "facts")
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    STORE_NONCE_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    decode_worker: str
    store_host: str
    store_port: int
    tensor_parallel: int
    store_nonce: str
    staging_bytes: int
    facts: _types_pb2.Compatibility
    def __init__(self, decode_worker: _Optional[str] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., store_nonce: _Optional[str] = ..., staging_bytes: _Optional[int] = ..., facts: _Optional[_Union[_types_pb2.Compatibility, _Mapping]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class EdgeOpen(_message.Message):
    __slots__ = ("prefill_rank", "decode_rank", "generation", "prefix")
    PREFILL_RANK_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefill_rank: int
    decode_rank: int
    generation: int
    prefix: str
    def __init__(self, prefill_rank: _Optional[int] = ..., decode_rank: _Optional[int] = ..., generation: _Optional[int] = ..., prefix: _Optional[str] = ...) -> None: ...

class EdgeReady(_message.Message):
    __slots__ = ("prefill_rank", "decode_rank", "generation", "error")
    PREFILL_RANK_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    prefill_rank: int
    decode_rank: int
    generation: int
    error: str
    def __init__(self, prefill_rank: _Optional[int] = ..., decode_rank: _Optional[int] = ..., generation: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("request", "handle", "num_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: _types_pb2.SequenceRequest
    handle: _types_pb2.Handle
    num_tokens: int
    def __init__(self, request: _Optional[_Union[_types_pb2.SequenceRequest, _Mapping]] = ..., handle: _Optional[_Union[_types_pb2.Handle, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("sequence", "prefix_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    prefix_tokens: int
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., prefix_tokens: _Optional[int] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("sequence", "message", "code")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    message: str
    code: _types_pb2.ErrorCode
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., message: _Optional[str] = ..., code: _Optional[_Union[_types_pb2.ErrorCode, str]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("sequence", "index", "start_token", "end_token", "start_layer", "end_layer", "num_bytes", "edge_generation", "prefill_rank", "decode_rank", "first_token", "last", "first_logprob", "cached_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    START_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    EDGE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANK_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    index: int
    start_token: int
    end_token: int
    start_layer: int
    end_layer: int
    num_bytes: int
    edge_generation: int
    prefill_rank: int
    decode_rank: int
    first_token: int
    last: bool
    first_logprob: _types_pb2.TokenLogprob
    cached_tokens: int
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., index: _Optional[int] = ..., start_token: _Optional[int] = ..., end_token: _Optional[int] = ..., start_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., num_bytes: _Optional[int] = ..., edge_generation: _Optional[int] = ..., prefill_rank: _Optional[int] = ..., decode_rank: _Optional[int] = ..., first_token: _Optional[int] = ..., last: _Optional[bool] = ..., first_logprob: _Optional[_Union[_types_pb2.TokenLogprob, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Posted(_message.Message):
    __slots__ = ("sequence", "index", "edge_generation", "prefill_rank", "decode_rank")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    EDGE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANK_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    index: int
    edge_generation: int
    prefill_rank: int
    decode_rank: int
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., index: _Optional[int] = ..., edge_generation: _Optional[int] = ..., prefill_rank: _Optional[int] = ..., decode_rank: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("sequence", "index", "ok", "complete", "prefill_rank", "decode_rank")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANK_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    index: int
    ok: bool
    complete: bool
    prefill_rank: int
    decode_rank: int
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., index: _Optional[int] = ..., ok: _Optional[bool] = ..., complete: _Optional[bool] = ..., prefill_rank: _Optional[int] = ..., decode_rank: _Optional[int] = ...) -> None: ...

class AbortTransfer(_message.Message):
    __slots__ = ("sequence", "reason", "tombstone_ms")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_MS_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.SequenceId
    reason: str
    tombstone_ms: int
    def __init__(self, sequence: _Optional[_Union[_types_pb2.SequenceId, _Mapping]] = ..., reason: _Optional[str] = ..., tombstone_ms: _Optional[int] = ...) -> None: ...
