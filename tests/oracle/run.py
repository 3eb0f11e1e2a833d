#!/usr/bin/env python3
"""Compare tqc's artifacts with stock mlx-lm, on real and on tiny models.

    run.py [--tqc PATH] [--models DIR] [--shared DIR] [--only NAME] [--full] [--report FILE] [--self-test]

For each model and setting: `tqc build`, load the artifact with `mlx_lm.load`, quantize the source with mlx-lm's
own conversion and the same settings, then demand equal bytes of every parameter, equal float32 logits, and the
file rules of artifact.py. `--self-test` needs no tqc: it checks a stand-in artifact made by mlx-lm, then damages
it in many ways and demands that the right check notices.

Exit status 0 if every check passed. The last line is `N passed, N failed`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import artifact
import numpy as np
import reference
import settings

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = (
    "llama-tied", "llama-untied", "qwen2", "qwen3", "mistral", "qwen3_5", "qwen3_5-tied", "qwen3_5_moe",
)  # fmt: skip
CHECKS = (
    "build", "load", "settings", "tensors", "logits", "convert", "headers", "files", "index", "draft",
    "config", "tokenizer", "provenance", "card", "vision", "mtp", "verify",
)  # fmt: skip


def models(args):
    """(name, source folder, settings) of every model; says aloud what it leaves out."""
    found, skipped = [(name, ROOT / "tests/fixtures" / name, settings.SMALL) for name in FIXTURES], []
    found.append(("demo-qwen3_5", ROOT / "goldens/models/demo-qwen3_5", settings.SMALL))
    wanted = [("lab-qwen3_5", settings.LARGE), ("smollm2-135m", settings.LARGE)]
    if args.full:
        wanted.append(("qwen2.5-coder-0.5b", settings.LARGE))
    for name, choice in wanted:
        places = [args.models / name, args.shared / "models" / name]
        source = next((place for place in places if (place / "config.json").exists()), None)
        if source:
            found.append((name, source, choice))
        else:
            skipped.append(name)
    if args.only:
        found = [entry for entry in found if entry[0] == args.only]
        skipped = [name for name in skipped if name == args.only]
    for name in skipped:
        print(f"SKIP {name}: not in {args.models} nor {args.shared / 'models'}")
    return found, skipped


def build_with(tqc):
    """A builder that runs the real program."""

    def build(setting, source, out):
        recipe = out.parent / "recipe.toml"
        recipe.write_text(setting.toml())
        command = [tqc, "build", recipe, "--source", source, "-o", out, "--json"]
        return run(command, {0})

    return build


def run(command, wanted):
    """Runs `command`; complaints if its exit status is none of `wanted`."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode in wanted:
        return []
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return [f"{Path(command[0]).name} {command[1]} ended with {done.returncode}", *said[-8:]]


def check(folder, source, prepared, setting, paths, work, whole):
    """All checks of one artifact: name -> complaints; notes about what is worth knowing but not wrong."""
    results, notes = {}, []
    for name, function in (
        ("headers", lambda: artifact.headers(folder)),
        ("files", lambda: artifact.file_names(folder)),
        ("index", lambda: artifact.index(folder)),
        ("draft", lambda: artifact.draft_names(folder)),
        ("config", lambda: artifact.config(folder)),
        ("settings", lambda: artifact.settings(folder, setting, paths)),
        ("tokenizer", lambda: artifact.tokenizer(folder, source)),
        ("provenance", lambda: artifact.provenance(folder, source)),
        ("card", lambda: artifact.card(folder)),
        ("vision", lambda: artifact.vision(folder, source)),
        ("mtp", lambda: artifact.draft_head(folder, source)),
    ):
        results[name] = attempt(function)

    loaded = []
    results["load"] = attempt(lambda: loaded.append(reference.load_as_user(folder, source)) or [])
    if not loaded:
        return results, notes
    model, tokens = loaded[0]
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    stored = artifact.weights(folder).names()
    theirs = reference.quantized(prepared, quantization, stored)
    parameters = reference.parameters(theirs)
    results["tensors"] = reference.differences(reference.parameters(model), parameters)
    notes.append(f"{len(parameters)} parameters")
    if whole:
        copy = reference.converted(prepared, quantization, stored, work / "converted")
        results["convert"], casts = against_convert(parameters, reference.parameters(copy))
        notes += casts
        del copy

    ours, expected = reference.logits(model, tokens), reference.logits(theirs, tokens)
    gap = float(np.abs(ours - expected).max())
    notes.append(f"logits differ by {gap}")
    results["logits"] = [] if np.array_equal(ours, expected) else [f"largest difference {gap}"]
    return results, notes


def against_convert(parameters, copy):
    """`mlx_lm.convert` also casts float tensors to the model's dtype: a note, not a difference."""
    casts = [
        name
        for name in parameters.keys() & copy.keys()
        if (parameters[name][0], copy[name][0]) == ("mlx.core.float32", "mlx.core.bfloat16")
    ]
    left = [{name: value for name, value in side.items() if name not in casts} for side in (parameters, copy)]
    notes = [f"mlx_lm.convert casts {name} from f32 to bf16; tqc keeps it" for name in sorted(casts)]
    return reference.differences(*left), notes


def attempt(function):
    try:
        return function()
    except Exception as problem:  # noqa: BLE001  (any failure of the loader is a finding)
        return [f"{type(problem).__name__}: {problem}"]


def refusal(tqc, setting, source, work):
    """A group that does not divide some width must be refused, with nothing written."""
    out = work / "refused"
    recipe = work / "refused.toml"
    recipe.write_text(setting.toml())
    bad = run([tqc, "build", recipe, "--source", source, "-o", out], {2, 3})
    return bad + ([f"{out.name} was written"] if out.exists() else [])


def compare(args, build, tqc):
    """Every model with every setting; returns report rows."""
    rows = []
    chosen, skipped = models(args)
    for name, source, choice in chosen:
        with tempfile.TemporaryDirectory(prefix="tqc-oracle-") as folder:
            work = Path(folder)
            prepared = reference.prepare(source, work / "prepared")
            widths = reference.widths(prepared)
            refused = whole = False
            for setting in choice:
                fitted = setting.fit(widths)
                if fitted is None:
                    if tqc and not refused:
                        refused = True
                        complaints = refusal(tqc, setting, source, work)
                        rows.append(show(name, f"{setting.name} refused", {"refusal": complaints}, [], 0))
                    continue
                started = time.monotonic()
                place = work / setting.name
                place.mkdir()
                out = place / "artifact"
                results, notes = {"build": build(fitted, source, out)}, []
                if not results["build"]:
                    more, notes = check(out, source, prepared, fitted, list(widths), place, not whole)
                    results |= more
                    whole = True
                    if tqc:
                        command = [tqc, "verify", out, "--source", source, "--rebuild", "all", "--json"]
                        results["verify"] = run(command, {0})
                rows.append(show(name, setting.name, results, notes, time.monotonic() - started))
                shutil.rmtree(place)
    return rows, skipped


def show(model, setting, results, notes, seconds):
    """Prints one row of the table and returns it for the report."""
    failed = [name for name in results if results[name]]
    verdict = "ok" if not failed else "FAIL " + ",".join(failed)
    print(
        f"{model:<20} {setting:<26} {len(results) - len(failed):>2}/{len(results):<2} {seconds:6.1f} s  {verdict}"
        f"   {'; '.join(notes)}",
        flush=True,
    )
    for name in failed:
        for line in results[name][:6]:
            print(f"    {name}: {line}")
        if len(results[name]) > 6:
            print(f"    {name}: and {len(results[name]) - 6} more")
    return {"model": model, "setting": setting, "seconds": round(seconds, 2), "checks": results, "notes": notes}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tqc", type=Path, default=ROOT / "target/release/tqc", help="the program under test")
    parser.add_argument("--models", type=Path, default=ROOT / "target/oracle/models", help="fetched models")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="has models/lab-qwen3_5")
    parser.add_argument("--only", metavar="NAME", help="one model")
    parser.add_argument("--full", action="store_true", help="also Qwen2.5-Coder-0.5B")
    parser.add_argument("--report", type=Path, default=ROOT / "target/oracle/report.json")
    parser.add_argument("--self-test", action="store_true", help="check the checks, without tqc")
    args = parser.parse_args()

    print(f"{'model':<20} {'setting':<26} checks    time  result")
    if args.self_test:
        import selftest

        rows, skipped = selftest.rows(show, check), []
    else:
        if not args.tqc.exists():
            parser.error(f"{args.tqc} does not exist: run `cargo build --release`, or give --tqc")
        rows, skipped = compare(args, build_with(args.tqc), args.tqc)
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(json.dumps({"rows": rows, "skipped": skipped}, indent=1) + "\n")

    outcomes = [complaints for row in rows for complaints in row["checks"].values()]
    failed = sum(1 for complaints in outcomes if complaints)
    print(f"report: {args.report}")
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
