from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL_ERROR: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_SEQUENCE: _ClassVar[ErrorCode]
    ERROR_CODE_ABANDONED: _ClassVar[ErrorCode]
    ERROR_CODE_DRAINING: _ClassVar[ErrorCode]
    ERROR_CODE_WORKER_LOST: _ClassVar[ErrorCode]
    ERROR_CODE_HANDOFF_FAILED: _ClassVar[ErrorCode]
    ERROR_CODE_KV_CORRUPT: _ClassVar[ErrorCode]
    ERROR_CODE_LAYOUT_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_LINK_LOST: _ClassVar[ErrorCode]
    ERROR_CODE_PEER_ABORTED: _ClassVar[ErrorCode]
    ERROR_CODE_STALE_HANDLE: _ClassVar[ErrorCode]
    ERROR_CODE_ABORTED: _ClassVar[ErrorCode]
    ERROR_CODE_DUPLICATE_REQUEST: _ClassVar[ErrorCode]
    ERROR_CODE_EXCEEDS_POOL: _ClassVar[ErrorCode]
    ERROR_CODE_NO_FREE_BLOCKS: _ClassVar[ErrorCode]
    ERROR_CODE_OVERLOADED: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_GRAMMAR_FAILED: _ClassVar[ErrorCode]
    ERROR_CODE_GRAMMAR_LIMIT: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_VALUE: _ClassVar[ErrorCode]
    ERROR_CODE_PROMPT_EXCEEDS_POOL: _ClassVar[ErrorCode]
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INTERNAL_ERROR: ErrorCode
ERROR_CODE_UNKNOWN_SEQUENCE: ErrorCode
ERROR_CODE_ABANDONED: ErrorCode
ERROR_CODE_DRAINING: ErrorCode
ERROR_CODE_WORKER_LOST: ErrorCode
ERROR_CODE_HANDOFF_FAILED: ErrorCode
ERROR_CODE_KV_CORRUPT: ErrorCode
ERROR_CODE_LAYOUT_MISMATCH: ErrorCode
ERROR_CODE_LINK_LOST: ErrorCode
ERROR_CODE_PEER_ABORTED: ErrorCode
ERROR_CODE_STALE_HANDLE: ErrorCode
ERROR_CODE_ABORTED: ErrorCode
ERROR_CODE_DUPLICATE_REQUEST: ErrorCode
ERROR_CODE_EXCEEDS_POOL: ErrorCode
ERROR_CODE_NO_FREE_BLOCKS: ErrorCode
ERROR_CODE_OVERLOADED: ErrorCode
ERROR_CODE_DEADLINE_EXCEEDED: ErrorCode
ERROR_CODE_GRAMMAR_FAILED: ErrorCode
ERROR_CODE_GRAMMAR_LIMIT: ErrorCode
ERROR_CODE_INVALID_VALUE: ErrorCode
ERROR_CODE_PROMPT_EXCEEDS_POOL: ErrorCode

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "logit_bias", "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    grammar: str
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceId(_message.Message):
    __slots__ = ("request_id", "choice", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class SequenceRequest(_message.Message):
    __slots__ = ("sequence", "prompt", "output", "max_tokens", "sampling", "eos_token_ids", "deadline_ms", "tenant", "priority", "cache_salt", "alone", "pooling", "adapter")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceId
    prompt: _containers.RepeatedScalarFieldContainer[int]
    output: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    sampling: SamplingParams
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    deadline_ms: int
    tenant: str
    priority: int
    cache_salt: str
    alone: bool
    pooling: str
    adapter: str
    def __init__(self, sequence: _Optional[_Union[SequenceId, _Mapping]] = ..., prompt: _Optional[_Iterable[int]] = ..., output: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., deadline_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., alone: _Optional[bool] = ..., pooling: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class Handle(_message.Message):
    __slots__ = ("sequence", "source_worker", "source_incarnation", "destination_worker", "destination_incarnation", "nonce", "signature", "expires_ms")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_WORKER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_WORKER_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceId
    source_worker: str
    source_incarnation: int
    destination_worker: str
    destination_incarnation: int
    nonce: bytes
    signature: bytes
    expires_ms: int
    def __init__(self, sequence: _Optional[_Union[SequenceId, _Mapping]] = ..., source_worker: _Optional[str] = ..., source_incarnation: _Optional[int] = ..., destination_worker: _Optional[str] = ..., destination_incarnation: _Optional[int] = ..., nonce: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., expires_ms: _Optional[int] = ...) -> None: ...

class LayerLayout(_message.Message):
    __slots__ = ("kind", "num_kv_heads", "head_dim", "dtype", "window", "value_dim")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    kind: str
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int
    value_dim: int
    def __init__(self, kind: _Optional[str] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., window: _Optional[int] = ..., value_dim: _Optional[int] = ...) -> None: ...

class KVLayout(_message.Message):
    __slots__ = ("block_size", "layers")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerLayout]
    def __init__(self, block_size: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerLayout, _Mapping]]] = ...) -> None: ...

class Compatibility(_message.Message):
    __slots__ = ("model_digest", "layout", "dtype", "protocol_version", "code_version", "exact", "vocab_size", "max_model_len", "config_digest", "quantize", "edge_kind", "model_impl", "tokenizer_digest", "kv_dtype")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CODE_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    QUANTIZE_FIELD_NUMBER: _ClassVar[int]
    EDGE_KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_IMPL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    layout: KVLayout
    dtype: str
    protocol_version: int
    code_version: str
    exact: bool
    vocab_size: int
    max_model_len: int
    config_digest: str
    quantize: str
    edge_kind: str
    model_impl: str
    tokenizer_digest: str
    kv_dtype: str
    def __init__(self, model_digest: _Optional[str] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., dtype: _Optional[str] = ..., protocol_version: _Optional[int] = ..., code_version: _Optional[str] = ..., exact: _Optional[bool] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., config_digest: _Optional[str] = ..., quantize: _Optional[str] = ..., edge_kind: _Optional[str] = ..., model_impl: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., kv_dtype: _Optional[str] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "top_ids", "top_logprobs", "rank")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class StageStamps(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "reserve_s", "transfer_s", "decode_queue_s", "decode_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    RESERVE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    reserve_s: float
    transfer_s: float
    decode_queue_s: float
    decode_s: float
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., reserve_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., decode_queue_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...

class SpeculationCounters(_message.Message):
    __slots__ = ("steps", "drafted_tokens", "accepted_tokens", "forced")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    steps: int
    drafted_tokens: int
    accepted_tokens: int
    forced: bool
    def __init__(self, steps: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., forced: _Optional[bool] = ...) -> None: ...
