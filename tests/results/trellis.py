#!/usr/bin/env python3
"""Measure what each part of the trellis brings, and write the table.

    trellis.py run --tqc PATH --out DIR --model NAME=FOLDER ... --text heldout.jsonl --calibration text.jsonl
                   [--compare other.jsonl] [--suite FILE ...] [--limit N] [--arms "A;B"] [--bits 3,2,4] [--threads N]
    trellis.py write --out DIR [-o docs/results/trellis.md]

`run` makes a teacher dump of the documents of at least 64 tokens and second moments of the calibration text, then builds
and evaluates every arm, and compares it with `LDLQ` of as many bits. An arm that is done is not done again, unless tasks
or the stop probe are asked for that it lacks. `write` makes the table of DIR/trellis.json. Needs Python 3.11 and nothing else.
"""

import json
import sys
import time
from pathlib import Path

from shared import arguments, call, task_cells, trunk

ROOT = Path(__file__).resolve().parents[2]
TEXT = '[calibration]\ntext = "{text}"\nrows = 128\npacking = "joined"\n'
MOMENTS = '[calibration]\nhessians = "{moments}/hessians.json"\n'
ROTATED = '[transform]\nrotation = "optrot"\n'
CANDIDATES = ["trellis-2", "trellis-3", "trellis-4", "affine-5g64", "affine-6g64"]
MIXED = f'[budget]\n{{size}}\nsensitivity = "{{costs}}"\ntext = "{{compare}}"\ncandidates = {json.dumps(CANDIDATES)}\n'
AFFINE = "affine = {{ bits = {bits}, group = 64 }}"
# Label: codec, encoder, what the recipe adds.
ARMS = {
    "affine, nearest": (AFFINE, "mlx", ""),
    "affine, GPTQ + refit": (AFFINE, "gptq-refit", MOMENTS),
    "trellis, no feedback": ("trellis = {{ bits = {bits} }}", "trellis", ""),
    "LDLQ, not swept": ("trellis = {{ bits = {bits} }}", "ldlq", MOMENTS + "[gptq]\nsweeps = 0\n"),
    "LDLQ": ("trellis = {{ bits = {bits} }}", "ldlq", MOMENTS),
    "LDLQ, 4 sweeps": ("trellis = {{ bits = {bits} }}", "ldlq", MOMENTS + "[gptq]\nsweeps = 4\n"),
    "LDLQ, act-order": ("trellis = {{ bits = {bits} }}", "ldlq", MOMENTS + "[gptq]\nact-order = true\n"),
    "LDLQ, `1mad`": ('trellis = {{ bits = {bits}, code = "1mad" }}', "ldlq", MOMENTS),
    "LDLQ, L = 14": ('trellis = {{ bits = {bits}, states = 14, code = "mul1" }}', "ldlq", MOMENTS),
    "LDLQ, L = 16": ('trellis = {{ bits = {bits}, states = 16, code = "mul1" }}', "ldlq", MOMENTS),
    "LDLQ, outputs, one scale": ('trellis = {{ bits = {bits}, scales = "one" }}', "ldlq", MOMENTS),
    "LDLQ, inputs, both scales": ('trellis = {{ bits = {bits}, along = "inputs" }}', "ldlq", MOMENTS),
    "LDLQ, inputs, one scale": ('trellis = {{ bits = {bits}, along = "inputs", scales = "one" }}', "ldlq", MOMENTS),
    "LDLQ, rotated": ("trellis = {{ bits = {bits} }}", "ldlq", TEXT + ROTATED),
    "LDLQ, mixed": ("trellis = {{ bits = {bits} }}", "ldlq", MOMENTS + MIXED),
    "LDLQ, mixed, act-order": ("trellis = {{ bits = {bits} }}", "ldlq", MOMENTS + "[gptq]\nact-order = true\n" + MIXED),
    "LDLQ, mixed, rotated": ("trellis = {{ bits = {bits} }}", "ldlq", TEXT + ROTATED + MIXED),
}
# Rows of the embedding are looked up, not multiplied with.
RULES = '[[rule]]\nmatch = "*.embed_tokens"\ncodec = {{ affine = {{ bits = 4, group = 64 }} }}\n'


def recipe(args, name, bits, label, size):
    codec, encoder, more = ARMS[label]
    # The embedding is affine already where everything is.
    # What a budget may choose is not stated.
    rules = RULES if args.untied[name] and "trellis" in codec and MIXED not in more else ""
    body = f'name = "trellis"\n[default]\ncodec = {{{{ {codec} }}}}\nencoder = "{encoder}"\n{rules}{more}'
    costs = args.out / f"sensitivity-{name}.json"
    return body.format(
        bits=bits, text=args.calibration.resolve(), moments=(args.out / f"moments-{name}").resolve(), size=size,
        costs=costs.resolve(), compare=args.compare.resolve() if args.compare else "",
    )


def prepare(args, name, source):
    config = json.loads((Path(source) / "config.json").read_text())
    args.untied[name] = not config.get("tie_word_embeddings", False)
    dump = args.out / f"dump-{name}"
    if not dump.exists():
        call(args.tqc, "eval", "dump", source, "--text", args.text, "--min-tokens", 64, "--context", 512, "--dtype", "f32", "-o", dump)
    if not (args.out / f"moments-{name}/hessians.json").exists():
        path = args.out / "moments.toml"
        path.write_text('name = "moments"\n[default]\ncodec = { trellis = { bits = 3 } }\nencoder = "ldlq"\n' + TEXT.format(text=args.calibration.resolve()))
        call(args.tqc, "calibrate", path, "--source", source, "-o", args.out / f"moments-{name}")
    if args.compare and not (args.out / f"sensitivity-{name}.json").exists():
        path = args.out / "base.toml"
        path.write_text('name = "base"\n[default]\ncodec = { trellis = { bits = 3 } }\n')
        call(
            args.tqc, "sensitivity", source, "--recipe", path, "-o", args.out / f"sensitivity-{name}.json", "--text",
            args.calibration, "--tokens", 2048, "--candidates", ",".join(CANDIDATES),
        )


def run(args):
    args.out.mkdir(parents=True, exist_ok=True)
    path, args.untied = args.out / "trellis.json", {}
    done = json.loads(path.read_text()) if path.exists() else {}
    common = ["--db", args.out / "eval.db", "--threads", args.threads]
    for entry in args.model:
        name, _, source = entry.partition("=")
        prepare(args, name, source)
        for bits in args.bits:
            for label in ARMS:
                key, like = f"{name}|{bits}|{label}", done.get(f"{name}|{int(bits)}|LDLQ")
                if (args.arms and label not in args.arms) or (bits % 1 and MIXED not in ARMS[label][2]):
                    continue
                row = done.get(key)
                if row and (row["tasks"] or not args.suite) and (row["stop"] or not args.stop):
                    continue
                size = ""
                if MIXED in ARMS[label][2]:
                    # So many bits for each weight that the trellis holds more or less than the uniform arm.
                    size = f'bytes = "{like["bytes"] + int((bits - int(bits)) * like["quantized"] / 8)}B"'
                where = args.out / "recipe.toml"
                where.write_text(recipe(args, name, int(bits), label, size))
                artifact, start = args.out / "artifact", time.monotonic()
                said = call(args.tqc, "build", where, "--source", source, "-o", artifact, "--restart", "--threads", args.threads)
                wall = time.monotonic() - start
                kl = call(args.tqc, "eval", "kl", "--teacher", args.out / f"dump-{name}", artifact, *common)
                suites = [part for suite in args.suite for part in ("--suite", suite)]
                tasks = call(args.tqc, "eval", "tasks", *suites, "--limit", args.limit, artifact, *common) if suites else None
                stop = None
                if args.stop:
                    stop = call(args.tqc, "eval", "stop", "--teacher", source, "--suite", args.stop, artifact, *common, ok=(0, 1))
                stored, wide = trunk(artifact, said["sizes"]["weights"])
                found = said["calibration"] or {}
                done[key] = {
                    "recipe": where.read_text(), "digest": said["digest"], "bytes": said["sizes"]["weight_file_bytes"], "bits": wide,
                    "quantized": said["sizes"]["quantized_weights"], "elapsed_s": wall, "run": kl["run"],
                    "kl": {k: kl[k] for k in ("mean_kl", "standard_error", "ci95", "top1_agreement", "tokens", "documents")},
                    "tasks": tasks and tasks["results"], "stop": stop and stop["headline"], "compared": said["compared"],
                    "loss": [m["loss"] / m["nearest"] for m in found.get("modules", []) if m["nearest"]],
                }
                if like and label != "LDLQ":
                    compared = call(args.tqc, "eval", "compare", "--db", args.out / "eval.db", like["run"], kl["run"], ok=(0, 1))
                    done[key]["paired"] = compared["kl"][0]["arms"][0]["difference_ci95"] if compared.get("kl") else None
                path.write_text(json.dumps(done, indent=1, sort_keys=True) + "\n")
                print(f"{key}: {wide:.3f} bits, KL {kl['mean_kl']:.5f}", flush=True)
    return 0


def write(args):
    done = json.loads((args.out / "trellis.json").read_text())
    lines = [
        "# What each part of the trellis brings",
        "",
        "Written by `python tests/results/trellis.py write` from the results of its `run`; [formats/trellis.md](../formats/trellis.md)",
        "explains the arms. KL(source, artifact) in nats per token, its standard error clustered by document. Bits per weight are of",
        "the trunk: all bytes of its files, without the draft head. An untied embedding is affine, 4 bits, but for the first two",
        "arms. `loss` is the mean over modules of tr(E H Eᵀ) over that of tiles without feedback, on the calibration text (128 rows",
        "of 512 tokens that are not scored). The paired difference is to `LDLQ` of as many whole bits, by document, 95 %. Times are of a",
        "busy machine of two cores; arms but the rotated ones read second moments that were summed once before. SmolLM2's rotated",
        "arm saw 64 rows, and its bits are per weight of the source: the rotation unties its head, which is stored too.",
        "",
    ]
    for name in dict.fromkeys(key.split("|")[0] for key in done):
        rows = {tuple(key.split("|")[1:]): row for key, row in done.items() if key.split("|")[0] == name}
        first = next(iter(rows.values()))
        lines += [f"## {name}", "", f"{first['kl']['documents']} documents, {first['kl']['tokens']} positions.", ""]
        columns = ["arm", "bits per weight", "mean KL", "paired difference", "loss", "top-1", "recall", "problems, raw", "problems, chat", "empty", "stop", "build"]
        lines += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        labels = list(ARMS)
        for bits, label in sorted(rows, key=lambda key: (-float(key[0]), labels.index(key[1]))):
            row = rows[(bits, label)]
            kl, loss = row["kl"], row["loss"]
            low, high = row.get("paired") or (None, None)
            cells = [
                f"{bits} bits, {label}", f"{row['bits']:.3f}", f"{kl['mean_kl']:.5f} ± {kl['standard_error']:.5f}",
                f"{low:+.5f} to {high:+.5f}" if low is not None else "", f"{sum(loss) / len(loss):.2f}" if loss else "",
                f"{100 * kl['top1_agreement']:.1f} %", *(task_cells(row["tasks"]) if row["tasks"] else [""] * 4), row["stop"] or "", f"{row['elapsed_s']:.0f} s",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("\n".join(lines).rstrip() + "\n")
    return 0


def main():
    parser, of_run = arguments(__doc__, ROOT, "docs/results/trellis.md")
    of_run.add_argument("--compare", type=Path)
    of_run.add_argument("--limit", type=int, default=100)
    of_run.add_argument("--stop", type=Path)
    of_run.add_argument("--threads", type=int, default=2)
    of_run.add_argument("--arms", type=lambda text: text.split(";"))
    of_run.add_argument("--bits", type=lambda text: [float(bits) if "." in bits else int(bits) for bits in text.split(",")], default=[3, 2, 4])
    args = parser.parse_args()
    return run(args) if args.command == "run" else write(args)


if __name__ == "__main__":
    sys.exit(main())
