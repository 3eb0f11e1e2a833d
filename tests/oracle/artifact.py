"""Rules for the files of an artifact (docs/formats/), checked without tqc and without mlx-lm.

Each check returns a list of complaints; an empty list means that the rule holds.
"""

import hashlib
import json
import re
import struct

import numpy as np

ITEM = {"F64": 8, "F32": 4, "U32": 4, "I32": 4, "F16": 2, "BF16": 2, "U16": 2, "U8": 1, "I8": 1}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
# In Hugging Face layout these hold the gain minus one.
ZERO_CENTRED = (
    ".input_layernorm.weight", ".post_attention_layernorm.weight", ".q_norm.weight", ".k_norm.weight",
    "model.norm.weight", "language_model.norm.weight", "mtp.norm.weight",
    ".pre_fc_norm_embedding.weight", ".pre_fc_norm_hidden.weight",
)  # fmt: skip


class Tensors:
    """Headers and bytes of all tensors in some safetensors files."""

    def __init__(self, files):
        self.entries, self.metadata, self.duplicates = {}, {}, []
        for path in files:
            with open(path, "rb") as f:
                (length,) = struct.unpack("<Q", f.read(8))
                header = json.loads(f.read(length))
            self.metadata[path.name] = header.pop("__metadata__", {})
            for name, entry in header.items():
                if name in self.entries:
                    self.duplicates.append(name)
                self.entries[name] = (path, 8 + length, entry)

    def names(self):
        return self.entries.keys()

    def dtype(self, name):
        return self.entries[name][2]["dtype"]

    def shape(self, name):
        return tuple(self.entries[name][2]["shape"])

    def file(self, name):
        return self.entries[name][0].name

    def size(self, name):
        start, end = self.entries[name][2]["data_offsets"]
        return end - start

    def read(self, name):
        path, base, entry = self.entries[name]
        with open(path, "rb") as f:
            f.seek(base + entry["data_offsets"][0])
            return f.read(self.size(name))


def weights(folder):
    return Tensors(sorted(folder.glob("model*.safetensors")))


def headers(folder):
    """`format: mlx`, payload sizes that follow from dtype and shape, no name twice."""
    tensors = weights(folder)
    bad = [f"{file}: metadata {meta}" for file, meta in tensors.metadata.items() if meta.get("format") != "mlx"]
    bad += [f"{name}: stored twice" for name in tensors.duplicates]
    for name in tensors.names():
        needed = ITEM[tensors.dtype(name)] * int(np.prod(tensors.shape(name), dtype=np.int64))
        if tensors.size(name) != needed:
            bad.append(f"{name}: {tensors.size(name)} bytes, needs {needed}")
    return bad


def file_names(folder):
    """One model.safetensors, or a whole set of numbered shards; nothing else that mlx-lm would load."""
    found = sorted(path.name for path in folder.glob("model*.safetensors"))
    if found == ["model.safetensors"]:
        return []
    wanted = [f"model-{i + 1:05}-of-{len(found):05}.safetensors" for i in range(len(found))]
    bad = [] if found == wanted and found else [f"weight files are {found}"]
    return bad + [f"{path.name}: left over" for path in folder.glob("*.building")]


def index(folder):
    """model.safetensors.index.json names exactly the tensors that are there, where they are."""
    tensors, path = weights(folder), folder / "model.safetensors.index.json"
    if not path.exists():
        return ["no model.safetensors.index.json"]
    stored = json.loads(path.read_text())
    bad = []
    if stored["weight_map"] != {name: tensors.file(name) for name in tensors.names()}:
        bad.append("weight_map differs from the files")
    if list(stored["weight_map"]) != sorted(stored["weight_map"]):
        bad.append("weight_map is not sorted")
    total = sum(tensors.size(name) for name in tensors.names())
    if stored["metadata"]["total_size"] != total:
        bad.append(f"total_size is {stored['metadata']['total_size']}, the tensors have {total} bytes")
    return bad


def draft_names(folder):
    """No draft-head tensor in the main files."""
    return [f"{name}: belongs into mtp/" for name in weights(folder).names() if "mtp." in name]


def config(folder):
    """Both quantization objects, entries with exactly three keys, and the keys that mlx-lm defaults wrongly."""
    stored = json.loads((folder / "config.json").read_text())
    quantization = stored.get("quantization")
    if not quantization:
        return ["config.json has no quantization"]
    bad = [] if stored.get("quantization_config") == quantization else ["quantization_config differs"]
    for path, entry in quantization.items():
        if isinstance(entry, dict) and set(entry) != {"group_size", "bits", "mode"}:
            bad.append(f"quantization entry {path} has keys {sorted(entry)}")
    if not {"group_size", "bits", "mode"} <= set(quantization):
        bad.append("quantization lacks group_size, bits or mode at its top")
    text = stored.get("text_config", stored)
    if "tie_word_embeddings" not in text or "tie_word_embeddings" not in stored:
        bad.append("tie_word_embeddings is not explicit")
    kind = stored["model_type"]
    if kind.endswith("_text"):
        bad.append(f"model_type {kind} is not known to mlx-lm")
    if not kind.startswith("qwen3_5"):
        bad += [f"{key} is not explicit" for key in ("rope_theta", "rope_scaling") if key not in stored]
    return bad


def settings(folder, setting, paths):
    """Each module of `paths` has the codec that the recipe gives it, in config.json and in the tensors."""
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    top = {key: quantization[key] for key in ("group_size", "bits", "mode")}
    tensors, bad = weights(folder), []
    for path in paths:
        wanted = setting.expected(path).entry()
        if quantization.get(path, top) != wanted:
            bad.append(f"{path}: {quantization.get(path, top)}, the recipe says {wanted}")
        if f"{path}.scales" not in tensors.names():
            bad.append(f"{path}: not quantized")
    return bad


def tokenizer(folder, source):
    """Tokenizer, template and generation config are the source's, byte for byte."""
    bad = []
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            copy = folder / name
            if not copy.exists():
                bad.append(f"{name}: missing")
            elif copy.read_bytes() != (source / name).read_bytes():
                bad.append(f"{name}: differs from the source's")
    return bad


def provenance(folder, source):
    """provenance.json accounts for every source tensor, every stored tensor and every file, with its digest."""
    path = folder / "provenance.json"
    if not path.exists():
        return ["no provenance.json"]
    record = json.loads(path.read_text())
    theirs = Tensors(sorted(source.glob("*.safetensors")))
    bad = digests("source tensor", record["source"]["tensors"], theirs)
    main, side = weights(folder), weights(folder / "mtp")
    outputs = {where: [] for where in ("", "mtp/")}
    for entry in record["outputs"]:
        outputs["mtp/" if entry["file"].startswith("mtp/") else ""].append(entry)
    bad += digests("stored tensor", outputs[""], main)
    bad += digests("stored tensor of mtp/", outputs["mtp/"], side)

    for entry in record["source"]["tensors"]:
        if entry.get("fate") not in ("quantized", "kept", "cast", "moved", "dropped"):
            bad.append(f"{entry['name']}: its fate is {entry.get('fate')}")
        elif (entry["fate"] == "dropped") == bool(entry["outputs"]):
            bad.append(f"{entry['name']}: {entry['fate']}, with {len(entry['outputs'])} outputs")
        elif not entry.get("reason"):
            bad.append(f"{entry['name']}: {entry['fate']} without a reason")

    # The record cannot name its own digest, and machine.json tells of the machine.
    there = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    there -= {"provenance.json", "machine.json"}
    if set(record["files"]) != there:
        bad.append(f"files: {sorted(set(record['files']) ^ there)} are either not there or not listed")
    for name in sorted(there & set(record["files"])):
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != record["files"][name]:
            bad.append(f"{name}: SHA-256 differs from the record's")
    return bad


def digests(what, listed, tensors):
    """Complaints unless `listed` names each of `tensors` once, with its SHA-256."""
    names = [entry["name"] for entry in listed]
    bad = [f"{what} {name}: not accounted for" for name in sorted(tensors.names() - set(names))]
    bad += [f"{what} {name}: does not exist" for name in sorted(set(names) - tensors.names())]
    bad += [f"{what} {name}: listed twice" for name in sorted(set(names)) if names.count(name) > 1]
    for entry in listed:
        if entry["name"] in tensors.names():
            found = hashlib.sha256(tensors.read(entry["name"])).hexdigest()
            if found != entry["sha256"]:
                bad.append(f"{what} {entry['name']}: SHA-256 differs from the record's")
    return bad


def card(folder):
    """README.md is a model card: front matter with what the hub reads."""
    path = folder / "README.md"
    match = path.exists() and re.match(r"---\n(.*?)\n---\n", path.read_text(), re.DOTALL)
    if not match:
        return ["README.md has no front matter"]
    return [f"README.md: no `{key}`" for key in ("library_name: mlx",) if key not in match[1]]


def vision(folder, source):
    """The vision tower's tensors are passed through: same bytes, patch embedding with channels last."""
    ours, theirs = weights(folder), Tensors(sorted(source.glob("*.safetensors")))
    bad, wanted = [], set()
    for name in theirs.names():
        if not name.startswith("model.visual."):
            continue
        target = name.replace("model.visual.", "vision_tower.", 1)
        wanted.add(target)
        data, shape = theirs.read(name), theirs.shape(name)
        if len(shape) == 5:
            item = {2: np.uint16, 4: np.uint32}[ITEM[theirs.dtype(name)]]
            moved = np.moveaxis(np.frombuffer(data, item).reshape(shape), 1, 4)
            data, shape = np.ascontiguousarray(moved).tobytes(), moved.shape
        if target not in ours.names():
            bad.append(f"{target}: missing")
        elif (ours.dtype(target), ours.shape(target)) != (theirs.dtype(name), shape):
            bad.append(f"{target}: {ours.dtype(target)} {ours.shape(target)}, source {theirs.dtype(name)} {shape}")
        elif ours.read(target) != data:
            bad.append(f"{target}: bytes differ from the source's")
    extra = [name for name in ours.names() if name.startswith("vision_tower.") and name not in wanted]
    return bad + [f"{name}: not in the source" for name in extra]


def draft_head(folder, source):
    """mtp/ holds the draft head without the `mtp.` prefix, its zero-centred norms as gains."""
    theirs = Tensors(sorted(source.glob("*.safetensors")))
    names = [name for name in theirs.names() if name.startswith("mtp.")]
    side = folder / "mtp"
    if not names:
        return [] if not side.exists() else ["mtp/ without a draft head in the source"]
    if not (side / "config.json").exists():
        return ["no mtp/config.json"]
    stored = json.loads((side / "config.json").read_text())
    bad = []
    if stored.get("model_type") != "qwen3_5_mtp":
        bad.append(f"mtp/config.json: model_type is {stored.get('model_type')}")
    if stored.get("block_size") != 3:
        bad.append(f"mtp/config.json: block_size is {stored.get('block_size')}, depth 1 needs 3")
    if "text_config" not in stored or "tie_word_embeddings" not in stored:
        bad.append("mtp/config.json: no text_config or tie_word_embeddings")
    ours = weights(side)
    for name in names:
        short = name.removeprefix("mtp.")
        if short not in ours.names():
            bad.append(f"mtp/{short}: missing")
        elif ours.dtype(short) == "U32":
            # A quantized matrix: its scales must be there; `tqc verify --rebuild` re-encodes it.
            if short.removesuffix("weight") + "scales" not in ours.names():
                bad.append(f"mtp/{short}: quantized without scales")
        else:
            gain = len(theirs.shape(name)) == 1 and any(name.endswith(end) for end in ZERO_CENTRED)
            found, wanted = floats(ours, short), floats(theirs, name) + np.float32(gain)
            if gain and ours.dtype(short) == "BF16":
                wanted = to_bf16(wanted)
            if found.shape != wanted.shape or not np.array_equal(found, wanted):
                bad.append(f"mtp/{short}: values differ from the source's{' plus one' * gain}")
    known = {name.removeprefix("mtp.") for name in names}
    for name in ours.names():
        base = name.removesuffix("scales").removesuffix("biases") + "weight"
        if name not in known and base not in known:
            bad.append(f"mtp/{name}: not in the source")
    return bad


def floats(tensors, name):
    data, dtype = tensors.read(name), tensors.dtype(name)
    if dtype == "BF16":
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float32)
    return values.reshape(tensors.shape(name))


def to_bf16(values):
    """float32 rounded to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
