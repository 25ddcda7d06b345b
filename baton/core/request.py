"""What a client requests, as values shared by all tiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length"]
Pooling = Literal["", "last", "mean"]
POOLINGS: tuple[Pooling, ...] = "last", "mean"


class ChoiceId(NamedTuple):
    """One choice of a request, independent of the attempt."""

    request_id: str
    choice: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice}" if self.choice else self.request_id


class SequenceId(NamedTuple):
    """One attempt at one choice of a request: the name of a sequence on every tier and on the wire."""

    request_id: str
    choice: int = 0
    attempt: int = 1

    @property
    def choice_id(self) -> ChoiceId:
        return ChoiceId(self.request_id, self.choice)

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice}#{self.attempt}"


class TokenBias(NamedTuple):
    """What is added to the logit of one token."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SamplingParams:
    """How a token is sampled from logits; every default asks for nothing. docs/numerics.md defines each field and the
    order in which they apply. Ranges: baton.core.sampling_limits.

    `temperature` 0 is greedy; `top_k` 0 is off. `seed` is a 64-bit pattern, always set: admission draws one for a
    request without a seed. `logit_bias` is sorted by id, without duplicates. `stop_token_ids` end the choice as EOS
    does; they and EOS are masked until `min_tokens` tokens are generated. `bad_words` are token sequences that the
    output never contains. `allowed_token_ids` empty allows all. `logprobs` n reports the log-probability of every
    sampled token and of the n most likely ones, `prompt_logprobs` the same for the prompt's tokens; None reports none.
    `grammar` is an llguidance grammar in its serialised form, which the output must match; empty allows all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[TokenBias, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether penalties for earlier tokens apply."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def depends_on_history(self) -> bool:
        """Whether changes to the logits depend on which tokens came before, so that the previous token must be known.
        All other changes depend at most on the number of tokens."""
        return self.penalises or bool(self.bad_words or self.grammar)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of `token_id` under the model's own softmax, before any processing, and those of the most
    likely tokens, most likely first, ties by lowest id. `rank` 1 is the most likely token. Values are float32."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One choice to generate. `prompt` and `output` are token ids and stay separate in every message, so that a later
    attempt has the same request: `output` holds the tokens that earlier attempts produced.

    `eos_token_ids` is empty when the client asked to ignore EOS. `deadline_s` is the time left, in seconds, when the
    value was created; each process converts it to an instant of its own monotonic clock. `adapter` is the digest of the
    LoRA adapter that computes it (baton.models.adapter_config); empty for the model itself.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    choice: int = 0
    attempt: int = 1
    deadline_s: float = 600.0
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""
    alone: bool = False
    """Compute it in steps without any other sequence: workers were lost while they ran it."""
    pooling: Pooling = ""
    """Generate nothing: return one vector, the final hidden state of the prompt's last token or the mean of those of
    all tokens; of a model with a classification head, its scores of the last token."""
    adapter: str = ""
    # Derived once, since they are read many times for each request.
    sequence_id: SequenceId = field(init=False, repr=False, compare=False)
    num_prefill_tokens: int = field(init=False, repr=False, compare=False)
    """Tokens whose KV must exist before the next one is sampled: the prompt and the output so far."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequence_id", SequenceId(self.request_id, self.choice, self.attempt))
        object.__setattr__(self, "num_prefill_tokens", len(self.prompt) + len(self.output))

    @property
    def choice_id(self) -> ChoiceId:
        return ChoiceId(self.request_id, self.choice)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the choice: EOS, and those that the client named."""
        return self.eos_token_ids + self.sampling.stop_token_ids

    @property
    def reads_all_positions(self) -> bool:
        """Whether log-probabilities of the prompt or a mean need the result of every position: none may come from a
        prefix cache."""
        return self.sampling.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def max_kv_tokens(self) -> int:
        """For how many tokens KV is computed at most: the prompt and the longest output, except its last token, unless
        that is part of a later attempt, which computes the prompt's log-probabilities."""
        return max(len(self.prompt) + self.max_tokens - 1, self.num_prefill_tokens)


def finish_reason(request: GenerateRequest, output_len: int, last_token: int) -> FinishReason | None:
    """Returns why the sequence ends after `last_token`, the `output_len`-th output token (1-based), or None.

    Workers and journal call the same function, so they always agree about the end.
    """
    # Before min_tokens, an end token can only be sampled if a grammar allows nothing else.
    if (output_len > request.sampling.min_tokens or request.sampling.grammar) and (
        last_token in request.eos_token_ids or last_token in request.sampling.stop_token_ids
    ):
        return "stop"
    if output_len >= request.max_tokens:
        return "length"
    return None
