"""What the comparisons share: their options, running tqc, and mlx-lm's side, which loads, converts and runs a model."""

import argparse
import contextlib
import io
import json
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import convert, load
from mlx_lm.utils import load_model, load_tokenizer, quantize_model

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The quick brown fox said: 'def f(x): return x + 1'. Then 12 more, café and naïve, jumped over it."


def arguments(doc):
    """A parser with the options that comparisons have in common."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tqc", type=Path, default=ROOT / "target/release/tqc")
    parser.add_argument("--models", type=Path, default=ROOT / "target/oracle/models")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--only")
    return parser


def models(args, demo, others):
    """name -> (folder, `demo` or, of the models that are not in the repository, `others`); says what it leaves out."""
    found = {"demo-qwen3_5": (ROOT / "goldens/models/demo-qwen3_5", demo)}
    for name in ("lab-qwen3_5", "smollm2-135m"):
        places = [args.models / name, args.shared / "models" / name]
        source = next((place for place in places if (place / "config.json").exists()), None)
        if source:
            found[name] = (source, others)
        else:
            print(f"SKIP {name}: not in {args.models} nor {args.shared / 'models'}")
    return {name: entry for name, entry in found.items() if args.only in (None, name)}


def run(*command):
    """What the program writes to stdout; its complaint if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command[:3]))} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def tally(results):
    """Prints the complaints of each check as it ends, and the counts; the exit status."""
    passed = failed = 0
    for complaints in results:
        for line in complaints:
            print(f"     {line}")
        passed, failed = passed + (not complaints), failed + bool(complaints)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


def widened(source, work):
    """A copy of a qwen3_5 checkpoint in float32: mlx-lm adds 1 to zero-centred gains in the stored dtype."""
    config = json.loads((source / "config.json").read_text())
    if not config["model_type"].startswith("qwen3_5"):
        return source
    work.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (work / file.name).symlink_to(file.resolve())
            continue
        tensors = {name: value.astype(mx.float32) for name, value in mx.load(str(file)).items()}
        mx.save_safetensors(str(work / file.name), tensors, {"format": "pt"})
    return work


def prepare(source, work):
    """A folder that mlx-lm can load: `source` itself, or one with a wrapped config for a text-only qwen3_5.

    mlx-lm does not know the model types `qwen3_5_text` and `qwen3_5_moe_text`. It takes the same keys
    nested in `text_config`, and puts `language_model.` in front of the tensor names by itself.
    """
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] not in ("qwen3_5_text", "qwen3_5_moe_text"):
        return source
    work.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "config.json":
            (work / file.name).symlink_to(file.resolve())
    wrapped = {
        "model_type": config["model_type"].removesuffix("_text"),
        "text_config": config,
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "eos_token_id": config.get("eos_token_id"),
    }
    (work / "config.json").write_text(json.dumps(wrapped))
    return work


def load_as_user(folder, source):
    """The artifact in `folder` through `mlx_lm.load`, and the prompt's tokens.

    They must be the ones that the source's own tokenizer gives.
    """
    model, tokenizer = load(str(folder))
    tokens = tokenizer.encode(PROMPT)
    if tokens != load_tokenizer(source).encode(PROMPT):
        raise ValueError("the artifact's tokenizer gives other tokens than the source's")
    return model, tokens[:48]


def widths(prepared):
    """Input width of each module that mlx-lm can quantize: path -> in_features."""
    model, _ = load_model(prepared, lazy=True)
    return {path: module.weight.shape[-1] for path, module in model.named_modules() if hasattr(module, "to_quantized")}


def predicate(quantization, stored):
    """mlx-lm's conversion predicate for the settings that an artifact declares.

    `quantization` is the object from config.json and `stored` the names of its tensors. Every answer is a
    full entry or False, so that nothing depends on defaults.
    """
    top = {key: quantization[key] for key in ("group_size", "bits")}
    top["mode"] = quantization.get("mode", "affine")

    def choose(path, module):
        entry = quantization.get(path, top if f"{path}.scales" in stored else False)
        return dict(entry) if entry else False

    return choose


def finest_group(quantization):
    """The smallest group in use: mlx-lm skips modules that its *default* group does not divide."""
    entries = [entry for entry in quantization.values() if isinstance(entry, dict)]
    return min([quantization["group_size"], *(entry["group_size"] for entry in entries)])


def quantized(prepared, quantization, stored):
    """`prepared` loaded and quantized by mlx-lm, every float tensor in its stored dtype."""
    model, config = load_model(prepared, lazy=True)
    with quiet():
        model, _ = quantize_model(
            model,
            config,
            group_size=finest_group(quantization),
            bits=quantization["bits"],
            mode=quantization.get("mode", "affine"),
            quant_predicate=predicate(quantization, stored),
        )
    mx.eval(model.parameters())
    return model


def converted(prepared, quantization, stored, work):
    """`prepared` through the whole of `mlx_lm.convert` and back: casts, saves, loads."""
    with quiet():
        convert(
            str(prepared),
            mlx_path=str(work),
            quantize=True,
            q_group_size=finest_group(quantization),
            q_bits=quantization["bits"],
            q_mode=quantization.get("mode", "affine"),
            quant_predicate=predicate(quantization, stored),
        )
    model, _ = load_model(work)
    return model


def parameters(model):
    """name -> (dtype, shape, bytes) of every parameter."""
    return {
        name: (str(value.dtype), tuple(value.shape), raw(value)) for name, value in tree_flatten(model.parameters())
    }


def raw(array):
    """The bytes of `array` in row-major order."""
    return np.asarray(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes()


def differences(ours, theirs):
    """What differs between two results of `parameters`, one line each."""
    lines = [f"{name}: missing" for name in sorted(theirs.keys() - ours.keys())]
    lines += [f"{name}: not in the reference" for name in sorted(ours.keys() - theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        (dtype, shape, data), (dtype2, shape2, data2) = ours[name], theirs[name]
        if (dtype, shape) != (dtype2, shape2):
            lines.append(f"{name}: {dtype} {shape}, reference {dtype2} {shape2}")
        elif data != data2:
            a, b = np.frombuffer(data, np.uint8), np.frombuffer(data2, np.uint8)
            at = int(np.flatnonzero(a != b)[0])
            lines.append(f"{name}: {int((a != b).sum())} of {a.size} bytes differ, first at {at}")
    return lines


def logits(model, tokens):
    """Logits of `tokens` with float32 arithmetic: bf16 on the CPU is no reference."""
    model.set_dtype(mx.float32)
    out = model(mx.array([tokens]))
    mx.eval(out)
    return np.array(out.astype(mx.float32))[0]


@contextlib.contextmanager
def quiet():
    """mlx-lm reports its progress on stdout and stderr; the table is enough."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
