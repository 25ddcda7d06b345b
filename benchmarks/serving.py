"""Runs `baton up` and `baton bench` on one shape after the other and writes one report.

    python benchmarks/serving.py                         the built-in model and the 135 M shape, 8 clients each
    python benchmarks/serving.py --clients 1 8 --only builtin

Writes `benchmarks/results/serving.md`: machine, commit, date, command lines, and the table of each run.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kit import BATON, ROOT, checkpoint, cluster, parser, report

WORK = {"builtin": ("512", "64", "300-3999"), "135m": ("512", "64", "300-48999")}


def measure(model: str, shape: str, clients: int, requests: int) -> str:
    """Starts a cluster, measures it, ends it; returns the Markdown of one run."""
    prompt, output, ids = WORK[shape]
    with cluster("--model", model) as running:
        markdown = running.run_dir / "bench.md"
        bench = ["bench", running.url, "--concurrency", str(clients), "--input-len", prompt, "--output-len", output]
        bench += ["--token-ids", ids, "--requests", str(requests)]
        subprocess.run([*BATON, *bench, "--markdown", str(markdown)], cwd=ROOT, check=True)
        shown = "baton " + " ".join(bench).replace(running.url, "URL")
        return f"## {shape}, {clients} clients\n\n    baton up --model {shape}\n    {shown}\n\n{markdown.read_text()}"


def main() -> None:
    options = parser(__doc__, "serving.md")
    options.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    options.add_argument("--only", choices=WORK)
    options.add_argument("--per-client", type=int, default=6, help="requests of each client")
    arguments = options.parse_args()
    about = "Random token-id prompts, `ignore_eos`; bf16 where the processor has it. The client runs on the same cores."
    parts = []
    for shape in [arguments.only] if arguments.only else list(WORK):
        with contextlib.nullcontext(shape) if shape == "builtin" else checkpoint(shape) as model:
            for clients in arguments.clients:
                parts.append(measure(str(model), shape, clients, clients * arguments.per_client))
    title = "Serving: one prefill and one decode worker, one core and thread each"
    report(arguments.out, title, *parts, about=about)


if __name__ == "__main__":
    main()
