"""Which tests may run beside others. The rest runs alone: what starts processes, or says how long something may take.

A new file runs alone until somebody puts it here.
"""

from __future__ import annotations

from pathlib import Path

_BESIDE = (
    "arch/*", "builtin/*", "core/*", "decode/*", "docs/*", "engine/*", "prefill/*",
    "coordinator/test_chat.py", "coordinator/test_policy_*.py", "coordinator/test_schema_*.py",
    "coordinator/test_text*.py", "coordinator/test_translate.py", "rpc/test_codec.py", "rpc/test_frames.py",
)  # fmt: skip
_ALONE = (
    "engine/test_parallel*.py", "engine/test_lockstep.py", "engine/test_kernels_build.py", "engine/test_quantize.py",
    "engine/test_checkpoint_errors.py", "decode/test_links_refused.py", "decode/test_incoming*.py",
    "prefill/test_edge*.py", "coordinator/test_text.py",
)  # fmt: skip
_TESTS = Path(__file__).parent


def runs_beside(path: Path) -> bool:
    """Whether the tests of a file may run beside others."""
    name = path.relative_to(_TESTS)
    return any(map(name.match, _BESIDE)) and not any(map(name.match, _ALONE))
