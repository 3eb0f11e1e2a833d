"""Checks of the checks: an artifact that mlx-lm itself made passes, and each kind of damage is noticed.

The stand-in follows docs/formats/ (mtp/ folder, vision tower, provenance), so that a wrong check shows up
before there is anything to blame on tqc.
"""

import hashlib
import json
import shutil
import struct
import tempfile
from pathlib import Path

import mlx.core as mx
import reference
import settings
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

import artifact

ROOT = Path(__file__).resolve().parents[2]
SETTING = settings.Setting("self-test", settings.affine(4, 32), (("*.mlp.*_proj", settings.affine(3, 32)),))


def stand_in(source, prepared, out, setting=SETTING):
    """An artifact of `source`, made by mlx-lm and completed by hand."""
    model, config = load_model(prepared, lazy=True)
    groups = [setting.expected(path).group for path in reference.widths(prepared)]
    with reference.quiet():
        model, config = quantize_model(
            model,
            config,
            group_size=min(groups),
            bits=setting.default.bits,
            mode=setting.default.mode,
            quant_predicate=lambda path, _: setting.expected(path).entry(),
        )
    save_model(out, model)
    config.setdefault("rope_scaling", None)
    config.setdefault("tie_word_embeddings", False)
    save_config(config, out / "config.json", keep_vision_config=True)

    tensors = {}
    for file in source.glob("*.safetensors"):
        tensors |= mx.load(str(file))
    tower = {
        name.replace("model.visual", "vision_tower"): value if value.ndim < 5 else mx.moveaxis(value, 1, 4)
        for name, value in tensors.items()
        if name.startswith("model.visual")
    }
    main = dict(tree_flatten(model.parameters())) | tower
    mx.save_safetensors(str(out / "model.safetensors"), main, metadata={"format": "mlx"})
    total = sum(value.nbytes for value in main.values())
    write(out / "model.safetensors.index.json", {
        "metadata": {"total_size": total}, "weight_map": {name: "model.safetensors" for name in sorted(main)},
    })  # fmt: skip
    draft = {
        name.removeprefix("mtp."): value + 1.0 if name.endswith(artifact.ZERO_CENTRED) else value
        for name, value in tensors.items()
        if name.startswith("mtp.")
    }
    if draft:
        (out / "mtp").mkdir()
        mx.save_safetensors(str(out / "mtp/model.safetensors"), draft, metadata={"format": "mlx"})
        write(out / "mtp/config.json", {
            "model_type": "qwen3_5_mtp", "block_size": 3, "tie_word_embeddings": False,
            "text_config": config["text_config"],
        })  # fmt: skip
    (out / "README.md").write_text("---\nlibrary_name: mlx\n---\n")
    for name in artifact.TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, out / name)
    write(out / "provenance.json", record(source, out))


def record(source, out):
    """The parts of provenance.json that the checks read."""

    def tensor(stored, name, **more):
        return {"name": name, "sha256": hashlib.sha256(stored.read(name)).hexdigest()} | more

    given = artifact.Tensors(sorted(source.glob("*.safetensors")))
    fate = {"fate": "kept", "reason": "stand-in", "outputs": ["itself"]}
    outputs = []
    for folder in (out, out / "mtp"):
        stored = artifact.weights(folder)
        files = {name: str((folder / stored.file(name)).relative_to(out)) for name in stored.names()}
        outputs += [tensor(stored, name, file=file) for name, file in files.items()]
    files = {
        str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in out.rglob("*")
        if file.is_file()
    }
    return {
        "source": {"tensors": [tensor(given, name, **fate) for name in given.names()]},
        "outputs": outputs,
        "files": files,
    }


def write(path, value):
    path.write_text(json.dumps(value))


def edit(name, change):
    """Damage: `change` edits a JSON file of the artifact in place."""

    def damage(folder):
        value = json.loads((folder / name).read_text())
        change(value)
        write(folder / name, value)

    return damage


def rewrite(name, change):
    """Damage: `change(header, tensors)` edits a safetensors file (dtype, shape and bytes by name)."""

    def damage(folder):
        path = folder / name
        stored = artifact.Tensors([path])
        metadata = stored.metadata[path.name]
        tensors = {key: [stored.dtype(key), stored.shape(key), stored.read(key)] for key in stored.names()}
        change(metadata, tensors)
        header, at = {"__metadata__": metadata}, 0
        for key, (dtype, shape, data) in tensors.items():
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))

    return damage


def flip(key):
    """Damage to one bit in the middle of a tensor."""

    def change(_, tensors):
        data = bytearray(tensors[key][2])
        data[len(data) // 2] ^= 1
        tensors[key][2] = bytes(data)

    return change


HYBRID, WEIGHTS = "language_model.model.layers.0", "model.safetensors"
# (what is done, to which fixture, the damage, the check that must notice)
DAMAGE = (
    ("one code flipped", "qwen3_5", rewrite(WEIGHTS, flip(f"{HYBRID}.mlp.up_proj.weight")), "tensors"),
    ("one scale flipped", "llama-untied", rewrite(WEIGHTS, flip("lm_head.scales")), "tensors"),
    ("one norm flipped", "qwen3_5", rewrite(WEIGHTS, flip(f"{HYBRID}.input_layernorm.weight")), "tensors"),
    ("one code flipped", "llama-untied", rewrite(WEIGHTS, flip("model.layers.0.mlp.down_proj.weight")), "logits"),
    ("rope base", "llama-untied", edit("config.json", lambda c: c.update(rope_theta=1e4)), "logits"),
    ("rope scaling", "llama-untied", edit("config.json", lambda c: c.update(rope_scaling=None)), "logits"),
    ("head dropped by a tie", "llama-untied", edit("config.json", lambda c: c.pop("tie_word_embeddings")), "config"),
    ("head dropped by a tie", "llama-untied", edit("config.json", lambda c: c.update(tie_word_embeddings=True)), "load"),
    ("unequal copies", "qwen3_5", edit("config.json", lambda c: c["quantization_config"].update(bits=8)), "config"),
    ("key in an entry", "qwen3_5", edit("config.json", lambda c: c["quantization"][f"{HYBRID}.mlp.up_proj"].update(note=1)), "load"),
    ("text model type", "qwen3_5", edit("config.json", lambda c: c.update(model_type="qwen3_5_text")), "config"),
    ("draft head left in", "qwen3_5", rewrite(WEIGHTS, lambda m, t: t.update({"mtp.norm.weight": ["BF16", (2,), b"1234"]})), "draft"),
    ("tensor not in the index", "qwen3_5", rewrite(WEIGHTS, lambda m, t: t.pop("vision_tower.merger.norm.bias")), "index"),
    ("tower tensor lost", "qwen3_5", rewrite(WEIGHTS, lambda m, t: t.pop("vision_tower.merger.norm.bias")), "vision"),
    ("tower changed", "qwen3_5", rewrite(WEIGHTS, flip("vision_tower.patch_embed.proj.weight")), "vision"),
    ("format of the header", "qwen3_5", rewrite(WEIGHTS, lambda m, t: m.update(format="pt")), "headers"),
    ("total size", "qwen3_5", edit("model.safetensors.index.json", lambda i: i["metadata"].update(total_size=1)), "index"),
    ("stale shard", "qwen3_5", lambda f: shutil.copy(f / WEIGHTS, f / "model-00001-of-00002.safetensors"), "files"),
    ("raw norm in the draft head", "qwen3_5", rewrite("mtp/model.safetensors", flip("pre_fc_norm_hidden.weight")), "mtp"),
    ("draft head lost", "qwen3_5-tied", lambda f: shutil.rmtree(f / "mtp"), "mtp"),
    ("tensor not accounted for", "qwen3_5", edit("provenance.json", lambda p: p["source"]["tensors"].pop()), "provenance"),
    ("tensor without a fate", "qwen3_5", edit("provenance.json", lambda p: p["source"]["tensors"][0].update(fate="")), "provenance"),
    ("dropped with an output", "qwen3_5", edit("provenance.json", lambda p: p["source"]["tensors"][0].update(fate="dropped")), "provenance"),
    ("stored tensor not listed", "qwen3_5", edit("provenance.json", lambda p: p["outputs"].pop()), "provenance"),
    ("file not listed", "qwen3_5", edit("provenance.json", lambda p: p["files"].pop("config.json")), "provenance"),
    ("digest of a file", "qwen3_5", lambda f: (f / "config.json").write_text((f / "config.json").read_text() + " "), "provenance"),
    ("generation config", "qwen3_5", edit("generation_config.json", lambda g: g.update(eos_token_id=1)), "tokenizer"),
    ("card lost", "qwen3_5", lambda f: (f / "README.md").unlink(), "card"),
)  # fmt: skip


def rows(show, check):
    """Report rows: each fixture's stand-in passes all checks, then each damage fails the named one."""
    report = []
    with tempfile.TemporaryDirectory(prefix="tqc-oracle-") as place:
        for name in ("llama-untied", "qwen3_5", "qwen3_5-tied", "qwen3_5_moe", "demo-qwen3_5"):
            source = ROOT / ("goldens/models" if name.startswith("demo") else "tests/fixtures") / name
            work = Path(place) / name
            prepared = reference.prepare(source, work / "prepared")
            work.mkdir(exist_ok=True)
            paths = list(reference.widths(prepared))
            stand_in(source, prepared, work / "artifact")
            results, notes = check(work / "artifact", source, prepared, SETTING, paths, work, True)
            report.append(show(name, "stand-in", results, notes, 0))

            for what, model, damage, witness in DAMAGE:
                if model != name:
                    continue
                broken = work / "broken"
                shutil.copytree(work / "artifact", broken)
                damage(broken)
                results, _ = check(broken, source, prepared, SETTING, paths, work, False)
                missed = [] if results.get(witness) else [f"`{witness}` did not notice"]
                report.append(show(name, what, {f"{witness} notices": missed}, [], 0))
                shutil.rmtree(broken)
            other = settings.Setting("other", settings.affine(4, 32))
            missed = [] if artifact.settings(work / "artifact", other, paths) else ["`settings` did not notice"]
            report.append(show(name, "another recipe", {"settings notices": missed}, [], 0))
    return report
