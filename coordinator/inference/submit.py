"""An inference request as submissions to the pipeline, one per prompt, the same for HTTP and gRPC."""

from __future__ import annotations

from baton.runtime.ignored_fields import IgnoredFields
from coordinator.inference.model import Generation
from coordinator.openai.schema import CompletionBody
from coordinator.openai.validation import places_of, validate
from coordinator.submission import Submission
from coordinator.translate import Translator


async def submissions_of(
    translator: Translator, made: Generation, request_id: str, *, strict: bool, deadline_s: float | None = None
) -> tuple[list[Submission], frozenset[str]]:
    """Returns the submissions, and the names of ignored fields; `strict` refuses unknown ones.

    Raises:
        InvalidRequest: names the field at fault.
    """
    if made.timeout_s is not None:
        deadline_s = min(made.timeout_s, made.timeout_s if deadline_s is None else deadline_s)
    ignored = IgnoredFields(strict=strict, places=places_of(CompletionBody))
    body = validate(CompletionBody, made.body, ignored)
    options = body.options()
    params = translator.checked(options)
    submissions = []
    for number, prompt in enumerate(made.prompts):
        name = request_id if len(made.prompts) == 1 else f"{request_id}-{number}"
        submissions.append(await translator.from_text(name, prompt, options, params=params, deadline_s=deadline_s))
    return submissions, body.ignored | made.ignored
