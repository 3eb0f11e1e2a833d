"""Logits of the fixtures under config values that the published fixtures do not have.

Each variant is a folder of tests/fixtures with some keys of config.json changed (null takes a key out) and, for biases,
tensors added. transformers runs it in f32; the last 40 of 80 rows of logits are kept, so that windows and whole pages
of a cache lie behind every one of them.

    python make.py            # writes variants.json and <variant>.safetensors
    python make.py --check    # compares with what is there
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parents[2] / "tests" / "fixtures"
TOKENS, ROWS = 80, 40

VARIANTS = {
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mistral-window-of-a-page": ("mistral", {"sliding_window": 64}),
    "qwen2-upper-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3-upper-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "llama-linear-rope": ("llama-tied", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-rope-parameters": (
        "llama-untied",
        {
            "rope_theta": None,
            "rope_scaling": None,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 40000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-biases": ("llama-tied", {"attention_bias": True, "mlp_bias": True}),
    "moe-one-expert": ("qwen3_5_moe", {"text_config.num_experts_per_tok": 1}),
    "moe-all-experts": ("qwen3_5_moe", {"text_config.num_experts_per_tok": 4}),
    "qwen3_5-default-rotary-part": (
        "qwen3_5-tied",
        {
            "text_config.partial_rotary_factor": None,
            "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
        },
    ),
}


def put(config, path, value):
    *sections, key = path.split(".")
    for section in sections:
        config = config[section]
    if value is None:
        config.pop(key, None)
    else:
        config[key] = value


def biases(config):
    """Of every linear layer of a llama, from a generator of its own."""
    generator = torch.Generator().manual_seed(5)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    q, kv = heads * dim, config["num_key_value_heads"] * dim
    widths = {
        "self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv, "self_attn.o_proj": hidden,
        "mlp.gate_proj": inner, "mlp.up_proj": inner, "mlp.down_proj": hidden,
    }
    return {
        f"model.layers.{i}.{name}.bias": torch.randn(width, generator=generator) * 0.5
        for i in range(config["num_hidden_layers"])
        for name, width in widths.items()
    }


@torch.no_grad()
def variant(fixture, changes):
    source = FIXTURES / fixture
    config = json.loads((source / "config.json").read_text())
    for path, value in changes.items():
        put(config, path, value)
    added = biases(config) if config.get("mlp_bias") else {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        tensors = {}
        for file in sorted(source.glob("*.safetensors")):
            tensors |= load_file(file)
        save_file({**tensors, **added}, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        shutil.copy(source / "generation_config.json", folder)
        kind = getattr(transformers, config["architectures"][0])
        model, info = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert all("visual" in key for key in info["missing_keys"]), info
        assert all(key.startswith("mtp.") for key in info["unexpected_keys"]), info
    reference = load_file(HERE.parent / "fixtures" / fixture / "reference.safetensors")
    ids = torch.cat([reference["input_ids.a"], reference["input_ids.b"]])[:TOKENS]
    logits = model.eval()(ids[None]).logits[0, -ROWS:].float()
    return {"input_ids": ids, "logits_f32": logits.contiguous(), **added}


def main():
    torch.set_num_threads(1)
    check = "--check" in sys.argv
    listed = {name: {"fixture": fixture, "config": changes} for name, (fixture, changes) in VARIANTS.items()}
    if not check:
        (HERE / "variants.json").write_text(json.dumps(listed, indent=1) + "\n")
    for name, (fixture, changes) in VARIANTS.items():
        found, path = variant(fixture, changes), HERE / f"{name}.safetensors"
        plain = variant(fixture, {})["logits_f32"]
        apart = (found["logits_f32"] - plain).abs().max().item()
        assert apart > 0.05 or name == "qwen3_5-default-rotary-part", (name, apart)
        if check:
            kept = load_file(path)
            worst = max((found[key].double() - kept[key].double()).abs().max().item() for key in kept)
            print(f"{name}: {worst:.1e} from the file, {apart:.2f} from the unchanged fixture")
            assert worst < 1e-4
        else:
            save_file(found, path)
            print(f"{name}: {apart:.2f} from the unchanged fixture")


if __name__ == "__main__":
    main()
