#!/usr/bin/env python3
"""Measure what changes of basis do to affine codes, and write the table.

    rotation.py run --tqc PATH --out DIR --model NAME=FOLDER[:r2] ... --text heldout.jsonl --calibration text.jsonl
                    [--suite FILE ...] [--rows N] [--limit N] [--jobs N] [--threads N] [--bits 2,3,4]
    rotation.py write --out DIR [-o docs/results/rotation.md]

`run` builds every arm of every model, evaluates it into DIR/eval.db, measures the draft head before and after the fold,
and keeps what each build says in DIR/builds.json. An arm that is done is not done again. `write` makes the table of these
two files. Needs Python 3.11 and nothing else.
"""

import concurrent.futures
import json
import sqlite3
import sys
import threading
from pathlib import Path

from shared import arguments, call, task_cells

ROOT = Path(__file__).resolve().parents[2]
ARMS = {
    "none": "",
    "R1": 'rotation = { kind = "hadamard", r2 = false }',
    "R1.R2": 'rotation = { kind = "hadamard", r2 = true }',
    "block": 'rotation = "block-hadamard"',
    "OptRot": 'rotation = "optrot"',
    "measured": 'rotation = "measure"',
}
BITS = (2, 3, 4)
PROMPTS = ["Q: ", "Question: In which year", "The ", "def ", "Once upon a time"]
LOCK = threading.Lock()


def remember(path, key, value):
    with LOCK:
        known = json.loads(path.read_text()) if path.exists() else {}
        known[key] = value
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def recipe(folder, name, codec, change, args):
    text = f'name = "{name}"\n[default]\ncodec = {codec}\n'
    if change:
        text += f"[transform]\n{change}\n"
        if "measure" in change:
            text += f'text = "{args.calibration.resolve()}"\ntokens = 2048\n'
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def build(args, source, name, codec, change):
    """What the build says, from this run or an earlier one."""
    builds, artifact = args.out / "builds.json", args.out / "artifacts" / name
    known = json.loads(builds.read_text()) if builds.exists() else {}
    if name not in known or not (artifact / "provenance.json").exists():
        path = recipe(args.out / "recipes", name, codec, change, args)
        said = call(args.tqc, "build", path, "--source", source, "-o", artifact, "--restart", "--threads", args.threads)
        keep = ("digest", "sizes", "transform", "measured", "elapsed_s", "peak_anonymous_bytes")
        remember(builds, name, {key: said[key] for key in keep})
    return artifact


def arm(args, model, source, bits, label):
    codec = f"{{ affine = {{ bits = {bits}, group = 64 }} }}"
    artifact = build(args, source, f"{model}-{bits}-{label}", codec, ARMS[label])
    common = ["--db", args.out / "eval.db", "--threads", args.threads]
    call(args.tqc, "eval", "kl", "--teacher", args.out / f"dump-{model}", artifact, *common)
    suites = [part for suite in args.suite for part in ("--suite", suite)]
    limit = ["--limit", args.limit] if args.limit else []
    if suites:
        call(args.tqc, "eval", "tasks", *suites, *limit, artifact, *common)
    return f"{model} {bits} {label}"


def drafts(args, model, source):
    """Guesses kept by the draft head of the source and of the folded model, in float32."""
    found = {}
    changes = {"source": "", "gains": "gamma-fold = true", "R1": ARMS["R1"]}
    for label, change in changes.items():
        artifact = build(args, source, f"{model}-f32-{label}", '"f32"', change)
        guessed = accepted = 0
        for prompt in PROMPTS:
            said = call(
                args.tqc, "generate", artifact, "--prompt", prompt, "--ignore-eos", "--max-tokens", 96, "--exact",
                "--draft", "mtp", "--draft-tokens", 2, "--threads", args.threads,
            )["drafting"]
            guessed, accepted = guessed + said["guessed"], accepted + said["accepted"]
        found[label] = {"guessed": guessed, "accepted": accepted}
    remember(args.out / "builds.json", f"{model}-drafts", found)
    return f"{model} drafts"


def run(args):
    for folder in ("artifacts", "recipes"):
        (args.out / folder).mkdir(parents=True, exist_ok=True)
    args.threads = args.threads or 1
    work = []
    for entry in args.model:
        name, _, folder = entry.partition("=")
        folder, _, r2 = folder.partition(":")
        taking = ["--rows", args.rows] if args.rows else []
        call(args.tqc, "eval", "dump", folder, "--text", args.text, "--min-tokens", 64, *taking, "--dtype", "f32",
             "-o", args.out / f"dump-{name}")
        # The slow ones first.
        for label in reversed(ARMS):
            if label != "R1.R2" or r2 == "r2":
                work += [(arm, args, name, folder, bits, label) for bits in args.bits]
        if "mtp_num_hidden_layers" in (Path(folder) / "config.json").read_text():
            work.append((drafts, args, name, folder))
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        failed = 0
        for job in concurrent.futures.as_completed([pool.submit(*job) for job in work]):
            if job.exception():
                failed += 1
            print(job.exception() or f"done {job.result()}", flush=True)
    return 1 if failed else 0


def results(out):
    """(model, bits, label) -> what the database says."""
    database = sqlite3.connect(f"file:{out / 'eval.db'}?mode=ro", uri=True)
    rows = database.execute(
        "select model.name, run.instrument, run.summary from run join model on run.model = model.digest "
        "where run.finished is not null order by run.id"
    )
    found = {}
    for name, instrument, summary in rows:
        model, bits, label = name.rsplit("-", 2)
        found.setdefault((model, int(bits), label), {})[instrument] = json.loads(summary)
    return found


def write(args):
    builds = json.loads((args.out / "builds.json").read_text())
    found = results(args.out)
    models = list(dict.fromkeys(model for model, _, _ in found))
    lines = [
        "# Rotations under affine codes",
        "",
        "Written by `python tests/results/rotation.py write` from the results of its `run`; [transforms.md](../transforms.md)",
        "explains the bases. Affine codes in groups of 64, encoder `mlx`, every other setting the default: `in_proj_a/b`",
        "have 8 bits, norms and convolutions are floats. KL(source, artifact) in nats per token with its 95 % interval,",
        "documents as clusters; bits per weight count every stored byte. `measured` is the recipe's `rotation = \"measure\"`,",
        "on 2048 tokens of text that is not scored here; in brackets what it chose.",
        "",
    ]
    for model in models:
        documents = {row["kl"]["documents"] for (name, _, _), row in found.items() if name == model and "kl" in row}
        tokens = {row["kl"]["tokens"] for (name, _, _), row in found.items() if name == model and "kl" in row}
        lines += [
            f"## {model}",
            "",
            f"{max(documents)} documents, {max(tokens)} positions.",
            "",
        ]
        columns = ["bits", "basis", "bits per weight", "mean KL", "95 % interval", "top-1"]
        with_tasks = any("tasks" in row for (name, _, _), row in found.items() if name == model)
        if with_tasks:
            columns += ["recall", "problems, raw", "problems, chat", "empty answers"]
        lines += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        for bits in BITS:
            for label in ARMS:
                row = found.get((model, bits, label))
                if row is None or "kl" not in row:
                    continue
                kl, said = row["kl"], builds[f"{model}-{bits}-{label}"]
                name = label.replace(".", "+") if label != "measured" else f"measured ({said['measured']['chosen']})"
                low, high = kl["ci95"] or (float("nan"), float("nan"))
                cells = [
                    str(bits), name, f"{said['sizes']['bits_per_weight']:.3f}", f"{kl['mean_kl']:.5f}",
                    f"{low:.5f} to {high:.5f}", f"{100 * kl['top1_agreement']:.1f} %",
                    *(task_cells((row.get("tasks") or {}).get("results")) if with_tasks else []),
                ]
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        searches = builds.get(f"{model}-3-OptRot", {}).get("transform")
        if searches:
            search = searches["r1"]["searches"][0]
            lines += [
                f"OptRot's search for R1 at 3 bits: {search['samples']} vectors, {search['steps']} steps, mean fourth power "
                f"over a Gaussian's {search['before']:.4f} before and {search['after']:.4f} after.",
                "",
            ]
        if f"{model}-drafts" in builds:
            kept = builds[f"{model}-drafts"]
            words = ", ".join(
                f"{label} {entry['accepted']} of {entry['guessed']} ({100 * entry['accepted'] / entry['guessed']:.1f} %)"
                for label, entry in kept.items()
            )
            lines += [f"Guesses of the draft head that the model kept, weights in float32: {words}.", ""]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("\n".join(lines).rstrip() + "\n")
    return 0


def main():
    parser, of_run = arguments(__doc__, ROOT, "docs/results/rotation.md")
    of_run.add_argument("--rows", type=int)
    of_run.add_argument("--limit", type=int)
    of_run.add_argument("--jobs", type=int, default=1)
    of_run.add_argument("--threads", type=int)
    of_run.add_argument("--bits", type=lambda text: [int(bits) for bits in text.split(",")], default=list(BITS))
    args = parser.parse_args()
    return run(args) if args.command == "run" else write(args)


if __name__ == "__main__":
    sys.exit(main())
