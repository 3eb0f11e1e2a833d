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

import json
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import reference
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer
from reference import run

CLOSE = 1e-3
SETTINGS = {
    "affine-4g64": "{ affine = { bits = 4, group = 64 } }",
    "affine-3g32": "{ affine = { bits = 3, group = 32 } }",
    "mxfp4": '"mxfp4"',
    "nvfp4": '"nvfp4"',
    "mxfp8": '"mxfp8"',
}


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


def check(tqc, name, source, setting, count, work):
    """Complaints about one model with one setting."""
    work = work / f"{name}-{setting}"
    folder, judge = source, None
    if setting:
        recipe = work / "recipe.toml"
        work.mkdir(parents=True)
        recipe.write_text(f'name = "oracle"\n[default]\ncodec = {SETTINGS[setting]}\n')
        folder = judge = work / "artifact"
        run(tqc, "build", recipe, "--source", source, "-o", folder)
    else:
        judge = reference.prepare(reference.widened(source, work / "wide"), work / "wrapped")
    prompt = load_tokenizer(source).encode(reference.PROMPT)
    ids = ",".join(map(str, prompt))
    command = [tqc, "generate", folder, "--prompt-ids", ids, "--ignore-eos", "--max-tokens", count, "--json"]
    expected, margins, first = greedy(judge, prompt, count)
    certain = next((i for i, margin in enumerate(margins) if margin < CLOSE), count)
    complaints = []
    exact = json.loads(run(*command, "--exact"))["tokens"]
    if exact[:certain] != expected[:certain]:
        at = next(i for i in range(certain) if exact[i] != expected[i])
        complaints.append(f"token {at} is {exact[at]}, mlx-lm's is {expected[at]} by {margins[at]:.4f}")
    text_prompt = run(tqc, "generate", folder, "--prompt", reference.PROMPT, "--max-tokens", 1, "--json")
    if json.loads(text_prompt)["prompt_tokens"] != prompt:
        complaints.append("the prompt's tokens are not mlx-lm's")
    if name != "smollm2-135m" and json.loads(run(*command, "--exact", "--draft", "mtp"))["tokens"] != exact:
        complaints.append("--draft mtp changed the tokens")
    fast = json.loads(run(*command))["tokens"][0]
    log_p = first - first.max() - np.log(np.exp(first - first.max()).sum())
    if log_p[fast] < log_p.max() - 1.0:
        complaints.append(f"the fast path's first token {fast} is not likely: {log_p[fast]:.2f} nats")
    print(f"{'ok  ' if not complaints else 'FAIL'} {name:14} {setting or 'as stored':12} {certain} of {count} tokens")
    return complaints


def main():
    parser = reference.arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    models = reference.models(args, [None, *SETTINGS], [None, "affine-4g64"])
    with tempfile.TemporaryDirectory() as work:
        return reference.tally(
            check(args.tqc, name, source, setting, args.tokens, Path(work))
            for name, (source, settings) in models.items()
            for setting in settings
        )


if __name__ == "__main__":
    sys.exit(main())
