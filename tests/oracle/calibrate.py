#!/usr/bin/env python3
"""Are second moments, and the losses of weighed codes, those that stock mlx-lm's own forward pass gives?

    calibrate.py [--tqc PATH] [--models DIR] [--shared DIR] [--only NAME]

For some fixtures and the demo model, and for lab-qwen3_5 or smollm2-135m where `--only` names it (minutes): mlx-lm runs
the rows of a text in float32 while every linear layer notes its inputs. Checked against that:

- every sum that `tqc calibrate` writes, and its tokens: an entry of a second moment may be off by 1e-4 of
  sqrt(H_ii H_jj), its bound, and a magnitude by 1e-4 of itself;
- artifacts of `gptq` and `gptq-refit` in 3 bits: they load, their float32 logits are those of the source with every
  quantized matrix replaced by its decoded values, and tr(E H E^T) / tr(W H W^T), of those values and mlx-lm's own H,
  is what provenance records, within 1e-4 of itself. So is the loss of rounding to nearest (mlx's own for `gptq`, that
  of a `refit` artifact for `gptq-refit`), which no module may exceed, and of which the mean is at most 0.8.

Each check is then given something wrong (moments shifted by one channel, a token too few, one layer's channels in
reverse, codes rounded to nearest, weights that nobody rounded) and must notice it.

Exit status 0 if every check passed. The last line is `N passed, N failed`.
"""

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import reference
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model, load_tokenizer
from reference import run

FIXTURES = ("llama-untied", "qwen2", "qwen3_5", "qwen3_5_moe")
CONTEXT, BITS = 64, 3
# Two programs in float32 are up to 6e-6 of a moment and 5e-7 of a loss apart here. Other BLAS libraries sum otherwise.
APART = 1e-4
# Mean loss over that of rounding to nearest: 0.35 to 0.65 here.
GAIN = 0.8


def models(args):
    """name -> folder."""
    found = {name: reference.ROOT / "tests/fixtures" / name for name in FIXTURES}
    found["demo-qwen3_5"] = reference.ROOT / "goldens/models/demo-qwen3_5"
    if args.only not in (None, *found):
        return {name: source for name, (source, _) in reference.models(args, None, None).items()}
    return {name: source for name, source in found.items() if args.only in (None, name)}


def recipe(work, encoder, group, rows):
    path = work / f"{encoder}.toml"
    path.write_text(
        f'name = "oracle"\n[default]\ncodec = {{ affine = {{ bits = {BITS}, group = {group} }} }}\n'
        f'encoder = "{encoder}"\n'
        + f'[calibration]\ntext = "text.jsonl"\nrows = {rows}\ncontext = {CONTEXT}\npacking = "documents"\n'
        * encoder.startswith("gptq")
    )
    return path


def full(folder):
    """The model in `folder`, computing in float32."""
    model, _ = load_model(folder, lazy=True)
    model.set_dtype(mx.float32)
    return model


class Inputs:
    """Rows that each linear layer reads, (path, expert or None) -> [T, K] float64, and their second moments."""

    def __init__(self, parts):
        self.parts, self.sums = parts, {}

    @classmethod
    def of(cls, model, rows):
        """What `model` reads while it runs each of `rows`."""
        self = cls(defaultdict(list))
        self.paths = {id(module): path for path, module in model.named_modules()}
        # The calls are looked up in the classes, so that is where they must be noted.
        calls = [(nn.Linear, "__call__"), (nn.Embedding, "as_linear"), (SwitchLinear, "__call__")]
        before = [(owner, name, getattr(owner, name)) for owner, name in calls]
        try:
            for owner, name, call in before:
                setattr(owner, name, self.noting(call))
            for row in rows:
                mx.eval(model(mx.array([row])))
        finally:
            for owner, name, call in before:
                setattr(owner, name, call)
        return cls({key: np.concatenate(parts) for key, parts in self.parts.items()})

    def noting(self, call):
        def noted(module, x, *rest, **named):
            self.note(self.paths[id(module)], x, *rest)
            return call(module, x, *rest, **named)

        return noted

    def note(self, path, x, indices=None, *_):
        width = x.shape[-1]
        if indices is None:
            self.parts[path, None].append(np.array(x.reshape(-1, width)).astype(np.float64))
            return
        # x: [..., 1, K], or [..., 1, 1, K] where all chosen experts read the same.
        each = mx.broadcast_to(x, (*indices.shape, 1, width)).reshape(-1, width)
        each, chosen = np.array(each).astype(np.float64), np.array(indices).reshape(-1)
        for expert in np.unique(chosen):
            self.parts[path, int(expert)].append(each[chosen == expert])

    def moment(self, path, expert=None):
        """H [K, K], summed over all experts if `expert` is "all"."""
        if (path, expert) not in self.sums:
            parts = [x for key, x in self.parts.items() if key[0] == path and expert in ("all", key[1])]
            self.sums[path, expert] = sum(x.T @ x for x in parts)
        return self.sums[path, expert]


def moments_apart(folder, inputs, spoil=None):
    """Complaints about a folder of second moments, and the largest distance; `spoil` changes what was read."""
    contents = json.loads((folder / "hessians.json").read_text())
    tensors = {}
    for file in contents["files"]:
        tensors |= {name: np.array(value).astype(np.float64) for name, value in mx.load(str(folder / file)).items()}
    complaints, most, unseen = [], 0.0, set(inputs.parts)
    for entry in contents["inputs"]:
        hessian, magnitude = (tensors[f"{entry['name']}.{kind}"] for kind in ("hessian", "magnitude"))
        hessian, magnitude = (spoil(hessian), spoil(magnitude)) if spoil else (hessian, magnitude)
        for module in entry["modules"]:
            key = module, entry["expert"]
            unseen.discard(key)
            x = inputs.parts.get(key, np.zeros((0, len(magnitude))))
            if entry["tokens"] != len(x):
                complaints.append(f"{entry['name']}: {entry['tokens']} tokens, {module} read {len(x)}")
            expected, sums = inputs.moment(*key) if len(x) else np.zeros_like(hessian), np.abs(x).sum(0)
            size = np.sqrt(np.diag(expected))
            gap = float((np.abs(hessian - expected) / np.maximum(np.outer(size, size), 1e-30)).max())
            gap = max(gap, float((np.abs(magnitude - sums) / np.maximum(sums, 1e-30)).max()))
            most = max(most, gap)
            if not gap <= APART:
                complaints.append(f"{entry['name']}: off by {gap:.1e} for {module}")
    complaints += [f"{path}, expert {expert}: no moment of what it read" for path, expert in sorted(unseen, key=str)]
    return complaints, most


def decoded(folder):
    """Path -> float32 values of every quantized module."""
    model, _ = load_model(folder, lazy=True)
    return {
        path: mx.dequantize(
            module.weight,
            module.scales.astype(mx.float32),
            module.biases.astype(mx.float32),
            group_size=module.group_size,
            bits=module.bits,
        )
        for path, module in model.named_modules()
        if hasattr(module, "scales")
    }


def rounded(weight, group, bits):
    """mlx's rounding to nearest of `weight`, in the dtype it is stored in, decoded in float32."""
    codes, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(codes, scales, biases, group_size=group, bits=bits)


def loss(weight, values, moments):
    """tr(E H E^T) / tr(W H W^T), summed over experts. weight, values: [E, N, K]; moments: E times [K, K]."""
    weight, values = (np.array(each.astype(mx.float32)).astype(np.float64) for each in (weight, values))

    def trace(rows):
        return sum(float(((each @ h) * each).sum()) for each, h in zip(rows, moments, strict=True))

    return trace(weight - values) / trace(weight)


def losses_apart(records, weights, values, plain, inputs):
    """Complaints about recorded losses; the largest relative distance and the mean of loss / nearest.

    `values` are what the artifact decodes to, and `plain` what codes rounded to nearest do.
    """
    complaints, most, ratios = [], 0.0, []
    for record in records:
        name = record["module"]
        weight, *both = (each if each.ndim == 3 else each[None] for each in (weights[name], values[name], plain[name]))
        # An expert that saw too few tokens is weighed by those of all.
        kinds = ["all" if expert["few"] else e for e, expert in enumerate(record["experts"])] or [None]
        moments = [inputs.moment(name, kind) for kind in kinds]
        for key, each in zip(("loss", "nearest"), both, strict=True):
            expected = loss(weight, each, moments)
            gap = abs(record[key] / expected - 1)
            most = max(most, gap)
            if not gap <= APART:
                complaints.append(f"{name}: {key} {record[key]:.3e} is recorded, mlx-lm's is {expected:.3e}")
        if record["loss"] > record["nearest"]:
            complaints.append(f"{name}: loss {record['loss']:.3e} above that of nearest, {record['nearest']:.3e}")
        ratios.append(record["loss"] / record["nearest"])
    ratio = float(np.mean(ratios))
    if not ratio < GAIN:
        complaints.append(f"losses are {ratio:.3f} of those of nearest, {GAIN} at most were expected")
    return complaints, most, ratio


def with_values(folder, values):
    """The model in `folder` with the matrices in `values` instead of its own."""
    model = full(folder)
    for path, module in model.named_modules():
        if path in values:
            module.weight = values[path]
    return model


def logits_apart(found, expected):
    """Complaints about logits, and how far they are apart, over their size where that is above 1."""
    gap = float(np.abs(found - expected).max()) / max(1.0, float(np.sqrt((expected**2).mean())))
    return [] if gap <= APART else [f"logits differ by {gap:.1e}"], gap


def check_moments(tqc, source, work, group, rows, inputs):
    """Complaints about what `tqc calibrate` writes."""
    folder = work / "moments"
    run(tqc, "calibrate", recipe(work, "gptq", group, rows), "--source", source, "-o", folder)
    complaints, most = moments_apart(folder, inputs)
    print(f"  {len(inputs.parts)} second moments within {most:.1e}")
    first = min(inputs.parts, key=str)
    wrong = {
        "a shift by one channel": (inputs, lambda values: np.roll(values, 1, range(values.ndim))),
        "a token too few": (Inputs({key: x[1:] for key, x in inputs.parts.items()}), None),
        "one layer's channels in reverse": (Inputs(inputs.parts | {first: inputs.parts[first][:, ::-1]}), None),
        "a layer that nobody asked for": (Inputs(inputs.parts | {("other", None): inputs.parts[first]}), None),
    }
    for name, (others, spoil) in wrong.items():
        if not moments_apart(folder, others, spoil)[0]:
            complaints.append(f"second moments: {name} was not noticed")
    return complaints


def check_codes(tqc, source, prepared, work, group, rows, inputs):
    """Complaints about artifacts of both encoders."""
    model = load_model(prepared, lazy=True)[0]
    weights = {path: module.weight for path, module in model.named_modules() if hasattr(module, "to_quantized")}
    shifted = Inputs({key: np.roll(x, 1, axis=1) for key, x in inputs.parts.items()})
    unrounded, complaints = None, []
    # What each falls back to, and is compared with.
    for encoder, fallback in (("gptq", "mlx"), ("gptq-refit", "refit")):
        for each in (encoder, fallback):
            run(tqc, "build", recipe(work, each, group, rows), "--source", source, "-o", work / each)
        folder, plain = work / encoder, decoded(work / fallback)
        if fallback == "mlx":
            settings = json.loads((folder / "config.json").read_text())["quantization"]
            chosen = {path: settings.get(path, settings) for path in plain}
            plain = {path: rounded(weights[path], c["group_size"], c["bits"]) for path, c in chosen.items()}
        records = json.loads((folder / "provenance.json").read_text())["calibration"]["modules"]
        artifact, tokens = reference.load_as_user(folder, source)
        values, found = decoded(folder), reference.logits(artifact, tokens)
        if unrounded is None:
            unrounded = reference.logits(model, tokens)
        lines, gap = logits_apart(found, reference.logits(with_values(prepared, values), tokens))
        more, most, ratio = losses_apart(records, weights, values, plain, inputs)
        print(
            f"  {encoder}, {BITS} bits, group {group}: logits within {gap:.1e}, "
            f"{len(records)} losses within {most:.1e}, {ratio:.3f} of nearest"
        )
        lines += more
        if missing := {path for path, _ in inputs.parts} - {record["module"] for record in records}:
            lines.append(f"no loss is recorded for {', '.join(sorted(missing))}")
        if not losses_apart(records, weights, plain, plain, inputs)[0]:
            lines.append("losses of codes rounded to nearest were not noticed")
        if not losses_apart(records, weights, values, plain, shifted)[0]:
            lines.append("losses under shifted moments were not noticed")
        if not logits_apart(found, unrounded)[0]:
            lines.append("logits of weights that nobody rounded were not noticed")
        complaints += [f"{encoder}: {line}" for line in lines]
    return complaints


def check(tqc, name, source, work):
    """Complaints about one model; says what it found."""
    print(name, flush=True)
    work.mkdir()
    lines = (reference.ROOT / "goldens/eval/text.jsonl").read_text().splitlines()
    (work / "text.jsonl").write_text("\n".join(lines))
    tokenizer = load_tokenizer(source)
    rows = [tokenizer.encode(json.loads(line)["text"])[:CONTEXT] for line in lines]
    prepared = reference.prepare(source, work / "wrapped")
    group = 32 if any(width % 64 for width in reference.widths(prepared).values()) else 64
    inputs = Inputs.of(full(reference.prepare(reference.widened(source, work / "wide"), work / "wide-wrapped")), rows)
    return [
        *check_moments(tqc, source, work, group, len(rows), inputs),
        *check_codes(tqc, source, prepared, work, group, len(rows), inputs),
    ]


def main():
    args = reference.arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as work:
        return reference.tally(
            check(args.tqc, name, source, Path(work) / name) for name, source in models(args).items()
        )


if __name__ == "__main__":
    sys.exit(main())
