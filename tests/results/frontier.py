#!/usr/bin/env python3
"""Measure what calibration and budgets bring at equal bytes, and write the table.

    frontier.py run --tqc PATH --out DIR --model NAME=FOLDER ... --text heldout.jsonl --calibration text.jsonl
                    --compare other.jsonl [--suite FILE ...] [--limit N] [--arms A;B] [--threads N] [--sensitivity NAME=FILE ...]
    frontier.py write --out DIR [-o docs/results/frontier.md]
    tqc report --db DIR/eval.db -o frontier.html

`run` makes a teacher dump of the documents of at least 64 tokens, measures what each module costs (unless a file
is given), then builds, evaluates and compares every arm with rounding to nearest of the same bytes. An arm that is done is
not done again. `write` makes the tables of DIR/frontier.json; those of other models stay in the page as they are.
Results are in DIR/eval.db too, under the arms' names, so that `tqc report` draws KL against bits per weight, with the calibration, the budget and the comparison of each arm. (Its
bits are over all bytes that are stored; the table's are without the draft head.) Needs Python 3.11 and nothing else.
"""

import json
import shutil
import sys
from pathlib import Path

from shared import arguments, call, task_cells, trunk

ROOT = Path(__file__).resolve().parents[2]
CALIBRATED = '[calibration]\ntext = "{text}"\nrows = 128\npacking = "joined"\n'
SEQUENTIAL = CALIBRATED + 'activations = "sequential"\n'
BUDGET = '[budget]\n{size}\nsensitivity = "{costs}"\ntext = "{compare}"\n'
ROTATED = '[transform]\nrotation = "optrot"\n'
MIXED = '[[rule]]\nmatch = "*.mlp.*"\ncodec = {{ affine = {{ bits = 3, group = 64 }} }}\n'
# Label: encoder, what the recipe adds, and of which budget: that of so many bits everywhere, or a number of bits.
ARMS = {
    "RTN": ("mlx", "", None),
    "refit": ("refit", "", None),
    "GPTQ": ("gptq", CALIBRATED, None),
    "GPTQ act-order": ("gptq", CALIBRATED + "[gptq]\nact-order = true\n", None),
    "GPTQ+refit": ("gptq-refit", CALIBRATED, None),
    "GPTQ+refit, sequential": ("gptq-refit", SEQUENTIAL, None),
    "refit+sens": ("refit", BUDGET, "same"),
    "GPTQ+refit+sens": ("gptq-refit", CALIBRATED + BUDGET, "same"),
    "rot+GPTQ+refit+sens": ("gptq-refit", CALIBRATED + ROTATED + BUDGET, "same"),
}
# The arms of the design notes that are not of one width: label: bits of the default, encoder, what is added, trunk bits.
NAMED = {
    "rot+sens48": (4, "mlx", ROTATED + BUDGET, 4.8),
    "GPTQ+sens": (4, "gptq", CALIBRATED + BUDGET, 4.8),
    "rot+GPTQ+sens": (4, "gptq", CALIBRATED + ROTATED + BUDGET, 4.8),
    "TQ-mixed": (4, "mlx", ROTATED + MIXED, None),
    "sens3": (3, "mlx", ROTATED + BUDGET, 4.26),
}


def build(args, name, title, source, bits, encoder, more, size):
    text = args.calibration.resolve()
    more = more.format(text=text, costs=args.costs.get(name, ""), size=size or "", compare=args.compare.resolve())
    body = (
        f'name = "frontier"\n[default]\ncodec = {{ affine = {{ bits = {bits}, group = 64 }} }}\nencoder = "{encoder}"\n{more}'
    )
    recipe = args.out / "recipe.toml"
    recipe.write_text(body)
    # The folder's name is the model's in the database of results.
    artifact = args.out / "artifacts" / title
    said = call(args.tqc, "build", recipe, "--source", source, "-o", artifact, "--restart", "--threads", args.threads)
    return artifact, said, body


def measure(args, name, artifact):
    common = ["--db", args.out / "eval.db", "--threads", args.threads]
    kl = call(args.tqc, "eval", "kl", "--teacher", args.out / f"dump-{name}", artifact, *common)
    suites = [part for suite in args.suite for part in ("--suite", suite)]
    tasks = call(args.tqc, "eval", "tasks", *suites, "--limit", args.limit, artifact, *common) if suites else None
    stop = call(args.tqc, "eval", "stop", "--teacher", args.out / f"dump-{name}", artifact, *common, ok=(0, 1)) if args.stop else None
    return kl, tasks, stop


def run(args):
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "frontier.json"
    done = json.loads(path.read_text()) if path.exists() else {}
    args.costs = dict(entry.split("=", 1) for entry in args.sensitivity)
    for entry in args.model:
        name, _, source = entry.partition("=")
        dump = args.out / f"dump-{name}"
        if not dump.exists():
            call(args.tqc, "eval", "dump", source, "--text", args.text, "--min-tokens", 64, "--context", 512, "--dtype", "f32", "-o", dump)
        if name not in args.costs:
            costs = args.out / f"sensitivity-{name}.json"
            if not costs.exists():
                recipe = args.out / "base.toml"
                recipe.write_text('name = "base"\n[default]\ncodec = { affine = { bits = 4, group = 64 } }\n')
                call(
                    args.tqc, "sensitivity", source, "--recipe", recipe, "-o", costs, "--text", args.calibration,
                    "--tokens", 2048, "--candidates", ",".join(f"affine-{bits}g64" for bits in (2, 3, 4, 5, 6, 8)),
                )
            args.costs[name] = costs.resolve()
        jobs = [(bits, label, bits, *arm) for bits in args.bits for label, arm in ARMS.items()]
        jobs += [("", label, bits, encoder, more, size) for label, (bits, encoder, more, size) in NAMED.items()]
        for group, label, bits, encoder, more, budget in jobs:
            key = f"{name}|{group}|{label}"
            if key in done or (args.arms and label not in args.arms):
                continue
            size = None
            nearest = done.get(f"{name}|{bits}|RTN")
            if budget == "same":
                size = f'bytes = "{nearest["bytes"]}B"'
            elif budget:
                # The draft head's bytes come on top of what the trunk may take.
                rest = nearest["bytes"] - nearest["trunk_bytes"]
                size = f'bytes = "{int(budget / nearest["bits"] * nearest["trunk_bytes"]) + rest}B"'
            title = " ".join([name, f"{group} bits," if group else "", label]).replace("  ", " ")
            artifact, said, body = build(args, name, title, source, bits, encoder, more, size)
            kl, tasks, stop = measure(args, name, artifact)
            stored, wide = trunk(artifact, said["sizes"]["weights"])
            shutil.rmtree(artifact)
            done[key] = {
                "recipe": body, "digest": said["digest"], "bytes": said["sizes"]["weight_file_bytes"], "trunk_bytes": stored,
                "bits": wide, "elapsed_s": said["elapsed_s"], "compare_s": said["compare_s"], "peak": said["peak_anonymous_bytes"], "run": kl["run"],
                "kl": {k: kl[k] for k in ("mean_kl", "standard_error", "ci95", "top1_agreement", "tokens", "documents")},
                "overlap": kl["calibration_overlap"], "tasks": tasks and tasks["results"], "compared": said["compared"],
                "stop": stop and stop["headline"],
                "loss": [m["loss"] / m["nearest"] for m in (said["calibration"] or {}).get("modules", []) if m["nearest"]],
                "fallbacks": sum(m["fallbacks"] for m in (said["calibration"] or {}).get("modules", [])),
            }
            path.write_text(json.dumps(done, indent=1, sort_keys=True) + "\n")
            print(f"{key}: {wide:.3f} bits, KL {kl['mean_kl']:.5f}", flush=True)
            if nearest and label != "RTN":
                try:
                    said = call(args.tqc, "eval", "compare", "--db", args.out / "eval.db", nearest["run"], kl["run"], ok=(0, 1))
                    done[key]["paired"] = said
                    path.write_text(json.dumps(done, indent=1, sort_keys=True) + "\n")
                except RuntimeError as error:
                    print(error, flush=True)
    return 0


def write(args):
    done = json.loads((args.out / "frontier.json").read_text())
    lines = [
        "# Calibration and budgets at equal bytes",
        "",
        "Written by `python tests/results/frontier.py write` from the results of its `run`; [calibration.md](../calibration.md),",
        "[sensitivity.md](../sensitivity.md) and [recipes.md](../recipes.md#budgets) explain the arms. Affine codes in groups of",
        "64. KL(source, artifact) in nats per token, its standard error clustered by document. Bits per weight are of the trunk:",
        "all bytes of the files that a stock loader reads, without the draft head. `of RTN` is the KL over that of rounding to",
        "nearest at the same width, and the paired difference is by document; arms with a budget have at most its bytes. `loss` is the mean over modules of",
        "tr(E H Eᵀ) over that of rounding to nearest, on the calibration text: 128 rows of 512 tokens that are not scored.",
        "Times are of a busy machine of two cores, the comparison with an even choice included. Costs for budgets were measured with `mlx` in the model's own basis, on 2048 tokens, for the rotated arms too.",
        "",
    ]
    names = list(dict.fromkeys(key.split("|")[0] for key in done))
    for name in names:
        rows = {tuple(key.split("|")[1:]): row for key, row in done.items() if key.split("|")[0] == name}
        first = next(iter(rows.values()))
        lines += [f"## {name}", "", f"{first['kl']['documents']} documents, {first['kl']['tokens']} positions.", ""]
        columns = ["arm", "bits per weight", "mean KL", "of RTN", "paired difference to RTN, 95 %", "loss", "top-1", "recall", "problems, raw", "problems, chat", "empty", "build", "memory"]
        lines += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        groups = [(str(bits), label) for bits in (4, 3, 2) for label in ARMS] + [("", label) for label in NAMED]
        for group, label in groups:
            row = rows.get((group, label))
            if row is None:
                continue
            kl, nearest = row["kl"], rows.get((group, "RTN"))
            share = f"{kl['mean_kl'] / nearest['kl']['mean_kl']:.2f}" if nearest else ""
            loss = f"{sum(row['loss']) / len(row['loss']):.2f}" if row["loss"] else ""
            arms = (row.get("paired") or {}).get("kl") or []
            arms = arms[0]["arms"] if arms else []
            low, high = arms[0]["difference_ci95"] if arms and group else (None, None)
            paired = f"{low:.5f} to {high:.5f}" if low is not None else ""
            cells = [
                f"{group} bits, {label}" if group else label, f"{row['bits']:.3f}",
                f"{kl['mean_kl']:.5f} ± {kl['standard_error']:.5f}", share, paired, loss, f"{100 * kl['top1_agreement']:.1f} %",
                *task_cells(row["tasks"]), f"{row['elapsed_s']:.0f} s", f"{row['peak'] / 2**20:.0f} MiB",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        compared = [(key, row["compared"]) for key, row in rows.items() if row["compared"]]
        if compared:
            lines += ["", "What budgets chose beside an even choice of the same bytes, on other text, with the recipe's own encoder:", ""]
            lines += ["| arm | chosen | even | difference | ends at once, of the prompts |", "| --- | --- | --- | --- | --- |"]
            for (group, label), said in compared:
                arm = f"{group} bits, {label}" if group else label
                lines.append(
                    f"| {arm} | {said['chosen']['mean_kl']:.5f} | {said['even']['mean_kl']:.5f} | {said['difference']:+.5f} "
                    f"± {said['standard_error'] or 0:.5f} | {said['chosen']['stops_at_once']} and {said['even']['stops_at_once']} of {said['prompts']} |"
                )
        lines.append("")
    text = "\n".join(lines).rstrip() + "\n"
    before = args.output.read_text().split("\n## ")[1:] if args.output.exists() else []
    for section in before:
        if section.split("\n", 1)[0] not in names:
            text += "\n## " + section.rstrip() + "\n"
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)
    return 0


def main():
    parser, of_run = arguments(__doc__, ROOT, "docs/results/frontier.md")
    of_run.add_argument("--compare", type=Path, required=True)
    of_run.add_argument("--sensitivity", action="append", default=[])
    of_run.add_argument("--limit", type=int, default=100)
    of_run.add_argument("--stop", action="store_true")
    of_run.add_argument("--threads", type=int, default=2)
    of_run.add_argument("--arms", type=lambda text: text.split(";"))
    of_run.add_argument("--bits", type=lambda text: [int(bits) for bits in text.split(",")], default=[4, 3, 2])
    args = parser.parse_args()
    return run(args) if args.command == "run" else write(args)


if __name__ == "__main__":
    sys.exit(main())
