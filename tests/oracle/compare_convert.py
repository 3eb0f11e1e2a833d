#!/usr/bin/env python3
"""Time and memory of `mlx_lm.convert` beside `tqc build`: whole processes, same model, same settings.

    compare_convert.py [--tqc PATH] [--model DIR] [--runs N] [--recipe FILE] [--report FILE] [--enforce]

Affine 4 bits, group 64, Qwen2.5-Coder-0.5B unless told otherwise. The two programs take turns, after one warm-up
each that also brings the source into the page cache. Wall time is from fork to exit. Memory is the child's peak
resident set (`ru_maxrss` of wait4): it counts mapped file pages, so for tqc the peak of anonymous memory, sampled
from /proc, is given beside it. Without a tqc binary only mlx_lm.convert is measured.

`--enforce` fails (exit 1) unless tqc takes at most 1/3 of the time and 1/4 of the peak resident memory.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIME_SHARE, MEMORY_SHARE = 1 / 3, 1 / 4
MIB = 1 << 20


def spawn(command, log):
    """Runs `command` with its output in `log`; (seconds, peak resident bytes, peak anonymous bytes, cpu seconds)."""
    started = time.perf_counter()
    child = os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )
    anonymous = 0
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        anonymous = max(anonymous, resident_anonymous(child))
        time.sleep(0.005)
    seconds = time.perf_counter() - started
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()}")
    unit = 1 if platform.system() == "Darwin" else 1024
    return seconds, usage.ru_maxrss * unit, anonymous, usage.ru_utime + usage.ru_stime


def resident_anonymous(child):
    """Bytes of RssAnon, or 0 where /proc has none."""
    try:
        for line in Path(f"/proc/{child}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def measure(programs, runs, work):
    """`programs`: name -> function from output folder to command. Returns name -> list of `spawn` results."""
    results = {name: [] for name in programs}
    for turn in range(runs + 1):
        for name, command in programs.items():
            out = work / "out"
            result = spawn(command(out), work / "log")
            shutil.rmtree(out)
            if turn:  # turn 0 warms up
                results[name].append(result)
                print(f"{name:<16} run {turn}: {result[0]:6.2f} s, {result[1] / MIB:7.0f} MiB", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tqc", type=Path, default=ROOT / "target/release/tqc")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes/mlx-4bit.toml")
    parser.add_argument("--model", type=Path, default=ROOT / "target/oracle/models/qwen2.5-coder-0.5b")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--report", type=Path, default=ROOT / "target/oracle/compare_convert.json")
    parser.add_argument("--enforce", action="store_true")
    parser.add_argument("tqc_options", nargs="*", help="after `--`: more options of `tqc build`")
    args = parser.parse_args()
    if not (args.model / "config.json").exists():
        parser.error(f"{args.model} is no model: run fetch_models.py qwen2.5-coder-0.5b")

    source = str(args.model)
    convert = [sys.executable, "-m", "mlx_lm", "convert", "--hf-path", source, "-q"]
    convert += ["--q-bits", "4", "--q-group-size", "64", "--mlx-path"]
    programs = {"mlx_lm.convert": lambda out: [*convert, str(out)]}
    if args.tqc.exists():
        build = [str(args.tqc), "build", str(args.recipe), "--source", source, *args.tqc_options, "-o"]
        programs["tqc build"] = lambda out: [*build, str(out)]
    elif args.enforce:
        parser.error(f"{args.tqc} does not exist: run `cargo build --release`")

    # Beside the target folder, so that the output goes to a disk and not to a memory file system.
    args.report.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.report.parent, prefix="compare-") as folder:
        results = measure(programs, args.runs, Path(folder))

    fields = ("seconds", "peak_resident_bytes", "peak_anonymous_bytes", "cpu_seconds")
    medians = {
        name: {field: statistics.median(run[i] for run in runs) for i, field in enumerate(fields)}
        for name, runs in results.items()
    }
    print(f"\nmedian of {args.runs}, {os.cpu_count()} cores")
    for name, median in medians.items():
        print(
            f"{name:<16} {median['seconds']:6.2f} s wall, {median['cpu_seconds']:6.2f} s cpu, "
            f"{median['peak_resident_bytes'] / MIB:7.0f} MiB resident, "
            f"{median['peak_anonymous_bytes'] / MIB:7.0f} MiB anonymous"
        )
    report = {"cores": os.cpu_count(), "runs": results, "medians": medians, "ratios": {}}
    missed = False
    if len(medians) == 2:
        theirs, ours = medians.values()
        for field, share in (("seconds", TIME_SHARE), ("peak_resident_bytes", MEMORY_SHARE)):
            ratio = ours[field] / theirs[field]
            report["ratios"][field] = ratio
            missed |= ratio > share
            print(f"{field}: tqc takes {ratio:.3f} of mlx_lm.convert, at most {share:.3f} wanted")
    args.report.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if args.enforce and missed else 0


if __name__ == "__main__":
    sys.exit(main())
