#!/usr/bin/env python3
"""Does `tqc import` decode an EXL3 checkpoint to the weights that the format's own rules give?

    exl3.py [--tqc PATH] [--write]

A Llama checkpoint of random rings is made here, every bit pattern being a legal ring, with all codebooks, whole and half
rates, and both ways to store signs. Its weights are worked out in numpy, in float64 and with whole Hadamard matrices,
from ExLlamaV3's kernels; no code is shared with the program. Checked:

- `--to f32`: every weight within 2e-6 of the largest of its module; `f16` and `bf16`: the f32 ones rounded by numpy;
- tensors that are not packed keep their bytes, `config.json` loses `quantization_config` and nothing else;
- `tqc build` takes the imported folder, and refuses the packed one naming `tqc import`.

The first check is then given one wrong sign and must notice it. `--write` makes goldens/exl3 instead: one module of each
kind, and some of its rows.

Exit status 0 if every check passed. The last line is `N passed, N failed`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, INNER, VOCAB, HEADS, LAYERS = 256, 384, 512, 4, 2
# Module of a layer: inputs, outputs, K, codebook.
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN, 2, "mcg"),
    "self_attn.k_proj": (HIDDEN, 128, 3, "mul1"),
    "self_attn.v_proj": (HIDDEN, 128, 4, "3inst"),
    "self_attn.o_proj": (HIDDEN, HIDDEN, 2.5, "mul1"),
    "mlp.gate_proj": (HIDDEN, INNER, 1, "mul1"),
    "mlp.up_proj": (HIDDEN, INNER, 3.5, "mul1"),
    "mlp.down_proj": (INNER, HIDDEN, 8, "mcg"),
}
HEAD = (HIDDEN, VOCAB, 6, "mul1")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "torch_dtype": "float16", "eos_token_id": 2, "bos_token_id": 1,
}


def values(code):
    """What each of the 65536 states is worth, by half-precision arithmetic on bits."""
    state = np.arange(1 << 16, dtype=np.uint64)
    if code == "mul1":
        x = (state * 0x83DCD12D).astype(np.uint32)
        total = sum(x >> np.uint32(shift) & np.uint32(255) for shift in (0, 8, 16, 24)).astype(np.float64)
        step, bias = (float(np.uint16(bits).view(np.float16)) for bits in (0x1EEE, 0xC931))
        # One rounding, from exact float64.
        return ((1024 + total) * step + bias).astype(np.float16)
    x = (state * (0xCBAC1FED if code == "mcg" else 89226354) + (0 if code == "mcg" else 64248484)).astype(np.uint32)
    x = (x & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
    return (x & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16) + (x >> np.uint32(16)).astype(np.uint16).view(np.float16)


def tile(words, rate, table):
    """The 16 x 16 (inputs x outputs) values of one ring of u16 words as they lie in the file."""
    # The second u16 of a pair has the earlier bits.
    pairs = words.view(np.uint16).reshape(-1, 2)[:, ::-1].reshape(-1)
    bits = np.unpackbits(pairs.astype(">u2").view(np.uint8))
    out = np.zeros((16, 16), np.float64)
    for t in range(256):
        end = int((t + 1) * rate)
        window = bits[np.arange(end - 16, end) % len(bits)]
        value = table[int("".join(map(str, window)), 2)]
        lane, at = divmod(t, 8)
        row, column = lane % 4 * 2, lane // 4
        down = [(row, column), (row + 1, column), (row + 8, column), (row + 9, column)]
        row, column = (down + [(r, c + 8) for r, c in down])[at]
        out[row, column] = value
    return out


def hadamard(n):
    h = np.ones((1, 1))
    while len(h) < 128:
        h = np.block([[h, h], [h, -h]])
    return np.kron(np.eye(n // 128), h) / np.sqrt(128.0)


def module(random, inputs, outputs, rate, code, packed):
    """Tensors of a module, and its dense weight [outputs, inputs]."""
    words = random.integers(-(1 << 15), 1 << 15, (inputs // 16, outputs // 16, int(16 * rate)), dtype=np.int16)
    stored = {"trellis": words}
    if packed:
        signs = [random.integers(0, 2, n).astype(bool) for n in (inputs, outputs)]
        for name, sign in zip(("su", "sv"), signs):
            stored[name] = np.packbits(sign.reshape(-1, 16), axis=1, bitorder="little").view(np.int16).reshape(-1)
        scales = [np.where(sign, -1.0, 1.0) for sign in signs]
    else:
        halves = [
            (random.choice([-1.0, 1.0], n) * random.uniform(low, high, n)).astype(np.float16)
            for n, low, high in ((inputs, 0.5, 2.0), (outputs, 0.01, 0.05))
        ]
        stored |= dict(zip(("suh", "svh"), halves))
        scales = [half.astype(np.float64) for half in halves]
    if code != "3inst":
        stored[code] = np.zeros((), np.int32)
    table = values(code).astype(np.float64)
    rows = [np.hstack([tile(words[i, o], rate, table) for o in range(outputs // 16)]) for i in range(inputs // 16)]
    w = hadamard(inputs) @ np.vstack(rows) @ hadamard(outputs)
    return stored, (scales[0][:, None] * w * scales[1][None, :]).T


def checkpoint(folder, modules, config):
    """Writes the folder; its tensors, and what the packed modules are worth."""
    random = np.random.default_rng(5)
    tensors, dense = {}, {}
    for number, (path, kind) in enumerate(modules.items()):
        stored, dense[path] = module(random, *kind, packed=number % 4 == 3)
        tensors |= {f"{path}.{part}": tensor for part, tensor in stored.items()}
    kept = {}
    for name, shape in (("model.embed_tokens", (VOCAB, HIDDEN)), ("model.norm", (HIDDEN,))):
        kept[f"{name}.weight"] = random.standard_normal(shape).astype(np.float16)
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            kept[f"model.layers.{layer}.{name}.weight"] = random.standard_normal(HIDDEN).astype(np.float16)
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        tensors |= kept
    save_file(tensors, folder / "model.safetensors")
    packed = (config or {}) | {"quantization_config": {"quant_method": "exl3", "version": "1.4.1", "bits": 3.0, "head_bits": 6}}
    (folder / "config.json").write_text(json.dumps(packed, indent=1))
    return kept, dense


def write():
    folder = ROOT / "goldens/exl3"
    kinds = {
        f"{code}-{rate}": (128, 128 * (1 + number % 2), rate, code)
        for number, (rate, code) in enumerate(
            [(2, "3inst"), (3, "mcg"), (4, "mul1"), (1, "mcg"), (2.5, "mul1"), (6, "3inst"), (1.5, "mul1"), (5, "mul1")]
        )
    }
    _, dense = checkpoint(folder, kinds, None)
    rows = {path: {str(row): np.float32(w[row]).tolist() for row in (3, 100)} for path, w in dense.items()}
    (folder / "rows.json").write_text(json.dumps(rows) + "\n")


def as_bf16(value):
    bits = value.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def off(found, expected):
    return float(np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max())


def raw(path):
    """Tensors as bytes with their types, which numpy has no bf16 for."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8:8 + size])
    begin = 8 + size
    return {
        name: (entry["dtype"], data[begin + entry["data_offsets"][0]:begin + entry["data_offsets"][1]])
        for name, entry in head.items() if name != "__metadata__"
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tqc", type=Path, default=ROOT / "target/release/tqc")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.write:
        return write()
    passed = failed = 0

    def check(what, good):
        nonlocal passed, failed
        print(f"{'ok  ' if good else 'FAIL'} {what}")
        passed, failed = passed + bool(good), failed + (not good)

    modules = {f"model.layers.{layer}.{name}": kind for layer in range(LAYERS) for name, kind in LAYER.items()}
    modules["lm_head"] = HEAD
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        kept, dense = checkpoint(folder / "exl3", modules, CONFIG)
        for kind in ("f32", "f16", "bf16"):
            subprocess.run([args.tqc, "import", folder / "exl3", "-o", folder / kind, "--to", kind], check=True, capture_output=True)
        single = load_file(folder / "f32/model.safetensors")
        worst = max(off(single[f"{path}.weight"], w) for path, w in dense.items())
        check(f"f32 weights of {len(dense)} modules: at most {worst:.1e} of the largest", worst < 2e-6)
        wrong = dense["lm_head"].copy()
        wrong[:, 9] *= -1
        check("a wrong sign is noticed", off(single["lm_head.weight"], wrong) > 2e-6)
        for kind, rounded in (("f16", lambda w: w.astype(np.float16)), ("bf16", as_bf16)):
            found = raw(folder / kind / "model.safetensors")
            same = all(found[f"{path}.weight"] == (kind.upper(), rounded(single[f"{path}.weight"]).tobytes()) for path in dense)
            check(f"{kind} weights are the f32 ones, rounded", same)
            check(f"{kind}: other tensors are kept", all(found[name] == ("F16", w.tobytes()) for name, w in kept.items()))
            check(f"{kind}: and nothing else is there", len(found) == len(kept) + len(dense))
        check("the config", json.loads((folder / "f16/config.json").read_text()) == CONFIG)
        recipe = folder / "recipe.toml"
        recipe.write_text('name = "again"\n[default]\ncodec = { affine = { bits = 4, group = 64 } }\n')
        build = lambda source: subprocess.run(
            [args.tqc, "build", recipe, "--source", folder / source, "-o", folder / f"built-{source}"], capture_output=True, text=True
        )
        check("a build of the imported folder", build("f16").returncode == 0)
        refused = build("exl3")
        check("a build of the packed one is refused", refused.returncode == 3 and "tqc import" in refused.stderr)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
