"""Writes expected.safetensors: inputs and what mx.quantize makes of them.

    python make.py            # write the file, then check it
    python make.py --check    # only check the file against mlx_ref.py

Writing needs mlx (any backend pinned to the CPU); checking needs numpy alone.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

import mlx_ref as R

OUT = Path(__file__).with_name("expected.safetensors")
K = 256
FP_MODES = ("mxfp4", "mxfp8", "nvfp4")
DTYPES = ("bf16", "f32", "f16")


def rows():
    """(name, values, dtypes it is used for). All finite in each dtype named."""
    rng = np.random.default_rng(20251129)
    every, wide = DTYPES, ("bf16", "f32")
    out = []

    def add(name, x, dts=every):
        out.append((name, np.asarray(x, np.float64).reshape(K), dts))

    for i in range(8):
        add(f"normal_0.02_{i}", rng.standard_normal(K) * 0.02)
    for i in range(3):
        add(f"laplace_{i}", rng.laplace(size=K) * 0.02)
        add(f"student_t2_{i}", rng.standard_t(2, size=K) * 0.02)
        add(f"uniform_{i}", rng.uniform(-1, 1, K))
    add("shifted", rng.standard_normal(K) * 0.01 + 0.05)
    add("all_positive", np.abs(rng.standard_normal(K)) + 5)
    add("all_negative", -np.abs(rng.standard_normal(K)) - 5)
    add("all_positive_narrow", np.abs(rng.standard_normal(K)) * 1e-2 + 1)
    x = rng.standard_normal(K) * 0.02
    x[::37] *= 100
    add("outliers_every_37", x)
    x = rng.standard_normal(K) * 1e-3
    x[::64] = 100
    add("outlier_first_of_64", x)
    add("zeros", np.zeros(K))
    add("negative_zeros", np.full(K, -0.0))
    for v in (1.0, -1.0, 0.1, -0.1, 1e-3, 1e-7, -1e-7, 3e-8):
        add(f"const_{v}", np.full(K, v))
    x = np.zeros(K)
    x[5], x[70], x[200] = 1, -1, 1e-3
    add("three_nonzero", x)
    add("signs", np.where(rng.random(K) < 0.5, -1.0, 1.0))
    add("symmetric_ties", np.tile([-1, 1, 0.5, -0.5], K // 4))
    add("half_grid", rng.integers(-30, 31, K) * 0.5)
    add("quarter_grid_positive", rng.integers(0, 31, K) * 0.25 + 3)
    add("eighth_grid", rng.integers(-48, 49, K) * 0.125)
    add("integers", rng.integers(-8, 8, K))
    add("tiny_1e-5", rng.standard_normal(K) * 1e-5)
    add("tiny_1e-7", rng.standard_normal(K) * 1e-7)
    add("tiny_1e-20", rng.standard_normal(K) * 1e-20, wide)
    add("subnormal_1e-42", rng.standard_normal(K) * 1e-42, ("f32",))
    add("large_1e3", rng.standard_normal(K) * 1e3)
    add("huge_1e20", rng.standard_normal(K) * 1e20, wide)
    add("huge_1e30", rng.standard_normal(K) * 1e30, wide)
    e = rng.integers(-20, 4, (K // 32, 1))
    add("block_scaled", (rng.standard_normal((K // 32, 32)) * 2.0**e))
    b = 6.0 * 2.0 ** rng.integers(-10, 3, (K // 32, 1)).astype(float)
    z = rng.uniform(-0.9, 0.9, (K // 32, 32)) * b
    z[:, 3] = b[:, 0]
    add("amax_exactly_6x2^k", z)
    z = z.copy()
    z[:, 3] = b[:, 0] * (1 + 2.0**-6)
    add("amax_just_over_6x2^k", z)
    z = z.copy()
    z[:, 3] = b[:, 0] * (1 + 2.0**-22)
    add("amax_barely_over_6x2^k", z)
    return out


def build():
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    mxt = {"bf16": mx.bfloat16, "f32": mx.float32, "f16": mx.float16}
    tensors, meta = {}, {}
    for dt in DTYPES:
        sel = [(n, v) for n, v, d in rows() if dt in d]
        meta[f"rows.{dt}"] = json.dumps([n for n, _ in sel])
        w = mx.array(np.stack([v for _, v in sel]).astype(np.float32)).astype(mxt[dt])
        assert bool(mx.all(mx.isfinite(w))), dt
        tensors[f"in.{dt}"] = w
        for bits in R.AFFINE_BITS:
            for gs in R.AFFINE_GROUPS:
                q, s, b = mx.quantize(w, group_size=gs, bits=bits, mode="affine")
                p = f"affine.{dt}.b{bits}.g{gs}"
                tensors[p + ".weight"], tensors[p + ".scales"], tensors[p + ".biases"] = q, s, b
                if gs == 64:
                    tensors[p + ".dequant"] = mx.dequantize(q, s, b, group_size=gs, bits=bits)
        for mode in FP_MODES:
            q, s = mx.quantize(w, mode=mode)
            p = f"{mode}.{dt}"
            tensors[p + ".weight"], tensors[p + ".scales"] = q, s
            tensors[p + ".dequant"] = mx.dequantize(q, s, mode=mode, dtype=mxt[dt])
    meta["mlx_version"] = mx.__version__
    meta["device"] = "cpu"
    mx.eval(list(tensors.values()))
    mx.save_safetensors(str(OUT), tensors, metadata=meta)


def read(path):
    raw = path.read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8 : 8 + n])
    meta = head.pop("__metadata__")
    np_t = {"U32": "<u4", "U8": "u1", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    out = {}
    for k, v in head.items():
        a, b = v["data_offsets"]
        x = np.frombuffer(raw[8 + n + a : 8 + n + b], np_t[v["dtype"]]).reshape(v["shape"])
        if v["dtype"] == "BF16":
            x = R.bf16_bits_to_f32(x)
        elif v["dtype"] == "F16":
            x = x.astype(np.float32)
        out[k] = x
    return out, meta


def same(a, b):
    """Bitwise, so -0 differs from +0."""
    if a.dtype == np.float32:
        return np.array_equal(a.view(np.uint32), np.asarray(b, np.float32).view(np.uint32))
    return np.array_equal(a, b)


def check():
    t, meta = read(OUT)
    n = 0
    for dt in DTYPES:
        w = t[f"in.{dt}"]
        for bits in R.AFFINE_BITS:
            for gs in R.AFFINE_GROUPS:
                p = f"affine.{dt}.b{bits}.g{gs}"
                q, s, b, _ = R.affine_quantize(w, bits, gs, dt)
                assert same(t[p + ".weight"], q) and same(t[p + ".scales"], s) and same(t[p + ".biases"], b), p
                n += 3
                if gs == 64:
                    assert same(t[p + ".dequant"], R.affine_dequantize(q, s, b, bits, gs, dt)), p
                    n += 1
        for mode in FP_MODES:
            p = f"{mode}.{dt}"
            q, s = R.FP_QUANTIZE[mode](w, dt)
            assert same(t[p + ".weight"], q) and same(t[p + ".scales"], s), p
            assert same(t[p + ".dequant"], R.fp_dequantize(q, s, mode, dt)), p
            n += 3
    print(f"{n} tensors match mlx_ref.py bit for bit (made by mlx {meta['mlx_version']}, {OUT.stat().st_size} bytes)")


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        build()
    check()
