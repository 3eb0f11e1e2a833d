#!/usr/bin/env python3
"""Compare what `tqc eval` measures with numpy over stock mlx-lm's logits.

    evaluate.py [--tqc PATH] [--models DIR] [--shared DIR] [--only NAME] [--documents N]

For each model: `tqc eval dump` of the checkpoint, an artifact that `tqc build` makes of it (affine 4-bit, and for one
model 2-bit), and `tqc eval kl` of that. mlx-lm computes both models' logits of the same tokens in float32, and numpy the KL
and the perplexities in float64. Checked: the tokens, the mean KL within 1e-5 nats, every position's KL, both
perplexities within 0.1 %, the agreement of the likeliest tokens, and the standard error clustered by document.

On the lab model, if its folder is there, also: all of `heldout.jsonl` against the anchors that other programs measured
(mlx round-to-nearest, 4, 3 and 2 bits), and recall and problems of the teacher, which get every item right. These take
minutes and run only with `--full`.

Exit status 0 if every check passed. The last line is `N passed, N failed`.
"""

import csv
import io
import json
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import reference
from mlx_lm.utils import load_model, load_tokenizer
from reference import ROOT, run

CONTEXT = 128
RECIPE = """name = "oracle"
[default]
codec = {{ affine = {{ bits = {bits}, group = 64 }} }}
"""
# The anchors have every linear layer at one width; our default keeps the decay gates at 8 bits.
ANCHOR_RECIPE = (
    RECIPE
    + """[[rule]]
match = "*.in_proj_[ab]"
codec = {{ affine = {{ bits = {bits}, group = 64 }} }}
"""
)
# Mean KL over every position of the first 512 tokens of each document of at least 64 tokens, with its standard error:
# mlx RTN with groups of 64, weights taken back to float and run in float32.
ANCHORS = {4: (0.00536, 0.0007), 3: (0.0272, 0.0033), 2: (0.333, 0.022)}


def log_probs(folder, sequences):
    """ln of mlx-lm's probabilities, float32 arithmetic, float64 softmax: one [T, V] a sequence."""
    model, _ = load_model(folder, lazy=True)
    model.set_dtype(mx.float32)
    for tokens in sequences:
        logits = np.array(model(mx.array([tokens]))[0].astype(mx.float32)).astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        yield logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def expected(teacher, candidate, sequences):
    """KL and next-token log-probabilities of every position, by document."""
    rows = []
    for tokens, p, q in zip(sequences, log_probs(teacher, sequences), log_probs(candidate, sequences), strict=True):
        kl = (np.exp(p) * (p - q)).sum(axis=-1)
        follow = np.array(tokens[1:])
        at = np.arange(len(follow))
        rows.append((kl, -p[at, follow], -q[at, follow], p.argmax(-1) == q.argmax(-1)))
    return rows


def compare(name, bits, found, positions, rows):
    """Complaints about one comparison."""
    complaints = []
    kl = np.concatenate([row[0] for row in rows])
    count = len(kl)
    sums = np.array([row[0].sum() for row in rows])
    sizes = np.array([len(row[0]) for row in rows])
    mean = kl.mean()
    groups = len(rows)
    error = np.sqrt(groups / (groups - 1) * ((sums - mean * sizes) ** 2).sum()) / count
    if found["tokens"] != count or found["documents"] != groups:
        complaints.append(f"{found['tokens']} tokens in {found['documents']} documents, not {count} in {groups}")
    if abs(found["mean_kl"] - mean) > 1e-5:
        complaints.append(f"mean KL {found['mean_kl']}, numpy {mean}")
    if abs(found["standard_error"] / error - 1) > 1e-2:
        complaints.append(f"standard error {found['standard_error']}, numpy {error}")
    for key, column in (("teacher_ppl", 1), ("candidate_ppl", 2)):
        ppl = float(np.exp(np.concatenate([row[column] for row in rows]).mean()))
        if abs(found[key] / ppl - 1) > 1e-3:
            complaints.append(f"{key} {found[key]}, numpy {ppl}")
    agree = float(np.concatenate([row[3] for row in rows]).mean())
    if abs(found["top1_agreement"] - agree) > 2 / count:
        complaints.append(f"top-1 agreement {found['top1_agreement']}, numpy {agree}")
    # An error of the logits moves a KL by about sqrt(2 KL) times itself, and two programs in float32 differ by up to 1e-3.
    off = np.abs(positions - kl) / (5e-6 + 2e-3 * np.sqrt(kl))
    if off.max() > 1:
        at = int(off.argmax())
        complaints.append(f"position {at}: KL {positions[at]}, numpy {kl[at]}")
    word = "ok  " if not complaints else "FAIL"
    print(f"{word} {name:14} {bits}-bit KL {found['mean_kl']:.6f} numpy {mean:.6f} over {count} tokens")
    return complaints


def check(args, name, source, bits, work):
    """One candidate of one model."""
    work.mkdir(parents=True)
    texts = [json.loads(line)["text"] for line in (ROOT / "goldens/eval/text.jsonl").read_text().splitlines()]
    text = work / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": text}) for text in texts[: args.documents]))
    (work / "recipe.toml").write_text(RECIPE.format(bits=bits))
    artifact, dump, db = work / "artifact", work / "dump", work / "eval.db"
    run(args.tqc, "build", work / "recipe.toml", "--source", source, "-o", artifact)
    run(args.tqc, "eval", "dump", source, "--text", text, "-o", dump, "--context", CONTEXT, "--dtype", "f32")
    found = json.loads(run(args.tqc, "eval", "kl", "--teacher", dump, artifact, "--db", db, "--json"))
    table = list(csv.DictReader(io.StringIO(run(args.tqc, "eval", "list", "--db", db, "--run", 1, "--export", "csv"))))
    positions = np.array([float(row["kl"]) for row in table])
    tokenizer = load_tokenizer(source)
    sequences = [tokenizer.encode(text)[:CONTEXT] for text in texts[: args.documents]]
    judge = reference.prepare(reference.widened(source, work / "wide"), work / "wrapped")
    return compare(name, bits, found, positions, expected(judge, artifact, sequences))


def check_lab(args, source, work):
    """The lab model against what other programs measured."""
    work.mkdir(parents=True)
    complaints = []
    text, dump, db = args.shared / "text/heldout.jsonl", work / "dump", work / "eval.db"
    made = json.loads(
        run(args.tqc, "eval", "dump", source, "--text", text, "-o", dump, "--min-tokens", 64, "--json")
    )
    if (made["documents"], made["tokens"]) != (299, 56478):
        complaints.append(f"{made['documents']} documents, {made['tokens']} positions; the anchors have 299 and 56478")
    for bits, (anchor, error) in ANCHORS.items():
        (work / "recipe.toml").write_text(ANCHOR_RECIPE.format(bits=bits))
        artifact = work / f"{bits}-bit"
        run(args.tqc, "build", work / "recipe.toml", "--source", source, "-o", artifact)
        found = json.loads(run(args.tqc, "eval", "kl", "--teacher", dump, artifact, "--db", db, "--json"))
        print(f"     lab {bits}-bit: KL {found['mean_kl']:.5f}, anchor {anchor} +- {error}")
        # The same weights on the same text: only the number of digits in the anchor is between them.
        if abs(found["mean_kl"] / anchor - 1) > 0.02:
            complaints.append(f"{bits}-bit KL {found['mean_kl']}, anchor {anchor}")
    suites = ["--suite", args.shared / "text/recall.jsonl", "--suite", args.shared / "text/problems.jsonl"]
    tasks = json.loads(run(args.tqc, "eval", "tasks", source, *suites, "--db", db, "--json"))
    for suite in tasks["results"]:
        print(f"     lab teacher: {suite['suite']} {suite['frame']} {suite['correct']} of {suite['items']}")
        if suite["correct"] != suite["items"]:
            complaints.append(f"{suite['suite']} {suite['frame']}: {suite['correct']} of {suite['items']} right")
    return complaints


def checks(args, work):
    """The complaints of each check."""
    for name, (source, widths) in reference.models(args, (4, 2), (4,)).items():
        for bits in widths:
            yield check(args, name, source, bits, work / f"{name}-{bits}")
        if args.full and name == "lab-qwen3_5":
            yield check_lab(args, source, work / "anchors")


def main():
    parser = reference.arguments(__doc__)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        return reference.tally(checks(args, Path(work)))


if __name__ == "__main__":
    sys.exit(main())
