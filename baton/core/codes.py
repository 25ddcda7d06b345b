"""Error codes between the coordinator and its workers. Recovery branches on them, so they are an enum, on the wire too
(proto/baton/v1/types.proto). A client receives the same code as a string; codes that only clients receive are not here.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a worker ended or refused a sequence. The peer of a newer version may send a code that this version does not
    have: it is read as INTERNAL_ERROR."""

    INTERNAL_ERROR = "internal_error"

    # The worker does not have the sequence any more, or does not accept it: the coordinator reschedules it.
    UNKNOWN_SEQUENCE = "unknown_sequence"
    ABANDONED = "abandoned"
    DRAINING = "draining"
    WORKER_LOST = "worker_lost"

    # The KV was not handed over, or is damaged.
    HANDOFF_FAILED = "handoff_failed"
    KV_CORRUPT = "kv_corrupt"
    LAYOUT_MISMATCH = "layout_mismatch"
    LINK_LOST = "link_lost"
    PEER_ABORTED = "peer_aborted"
    STALE_HANDLE = "stale_handle"

    # A decode worker refuses an offer.
    ABORTED = "aborted"
    DUPLICATE_REQUEST = "duplicate_request"
    EXCEEDS_POOL = "exceeds_pool"
    NO_FREE_BLOCKS = "no_free_blocks"
    OVERLOADED = "overloaded"

    # The request ends.
    DEADLINE_EXCEEDED = "deadline_exceeded"
    GRAMMAR_FAILED = "grammar_failed"
    GRAMMAR_LIMIT = "grammar_limit"
    INVALID_VALUE = "invalid_value"
    PROMPT_EXCEEDS_POOL = "prompt_exceeds_pool"
