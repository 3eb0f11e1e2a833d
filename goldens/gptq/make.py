"""Writes expected.safetensors: weights, second moments, and what textbook GPTQ makes of them.

    python make.py            # needs numpy alone

GPTQ as published (arXiv 2210.17323, algorithm 1): U = chol(inv(H + damping I)) upper triangular, columns in order,
each column's error divided by U[k, k] and taken out of all later columns along U[k, k:], all in float64. A group's
parameters are MLX's, in float32, from the updated weights when the group starts; codes come from the parameters
before they are rounded to bf16, errors from those after.

`defective` is the same with the mistake of one published implementation: inside a group, whose end is column j,
the update of column k covers k : k + j instead of k : j.
"""

import json
import struct
from pathlib import Path

import numpy as np

F = np.float32
N, K, T, GROUP = 48, 256, 512, 64
SHARE = 0.01  # damping: this share of the mean diagonal


def bf16(x):
    """Round float32 to bf16, ties to even, and widen again. Finite input only."""
    u = np.ascontiguousarray(x, F).view(np.uint32)
    return ((u + ((u >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)) & np.uint32(0xFFFF0000)).view(F)


def parameters(w, bits):
    """MLX's scale and bias of rows w [N, group], float32, before they are rounded."""
    low, high = w.min(1), w.max(1)
    step = np.maximum((high - low) / F((1 << bits) - 1), F(1e-7))
    on_low = np.abs(low) > np.abs(high)
    step = np.where(on_low, step, -step)
    edge = np.where(on_low, low, high)
    q0 = np.rint(edge / step)
    safe = np.where(q0 == 0, F(1), q0)
    return np.where(q0 == 0, step, edge / safe).astype(F), np.where(q0 == 0, F(0), edge).astype(F)


def gptq(w, h, bits, feedback=True, defective=False):
    """codes [N, K], stored scales and biases [N, K / GROUP], decoded [N, K]"""
    damped = h + SHARE * np.mean(np.diag(h)) * np.eye(K)
    u = np.linalg.cholesky(np.linalg.inv(damped)).T
    rest = w.astype(np.float64)
    codes = np.zeros((N, K), np.uint8)
    decoded = np.zeros((N, K))
    scales, biases = np.zeros((N, K // GROUP), F), np.zeros((N, K // GROUP), F)
    for start in range(0, K, GROUP):
        end = start + GROUP
        s, b = parameters(rest[:, start:end].astype(F), bits)
        s16, b16 = bf16(s), bf16(b)
        scales[:, start // GROUP], biases[:, start // GROUP] = s16, b16
        errors = np.zeros((N, GROUP))
        for k in range(start, end):
            q = np.clip(np.rint((rest[:, k].astype(F) - b) / s), 0, (1 << bits) - 1)
            codes[:, k] = q
            decoded[:, k] = (q.astype(F) * s16 + b16).astype(np.float64)
            if not feedback:
                continue
            error = (rest[:, k] - decoded[:, k]) / u[k, k]
            errors[:, k - start] = error
            last = min(K, k + end) if defective else end
            rest[:, k:last] -= np.outer(error, u[k, k:last])
        if feedback:
            rest[:, end:] -= errors @ u[start:end, end:]
    return codes, scales, biases, decoded


def loss(w, decoded, h):
    e = w.astype(np.float64) - decoded
    return float(np.einsum("nk,kl,nl->", e, h, e))


def main():
    rng = np.random.default_rng(20261130)
    # Activations with neighbours alike, a few directions that many tokens share, and columns of unlike size.
    x = rng.standard_normal((T, K))
    for k in range(1, K):
        x[:, k] = 0.5 * x[:, k - 1] + 0.85 * x[:, k]
    x += 0.7 * rng.standard_normal((T, 6)) @ rng.standard_normal((6, K)) / np.sqrt(6)
    x *= np.exp(0.5 * rng.standard_normal(K))
    h32 = (x.T @ x / T).astype(F)
    h = h32.astype(np.float64)
    w = bf16((0.02 * rng.standard_normal((N, K))).astype(F))
    tensors, losses = {"w": w, "h": h32}, {}
    for bits in (2, 3, 4):
        codes, scales, biases, decoded = gptq(w, h, bits)
        tensors |= {f"b{bits}.codes": codes, f"b{bits}.scales": scales, f"b{bits}.biases": biases}
        nearest = loss(w, gptq(w, h, bits, feedback=False)[3], h)
        wrong = loss(w, gptq(w, h, bits, defective=True)[3], h)
        losses[f"b{bits}"] = {"gptq": loss(w, decoded, h), "nearest": nearest, "defective": wrong}
        print(bits, losses[f"b{bits}"], "of nearest:", loss(w, decoded, h) / nearest, "defective:", wrong / nearest)
    meta = {"losses": json.dumps(losses), "group": str(GROUP), "damping": str(SHARE)}
    head, at, body = {"__metadata__": meta}, 0, b""
    for name, value in sorted(tensors.items()):
        raw = np.ascontiguousarray(value).tobytes()
        dtype = {"float32": "F32", "uint8": "U8"}[str(value.dtype)]
        head[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [at, at + len(raw)]}
        at, body = at + len(raw), body + raw
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    Path(__file__).with_name("expected.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)


main()
