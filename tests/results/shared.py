"""What the tables of results share: the program's answers, and cells of tasks."""

import argparse
import json
import subprocess
from pathlib import Path


def call(tqc, *args, ok=(0,)):
    """The program's JSON object."""
    done = subprocess.run([str(tqc), *map(str, args), "--json"], capture_output=True, text=True, check=False)
    if done.returncode not in ok:
        raise RuntimeError(f"{' '.join(map(str, args[:3]))} ended with {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def task_cells(results):
    """Recall, problems raw and in chat form, and empty answers, of `tqc eval tasks`' results."""
    by = {(suite["suite"], suite["frame"]): suite for suite in results or []}
    cells = []
    for suite, frame in (("recall", "choice"), ("problems", "raw"), ("problems", "chat")):
        found = by.get((suite, frame))
        cells.append(f"{found['correct']}/{found['items']}" if found else "")
    generated = [suite["generative"] for suite in results or [] if suite.get("generative")]
    return [*cells, str(sum(suite["empty"] for suite in generated)) if generated else ""]


def trunk(artifact, weights):
    """Bytes of the files that a stock loader reads, and their bits per weight; the draft head is not among them."""
    draft = artifact / "mtp/model.safetensors"
    # A draft head that no rule names is stored in bf16.
    of_draft = draft.stat().st_size // 2 if draft.exists() else 0
    stored = sum(path.stat().st_size for path in artifact.glob("model*.safetensors"))
    return stored, 8 * stored / (weights - of_draft)


def arguments(doc, root, page):
    """Parsers of `run` and `write`, with the options that both tables have; the whole, then `run`'s."""
    parser = argparse.ArgumentParser(description=doc.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_run, of_write = commands.add_parser("run"), commands.add_parser("write")
    for command in (of_run, of_write):
        command.add_argument("--out", type=Path, required=True)
    of_run.add_argument("--tqc", type=Path, default=root / "target/release/tqc")
    of_run.add_argument("--model", action="append", required=True)
    of_run.add_argument("--text", type=Path, required=True)
    of_run.add_argument("--calibration", type=Path, required=True)
    of_run.add_argument("--suite", type=Path, action="append", default=[])
    of_write.add_argument("-o", "--output", type=Path, default=root / page)
    return parser, of_run
