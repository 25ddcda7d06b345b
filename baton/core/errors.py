"""The error tree. Every error that a client can get is one of these; `baton.runtime.status` maps them to HTTP and gRPC.

`InvariantError`, a bug of this process, is not among them: no handler of a `BatonError` may continue after one.

BatonError
  InvalidRequest          bad field; names it                    (400, INVALID_ARGUMENT)
    ContextLengthExceeded prompt and output do not fit
  Unauthenticated         no API key, or an unknown one           (401, UNAUTHENTICATED)
  NotFound                unknown model or request               (404, NOT_FOUND)
  DuplicateRequest        the id is in flight                    (409, ALREADY_EXISTS)
  QuotaExceeded           a tenant's own limit                   (429, RESOURCE_EXHAUSTED)
  Unavailable             no worker, full, draining              (503, UNAVAILABLE)
    WorkerLost            the worker that ran it is lost
  HandoffError            KV could not be handed over            (503, UNAVAILABLE)
    LayoutMismatch        the two ends differ in a named field
    StaleHandle           forged, expired or replayed handle
  GrammarLimit            a grammar exceeds a limit of ours       (500, RESOURCE_EXHAUSTED)
  KVCorrupt               a checksum did not match               (500, DATA_LOSS)
  DeadlineExceeded        names the stage                        (504, DEADLINE_EXCEEDED)
  Cancelled               the client disconnected                (499, CANCELLED)
  JoinRefused             a worker does not fit the cluster      (-, FAILED_PRECONDITION)
  StartupError            one plain line, exit code not 0        (-, -)
  RankLost                a rank of this worker is lost          (-, -)
  ProtocolError           a process of the cluster sent what the protocol does not allow (500, INTERNAL)
InvariantError            a bug: an invariant of this process is violated; the process ends
"""

from __future__ import annotations

from baton.core.codes import ErrorCode


class BatonError(Exception):
    """`code` is the machine-readable string, an `ErrorCode` if it crosses tiers; `param` the field at fault,
    `retry_after_s` when to try again."""

    code: str = ErrorCode.INTERNAL_ERROR

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def tier_code(self) -> ErrorCode:
        """The code as another process of the cluster receives it: INTERNAL_ERROR if only clients receive `code`."""
        return self.code if isinstance(self.code, ErrorCode) else ErrorCode.INTERNAL_ERROR


class InvalidRequest(BatonError):
    code: str = ErrorCode.INVALID_VALUE


class ContextLengthExceeded(InvalidRequest):
    """`prompt_tokens` and `max_prompt_tokens` are set if the prompt alone is too long: how many tokens it has, at
    least, and how many it may have."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        prompt_tokens: int = 0,
        max_prompt_tokens: int = 0,
    ) -> None:
        super().__init__(message, code=code, param=param)
        self.prompt_tokens, self.max_prompt_tokens = prompt_tokens, max_prompt_tokens


class Unauthenticated(BatonError):
    code = "invalid_api_key"


class NotFound(BatonError):
    code = "not_found"


class DuplicateRequest(BatonError):
    code = ErrorCode.DUPLICATE_REQUEST


class QuotaExceeded(BatonError):
    code = "rate_limit_exceeded"


class Unavailable(BatonError):
    code: str = ErrorCode.OVERLOADED


class WorkerLost(Unavailable):
    code = ErrorCode.WORKER_LOST


class HandoffError(BatonError):
    code: str = ErrorCode.HANDOFF_FAILED


class LayoutMismatch(HandoffError):
    code = ErrorCode.LAYOUT_MISMATCH


class StaleHandle(HandoffError):
    code = ErrorCode.STALE_HANDLE


class GrammarLimit(BatonError):
    code = ErrorCode.GRAMMAR_LIMIT


class KVCorrupt(BatonError):
    code = ErrorCode.KV_CORRUPT


class DeadlineExceeded(BatonError):
    code = ErrorCode.DEADLINE_EXCEEDED


class Cancelled(BatonError):
    code = "cancelled"


class JoinRefused(BatonError):
    code = "join_refused"


class StartupError(BatonError):
    code = "startup_error"


class RankLost(BatonError):
    code = "rank_lost"


class ProtocolError(BatonError):
    """Another process of the cluster sent what the protocol does not allow: its session, link or request ends."""

    code = "protocol_error"


class InvariantError(Exception):
    """An invariant of this process is violated: it ends, and its supervisor starts another."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def innermost(error: BaseException) -> BaseException:
    """Returns the first error inside the exception groups that task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
