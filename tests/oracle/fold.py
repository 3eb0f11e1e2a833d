#!/usr/bin/env python3
"""Do folded models compute what their sources compute, in stock mlx-lm and in stock transformers?

    fold.py [--tqc PATH] [--models DIR] [--shared DIR] [--only NAME]

For each fixture and model: `tqc build` folds gains, rotates and balances channels, and stores the result in float32, once
in MLX's layout and once in the source's own. mlx-lm runs the first and transformers (where torch is installed) the second,
each beside the source, with float32 arithmetic. Logits may differ by 1e-3, times their size where that is above 1, and
their mean KL by 1e-8 for the fixtures, whose tolerances are known, and by 1e-6 for trained models. The same model stored in
bf16 is run too, and what that rounding costs is printed. No build may hold more memory than its plan says.

Exit status 0 if every check passed. The last line is `N passed, N failed`.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import reference
from reference import run, widened
from mlx_lm.utils import load_model, load_tokenizer

CHANGES = {
    "hadamard": 'rotation = "auto"\nkey-balance = true\nup-balance = true\n',
    "random": 'rotation = { kind = "random-orthogonal", seed = 5 }\n',
    "channels": "gamma-fold = true\nkey-balance = true\nvalue-balance = true\nvalue-order = true\nup-balance = true\n",
}


def models(args):
    """name -> (folder, changes); says aloud what it leaves out."""
    found = {path.name: (path, list(CHANGES)) for path in sorted((reference.ROOT / "tests/fixtures").iterdir())}
    found = {name: entry for name, entry in found.items() if args.only in (None, name)}
    return found | reference.models(args, ["hadamard"], ["hadamard"])


def drawn(source):
    """48 ids that the model has rows for."""
    config = json.loads((source / "config.json").read_text())
    vocab = config.get("text_config", config)["vocab_size"]
    return [(37 * i + 11) % vocab for i in range(48)]


def in_mlx(folder, ids):
    model, _ = load_model(folder, lazy=True)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([ids]))[0].astype(mx.float32), dtype=np.float64)


def in_transformers(folder, ids):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().numpy()


def apart(expected, found):
    """Greatest distance of a logit, mean KL, rows whose greatest is another."""
    log = [x - x.max(-1, keepdims=True) for x in (expected, found)]
    log = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in log]
    kl = (np.exp(log[0]) * (log[0] - log[1])).sum(-1).mean()
    return float(np.abs(expected - found).max()), float(kl), int((expected.argmax(-1) != found.argmax(-1)).sum())


def build(tqc, source, work, change, layout, codec):
    work.mkdir(parents=True)
    recipe = work / "recipe.toml"
    recipe.write_text(
        f'name = "oracle"\n[default]\ncodec = "{codec}"\n[transform]\n{CHANGES[change]}[output]\nlayout = "{layout}"\n'
    )
    planned = json.loads(run(tqc, "plan", recipe, "--source", source, "--json"))["peak_memory_bytes"]
    found = json.loads(run(tqc, "build", recipe, "--source", source, "-o", work / "artifact", "--json"))
    if found["peak_anonymous_bytes"] > planned:
        raise RuntimeError(f"{recipe}: {found['peak_anonymous_bytes']} bytes of memory, {planned} were planned")
    return work / "artifact"


def check(tqc, name, source, changes, work, torch):
    """Complaints about one model; says what it found."""
    print(name)
    fixture = source.parent.name == "fixtures"
    ids = drawn(source) if fixture else load_tokenizer(source).encode(reference.PROMPT)[:48]
    sides = {"mlx-lm": ("mlx", in_mlx, reference.prepare(widened(source, work / "wide"), work / "wrapped"))}
    if torch:
        sides["transformers"] = ("huggingface", in_transformers, source)
    complaints = []
    for side, (layout, logits, judge) in sides.items():
        expected = logits(judge, ids)
        size = max(1.0, float(np.sqrt((expected**2).mean())))
        for change in changes:
            folded = build(tqc, source, work / f"{side}-{change}", change, layout, "f32")
            most, kl, flips = apart(expected, logits(folded, ids))
            print(f"  {side}, {change}: logits within {most:.1e}, mean KL {kl:.1e}, {flips} flips")
            if not (most <= 1e-3 * size and kl <= (1e-8 if fixture else 1e-6)):
                complaints.append(f"{side}, {change}: logits differ by {most:.2e}, KL {kl:.2e}")
        rounded = build(tqc, source, work / f"{side}-bf16", changes[0], layout, "bf16")
        most, kl, flips = apart(expected, logits(rounded, ids))
        print(f"  {side}, {changes[0]}, stored in bf16: mean KL {kl:.1e}, {flips} flips")
        if not kl <= 0.3:
            complaints.append(f"{side}, bf16: mean KL {kl:.2e}")
    return complaints


def main():
    args = reference.arguments(__doc__).parse_args()
    torch = importlib.util.find_spec("torch") is not None
    if not torch:
        print("SKIP transformers: torch is not installed")
    with tempfile.TemporaryDirectory() as work:
        return reference.tally(
            check(args.tqc, name, source, changes, Path(work) / name, torch)
            for name, (source, changes) in models(args).items()
        )


if __name__ == "__main__":
    sys.exit(main())
