#!/usr/bin/env python3
"""Does stock mlx-lm load what `tqc repack` makes of a trellis, and does it compute what the trellis says?

    repack.py [--tqc PATH]

`tqc build` makes recipes/demo-q3.toml of the demo model, and `tqc repack` each of its targets. Checked:

- f32: every repacked weight is (code * scale) * scale2 in float32, decoded here in numpy from docs/formats/trellis.md;
- affine-8g64: codes, scales and biases are those of `mx.quantize` of that float32 weight, scales and biases then rounded
  to the model's dtype; bf16: the weight rounded by numpy arithmetic on its bits;
- all three load through `mlx_lm.load`; the f32 one continues a prompt with the tokens that `tqc generate --exact` writes
  from the trellis artifact itself; the logits of the others have a KL of at most 1e-3 from it.

The first check is then given one wrong scale and must notice it.

Exit status 0 if every check passed. The last line is `N passed, N failed`.
"""

import json
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import reference
from generate import greedy
from reference import run

CLOSE, TOKENS, MOST = 1e-3, 24, 1e-3
MULTIPLIER = 0xBEA5E527  # of the code `bs12`


def tensors(folder):
    found = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= mx.load(str(file))
    return found


def decoded(stored, path, entry, scales):
    """The weight [N, K] of a trellis along outputs, in float32."""
    k, states = entry["bits"], entry["states"]
    assert (entry["code"], entry["along"], entry["scales"]) == ("bs12", "outputs", "both"), entry
    words = np.array(stored[f"{path}.weight"])  # [N / T, K, T k / 32]
    tile = words.shape[-1] * 32 // k
    bits = ((words[..., None] >> np.arange(32, dtype=np.uint32)) & 1).reshape(*words.shape[:-1], -1)
    # The state of weight t is the bits that begin at (T - 1 - t) k, the lowest first, around the end.
    starts = (tile - 1 - np.arange(tile)) * k
    at = (starts[:, None] + np.arange(states)) % (tile * k)
    state = (bits[..., at].astype(np.uint32) << np.arange(states, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    x = (state.astype(np.uint64) * MULTIPLIER).astype(np.uint32)
    code = sum((x >> shift) & 255 for shift in (0, 8, 16, 24)).astype(np.float32) - np.float32(510)
    code = code.transpose(0, 2, 1).reshape(-1, words.shape[1])  # [N, K]
    inputs, outputs = (np.array(scale).astype(np.float32) for scale in scales)
    return (code * inputs[None, :]) * outputs[:, None]


def as_bf16(values):
    """Bits of the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bytes_of(array):
    return np.frombuffer(reference.raw(array), np.uint8)


def expected(weight, codec):
    """Planes of a weight in a codec, as arrays of bytes."""
    if codec == "f32":
        return {"weight": np.ascontiguousarray(weight).view(np.uint8).reshape(-1)}
    if codec == "bf16":
        return {"weight": as_bf16(weight).view(np.uint8).reshape(-1)}
    group = int(codec.removeprefix("affine-8g"))
    planes = dict(zip(("weight", "scales", "biases"), mx.quantize(mx.array(weight), group_size=group, bits=8)))
    return {
        name: bytes_of(plane if name == "weight" else plane.astype(mx.bfloat16)) for name, plane in planes.items()
    }


def weights_apart(artifact, folder, spoil=False):
    """Complaints about the tensors of a repacked folder."""
    quantization = json.loads((artifact / "config.json").read_text())["quantization"]
    record = json.loads((folder / "repacked.json").read_text())
    before, after, complaints = tensors(artifact), tensors(folder), []
    changed = [module for module in record["modules"] if not module["module"].startswith("mtp/")]
    for number, module in enumerate(changed):
        path = module["module"]
        entry = quantization.get(path, quantization)
        scales = [before[f"{path}.scales"], before[f"{path}.scales2"]]
        if spoil and number == len(changed) - 1:
            scales[0] = mx.concatenate([scales[0][:-1], 2 * scales[0][-1:]])
        weight = decoded(before, path, entry, scales)
        for name, plane in expected(weight, module["became"]).items():
            found = bytes_of(after[f"{path}.{name}"])
            if found.shape != plane.shape or (found != plane).any():
                complaints.append(f"{path}.{name} ({module['became']}) has other bytes")
    if not changed:
        complaints.append("nothing was repacked")
    return complaints


def mean_kl(expected, found):
    log = [x.astype(np.float64) - x.max(-1, keepdims=True) for x in (expected, found)]
    log = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in log]
    return float((np.exp(log[0]) * (log[0] - log[1])).sum(-1).mean())


def check(tqc, name, source, work):
    """Complaints about one model, check by check."""
    artifact = work / "artifact"
    run(tqc, "build", reference.ROOT / "recipes/demo-q3.toml", "--source", source, "-o", artifact)
    folders = {}
    for to in ("f32", "bf16", "affine-8g64"):
        folders[to] = work / to
        run(tqc, "repack", artifact, "-o", folders[to], "--to", to)
        complaints = weights_apart(artifact, folders[to])
        print(f"{'ok  ' if not complaints else 'FAIL'} {name} {to}: bytes")
        yield complaints
    noticed = weights_apart(artifact, folders["f32"], spoil=True)
    yield [] if noticed else ["a wrong scale was not noticed"]

    model, prompt = reference.load_as_user(folders["f32"], source)
    right = reference.logits(model, prompt)
    tokens, margins, _ = greedy(folders["f32"], prompt, TOKENS)
    certain = next((i for i, margin in enumerate(margins) if margin < CLOSE), TOKENS)
    ids = ",".join(map(str, prompt))
    command = [tqc, "generate", artifact, "--prompt-ids", ids, "--ignore-eos", "--max-tokens", TOKENS, "--exact"]
    found = json.loads(run(*command, "--json"))["tokens"]
    same = found[:certain] == tokens[:certain]
    print(f"{'ok  ' if same else 'FAIL'} {name} f32: {certain} of {TOKENS} tokens in mlx-lm")
    yield [] if same else [f"mlx-lm continues with {tokens[:certain]}, the trellis with {found[:certain]}"]
    for to in ("bf16", "affine-8g64"):
        model, _ = reference.load_as_user(folders[to], source)
        kl = mean_kl(right, reference.logits(model, prompt))
        good = 0 < kl < MOST
        print(f"{'ok  ' if good else 'FAIL'} {name} {to}: mean KL {kl:.1e} in mlx-lm")
        yield [] if good else [f"{to}: mean KL {kl:.2e}"]


def main():
    args = reference.arguments(__doc__).parse_args()
    source = reference.ROOT / "goldens/models/demo-qwen3_5"
    with tempfile.TemporaryDirectory() as work:
        return reference.tally(check(args.tqc, "demo-q3", source, Path(work)))


if __name__ == "__main__":
    sys.exit(main())
