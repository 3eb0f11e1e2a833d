#!/usr/bin/env python3
"""What transformers computes in float32 for trained models: answers that the runtime's tests are held against.

    make_runtime_goldens.py [--models DIR] [--shared DIR] [--only NAME] [--out DIR] [--check]

The prompts are goldens/runtime/prompts.json: a word problem, a question in chat form, a page of prose. The demo
model's answers go to goldens/runtime/, those of larger models to target/oracle/goldens/. For a prompt P of T tokens
and a vocabulary of V, NAME.safetensors holds

    input_ids.P        I64 [T]
    logits_f32.P       F32 [min(T, 32), V]  one pass over the prompt without a cache; its last positions
    greedy_ids.P       I64 [48]             cached decoding; goes on after an end token
    greedy_margin.P    F32 [48]             first minus second logit at each of those steps

and where the checkpoint has a draft head (`mtp.*`), with s = prompt + greedy tokens:

    draft_ids.P        I64 [T + 47]         greedy draft of row i: a guess at s[i + 2] from s[i + 1] and hidden state i
    draft_margin.P     F32 [T + 47]
    draft_logits_f32.P F32 [min(T, 32), V]  the prompt's last rows (first prompt only)
    draft_hidden_f32.P F32 [min(T, 32), D]  after `mtp.norm`, what the next draft step would take (first prompt only)
    chain_ids.P        I64 [4]              drafts after the prompt, each fed the hidden state of the one before
    chain_logits_f32.P F32 [4, V]           (first prompt only)

NAME.json holds what a person would see of each: the prompt as text, the text up to the first end token, and how many
tokens that took. transformers leaves `mtp.*` out, so the head is put together here from transformers' own decoder layer
and norms; it reads the hidden state after the final norm.

Writing needs torch and transformers 5.24.0, which requirements.txt does not list because only this script wants them:

    python3 -m venv target/oracle/torch-venv
    target/oracle/torch-venv/bin/pip install torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 jinja2

`--check` writes nothing and needs mlx-lm instead (requirements.txt): it recomputes logits and greedy tokens with
mlx-lm in float32, and fails (exit 1) unless logits are within 1e-3 and the tokens are the same. It knows no draft head.
"""

import argparse
import copy
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

COMMITTED = "demo-qwen3_5"
NAMES = (COMMITTED, "lab-qwen3_5", "smollm2-135m")
ROWS, GREEDY, CHAIN = 32, 48, 4
TOLERANCE = 1e-3


def models(args):
    """name -> folder of the models that are here; says aloud what it leaves out."""
    found = {}
    for name in NAMES:
        if args.only not in (None, name):
            continue
        places = [ROOT / "goldens/models" / name, args.models / name, args.shared / "models" / name]
        place = next((place for place in places if (place / "config.json").exists()), None)
        if place:
            found[name] = place
        else:
            print(f"SKIP {name}: none of {', '.join(map(str, places))}")
    return found


def target(args, name):
    """The folder of `name`'s answers."""
    return args.out or (ROOT / "goldens/runtime" if name == COMMITTED else ROOT / "target/oracle/goldens")


def rendered(prompt, tokenizer):
    if "text" in prompt:
        return prompt["text"]
    return tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)


def end_tokens(folder):
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return ends if isinstance(ends, list) else [ends]


class Trunk:
    """The model in transformers: float32, the attention written out, the plain DeltaNet."""

    def __init__(self, folder):
        import torch
        import transformers

        torch.set_num_threads(os.cpu_count())
        torch.set_grad_enabled(False)
        self.torch = torch
        self.model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        unexpected = [key for key in info["unexpected_keys"] if not key.startswith("mtp.")]
        if info["missing_keys"] or unexpected:
            sys.exit(f"{folder}: missing {sorted(info['missing_keys'])}, unexpected {sorted(unexpected)}")
        self.model.eval()

    def forward(self, ids):
        """Logits [T, V] and the tensor that the output head reads [T, D], in one pass without a cache."""
        seen = []
        hook = self.model.model.norm.register_forward_hook(lambda module, given, out: seen.append(out[0]))
        logits = self.model(input_ids=self.torch.tensor([ids]), use_cache=False).logits[0]
        hook.remove()
        return logits, seen[0]

    def greedy(self, ids):
        """Cached decoding: tokens and the logits of each step [48, V]."""
        feed, cache, tokens, steps = ids, None, [], []
        for _ in range(GREEDY):
            out = self.model(input_ids=self.torch.tensor([feed]), cache=cache, use_cache=True)
            cache = out.cache
            steps.append(out.logits[0, -1])
            tokens.append(int(steps[-1].argmax()))
            feed = tokens[-1:]
        return tokens, self.torch.stack(steps)


class DraftHead:
    """mtp.*: u = layer(fc([norm_e(embed(next)), norm_h(hidden)])), h' = norm(u), logits = lm_head(h')."""

    def __init__(self, trunk, folder):
        from safetensors.torch import load_file
        from transformers.models.qwen3_5 import modeling_qwen3_5 as q

        torch = self.torch = trunk.torch
        config = copy.deepcopy(trunk.model.config.get_text_config())
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        config._attn_implementation = "eager"
        width, eps = config.hidden_size, config.rms_norm_eps
        head = torch.nn.Module()
        head.pre_fc_norm_embedding = q.Qwen3_5RMSNorm(width, eps)
        head.pre_fc_norm_hidden = q.Qwen3_5RMSNorm(width, eps)
        head.fc = torch.nn.Linear(2 * width, width, bias=False)
        head.layers = torch.nn.ModuleList([q.Qwen3_5DecoderLayer(config, 0)])
        head.norm = q.Qwen3_5RMSNorm(width, eps)
        stored = {}
        for shard in sorted(folder.glob("*.safetensors")):
            stored |= {key: value for key, value in load_file(shard).items() if key.startswith("mtp.")}
        head.load_state_dict({key.removeprefix("mtp."): value.float() for key, value in stored.items()})
        self.head, self.trunk = head.eval(), trunk.model

    @staticmethod
    def stored_in(folder):
        index = folder / "model.safetensors.index.json"
        return index.exists() and any(key.startswith("mtp.") for key in json.loads(index.read_text())["weight_map"])

    def forward(self, following, hidden):
        """`following` [n]: the token after each row of `hidden` [n, D]. Draft logits [n, V] and h' [n, D]."""
        torch, head, core, n = self.torch, self.head, self.trunk.model, len(following)
        embedded = head.pre_fc_norm_embedding(core.embed_tokens(torch.tensor(following)))
        x = head.fc(torch.cat([embedded, head.pre_fc_norm_hidden(hidden)], -1))[None]
        positions = torch.arange(n).view(1, 1, -1).expand(3, 1, -1)
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        x = head.layers[0](x, position_embeddings=core.rotary_emb(x, positions), attention_mask=mask)
        out = head.norm(x)[0]
        return self.trunk.lm_head(out), out

    def chain(self, following, hidden):
        """Drafts after the last row. Runs over the whole grown sequence each time, in place of a cache."""
        following, ids, rows = list(following), [], []
        for _ in range(CHAIN):
            logits, out = self.forward(following, hidden)
            rows.append(logits[-1])
            ids.append(int(logits[-1].argmax()))
            following.append(ids[-1])
            hidden = self.torch.cat([hidden, out[-1:]])
        return ids, self.torch.stack(rows)


def margin(logits):
    """First minus second logit of each row."""
    top = logits.topk(2).values
    return top[..., 0] - top[..., 1]


def write(name, folder, out, prompts):
    import safetensors.torch
    import transformers

    trunk = Trunk(folder)
    torch, tokenizer = trunk.torch, transformers.AutoTokenizer.from_pretrained(folder)
    drafter = DraftHead(trunk, folder) if DraftHead.stored_in(folder) else None
    ends, tensors, texts = end_tokens(folder), {}, []
    for at, prompt in enumerate(prompts):
        key, text = prompt["name"], rendered(prompt, tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens, steps = trunk.greedy(ids)
        logits, hidden = trunk.forward(ids + tokens)
        spread = float((logits[len(ids) - 1 : -1] - steps).abs().max())
        if spread > TOLERANCE / 5:
            sys.exit(f"{name} {key}: cached decoding is {spread:.1e} from one pass; no reference")
        prompt_logits, _ = trunk.forward(ids)
        tensors[f"input_ids.{key}"] = torch.tensor(ids)
        tensors[f"logits_f32.{key}"] = prompt_logits[-ROWS:]
        tensors[f"greedy_ids.{key}"] = torch.tensor(tokens)
        tensors[f"greedy_margin.{key}"] = margin(steps)
        until = next((i for i, token in enumerate(tokens) if token in ends), None)
        seen = {
            "name": key,
            "prompt": text,
            "prompt_tokens": len(ids),
            "text": tokenizer.decode(tokens[:until], skip_special_tokens=True),
            "tokens_before_end": until,
        }
        smallest = float(margin(steps).min())
        print(f"{name} {key}: {len(ids)} tokens, smallest margin {smallest:.4f}, cached against whole {spread:.1e}")
        print(f"    {seen['text']!r}")
        if drafter:
            known = ids + tokens
            drafts, states = drafter.forward(known[1:], hidden[:-1])
            tensors[f"draft_ids.{key}"] = drafts.argmax(-1)
            tensors[f"draft_margin.{key}"] = margin(drafts)
            right = (drafts.argmax(-1)[len(ids) - 1 : -1] == torch.tensor(tokens[1:])).sum()
            seen["drafts_right"] = f"{int(right)} of {GREEDY - 1}"
            chain, chain_logits = drafter.chain(known[1 : len(ids) + 1], hidden[: len(ids)])
            tensors[f"chain_ids.{key}"] = torch.tensor(chain)
            print(f"    drafts right {seen['drafts_right']}, chain {chain} for {tokens[1 : 1 + CHAIN]}")
            if at == 0:
                last = slice(max(0, len(ids) - ROWS), len(ids))
                tensors[f"draft_logits_f32.{key}"] = drafts[last]
                tensors[f"draft_hidden_f32.{key}"] = states[last]
                tensors[f"chain_logits_f32.{key}"] = chain_logits
        texts.append(seen)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.safetensors"
    safetensors.torch.save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    path.chmod(0o644)  # the library makes it private
    (out / f"{name}.json").write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes (torch {torch.__version__}, transformers {transformers.__version__})")


def check(name, folder, out, prompts):
    """Complaints of mlx-lm about the file in `out`."""
    import mlx.core as mx
    import reference
    import safetensors.numpy
    from mlx_lm.models.cache import make_prompt_cache

    mx.set_default_device(mx.cpu)
    path, complaints = out / f"{name}.safetensors", []
    if not path.exists():
        return [f"{path} does not exist: run this script without --check first"]
    stored = safetensors.numpy.load_file(path)
    with tempfile.TemporaryDirectory() as work:
        # Widened first: mlx-lm adds 1 to zero-centred gains in their stored dtype. Rounding that sum to bf16 moves
        # these models' logits by 3e-2.
        wide = Path(work) / "wide"
        wide.mkdir()
        for file in folder.iterdir():
            if file.suffix == ".safetensors":
                values = {key: value.astype(mx.float32) for key, value in mx.load(str(file)).items()}
                mx.save_safetensors(str(wide / file.name), values, metadata={"format": "pt"})
            else:
                (wide / file.name).symlink_to(file.resolve())
        model, _ = reference.load_model(reference.prepare(wide, Path(work) / "model"))
        for prompt in prompts:
            key = prompt["name"]
            ids = stored[f"input_ids.{key}"].tolist()
            wanted = stored[f"logits_f32.{key}"]
            found = reference.logits(model, ids)[-len(wanted) :]
            worst = float(np.abs(found - wanted).max())
            feed, cache, tokens = ids, make_prompt_cache(model), []
            for _ in range(GREEDY):
                tokens.append(int(mx.argmax(model(mx.array([feed]), cache=cache)[0, -1])))
                feed = tokens[-1:]
            same = tokens == stored[f"greedy_ids.{key}"].tolist()
            line = f"{name} {key}: logits differ by at most {worst:.1e}, greedy tokens {'equal' if same else 'differ'}"
            print(line)
            if worst > TOLERANCE or not same:
                complaints.append(line)
    return complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", type=Path, default=ROOT / "target/oracle/models")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--out", type=Path, help="one folder for everything that is written")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    prompts = json.loads((ROOT / "goldens/runtime/prompts.json").read_text(encoding="utf-8"))
    complaints = []
    for name, folder in models(args).items():
        if args.check:
            complaints += check(name, folder, target(args, name), prompts)
        else:
            write(name, folder, target(args, name), prompts)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
