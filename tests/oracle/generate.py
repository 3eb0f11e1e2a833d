#!/usr/bin/env python3
"""Compare what `tqc generate` writes with stock mlx-lm, on checkpoints and on packed artifacts.

    generate.py [--tqc PATH] [--models DIR] [--shared DIR] [--only NAME] [--tokens N]

For each model and setting: `tqc generate --exact` continues a prompt greedily, from the checkpoint or from an artifact
that `tqc build` makes; mlx-lm does the same with float32 arithmetic on the same weights (bf16 on the CPU is no
reference). The tokens must be the same up to the first step where mlx-lm's two best logits are closer than 1e-3;
then either may win. `--draft mtp` must change nothing, and the fast path must give a first token that mlx-lm holds
likely.

Exit status 0 if every check passed. The last line is `N passed, N failed`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import reference
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CLOSE = 1e-3
SETTINGS = {
    "affine-4g64": "{ affine = { bits = 4, group = 64 } }",
    "affine-3g32": "{ affine = { bits = 3, group = 32 } }",
    "mxfp4": '"mxfp4"',
    "nvfp4": '"nvfp4"',
    "mxfp8": '"mxfp8"',
}


def models(args):
    """name -> (folder, settings); says aloud what it leaves out."""
    found = {"demo-qwen3_5": (ROOT / "goldens/models/demo-qwen3_5", [None, *SETTINGS])}
    for name in ("lab-qwen3_5", "smollm2-135m"):
        places = [args.models / name, args.shared / "models" / name]
        source = next((place for place in places if (place / "config.json").exists()), None)
        if source:
            found[name] = (source, [None, "affine-4g64"])
        else:
            print(f"SKIP {name}: not in {args.models} nor {args.shared / 'models'}")
    return {name: entry for name, entry in found.items() if args.only in (None, name)}


def run(command):
    """The program's JSON object; its complaint if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command[:3]))} ended with {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def greedy(folder, prompt, count):
    """mlx-lm's greedy tokens, the margin of each, and the logits that decide the first."""
    model, _ = load_model(folder, lazy=True)
    model.set_dtype(mx.float32)
    cache = make_prompt_cache(model)
    tokens, margins, first, feed = [], [], None, prompt
    for _ in range(count):
        logits = np.array(model(mx.array([feed]), cache=cache)[0, -1].astype(mx.float32))
        first = logits if first is None else first
        best, second = np.partition(logits, -2)[-1], np.partition(logits, -2)[-2]
        tokens.append(int(logits.argmax()))
        margins.append(float(best - second))
        feed = tokens[-1:]
    return tokens, margins, first


def widened(source, work):
    """A copy of a qwen3_5 checkpoint in float32: mlx-lm adds 1 to zero-centred gains in the stored dtype."""
    config = json.loads((source / "config.json").read_text())
    if not config["model_type"].startswith("qwen3_5"):
        return source
    work.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (work / file.name).symlink_to(file.resolve())
            continue
        tensors = {name: value.astype(mx.float32) for name, value in mx.load(str(file)).items()}
        mx.save_safetensors(str(work / file.name), tensors, {"format": "pt"})
    return work


def check(tqc, name, source, setting, count, work):
    """Complaints about one model with one setting."""
    work = work / f"{name}-{setting}"
    folder, judge = source, None
    if setting:
        recipe = work / "recipe.toml"
        work.mkdir(parents=True)
        recipe.write_text(f'name = "oracle"\n[default]\ncodec = {SETTINGS[setting]}\n')
        folder = judge = work / "artifact"
        run([tqc, "build", recipe, "--source", source, "-o", folder, "--json"])
    else:
        judge = reference.prepare(widened(source, work / "wide"), work / "wrapped")
    prompt = load_tokenizer(source).encode(reference.PROMPT)
    ids = ",".join(map(str, prompt))
    command = [tqc, "generate", folder, "--prompt-ids", ids, "--ignore-eos", "--max-tokens", count, "--json"]
    expected, margins, first = greedy(judge, prompt, count)
    certain = next((i for i, margin in enumerate(margins) if margin < CLOSE), count)
    complaints = []
    exact = run([*command, "--exact"])["tokens"]
    if exact[:certain] != expected[:certain]:
        at = next(i for i in range(certain) if exact[i] != expected[i])
        complaints.append(f"token {at} is {exact[at]}, mlx-lm's is {expected[at]} by {margins[at]:.4f}")
    text_prompt = run([tqc, "generate", folder, "--prompt", reference.PROMPT, "--max-tokens", 1, "--json"])
    if text_prompt["prompt_tokens"] != prompt:
        complaints.append("the prompt's tokens are not mlx-lm's")
    if name != "smollm2-135m" and run([*command, "--exact", "--draft", "mtp"])["tokens"] != exact:
        complaints.append("--draft mtp changed the tokens")
    fast = run(command)["tokens"][0]
    log_p = first - first.max() - np.log(np.exp(first - first.max()).sum())
    if log_p[fast] < log_p.max() - 1.0:
        complaints.append(f"the fast path's first token {fast} is not likely: {log_p[fast]:.2f} nats")
    print(f"{'ok  ' if not complaints else 'FAIL'} {name:14} {setting or 'as stored':12} {certain} of {count} tokens")
    return complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tqc", type=Path, default=ROOT / "target/release/tqc")
    parser.add_argument("--models", type=Path, default=ROOT / "target/oracle/models")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--only")
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    passed = failed = 0
    with tempfile.TemporaryDirectory() as work:
        for name, (source, settings) in models(args).items():
            for setting in settings:
                complaints = check(args.tqc, name, source, setting, args.tokens, Path(work))
                for line in complaints:
                    print(f"     {line}")
                passed, failed = passed + (not complaints), failed + bool(complaints)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
