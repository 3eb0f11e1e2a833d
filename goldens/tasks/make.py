#!/usr/bin/env python3
"""What transformers computes in float32 for the items here: `expected.json`.

    make.py [--check]

Written without a look at tqc's code, from the words of docs/tasks.md: each continuation is scored by one pass over prompt
and continuation without a cache, and each answer is decoded greedily. `--check` compares with the stored file instead of
writing it (log-probabilities within 1e-5, all else equal). Needs torch and transformers 5.24.0; tests/oracle/
make_runtime_goldens.py says how to install them.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "models/demo-qwen3_5"
MAX_TOKENS = 64
ENDS = (0, 2)


def rows(name):
    return [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines()]


class Scorer:
    def __init__(self):
        torch.set_grad_enabled(False)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def encode(self, text):
        return self.tokenizer(text)["input_ids"]

    def pair(self, prompt, text):
        """lm-evaluation-harness 0.4.9, lm_eval/api/model.py, TemplateLM._encode_pair."""
        spaces = len(prompt) - len(prompt.rstrip())
        if spaces > 0:
            prompt, text = prompt[:-spaces], prompt[-spaces:] + text
        whole, context = self.encode(prompt + text), self.encode(prompt)
        return context, whole[len(context) :]

    def score(self, prompt, text):
        context, continuation = self.pair(prompt, text)
        logits = self.model(torch.tensor([context + continuation]), use_cache=False).logits[0].double()
        rows = torch.log_softmax(logits[len(context) - 1 : -1], dim=-1)
        picked = rows[range(len(continuation)), continuation]
        greedy = bool((rows.argmax(dim=-1) == torch.tensor(continuation)).all())
        return {"log_prob": float(picked.sum()), "tokens": continuation, "greedy": greedy}

    def write(self, ids, blank_line_ends):
        """Greedy tokens up to an end token, and the text up to a blank line; the smallest margin on the way."""
        tokens, margin, end = [], float("inf"), None
        while len(tokens) < MAX_TOKENS:
            logits = self.model(torch.tensor([ids + tokens]), use_cache=False).logits[0, -1]
            first, second = logits.topk(2).values.tolist()
            margin = min(margin, first - second)
            token = int(logits.argmax())
            if token in ENDS:
                end = token
                break
            tokens.append(token)
            if blank_line_ends and "\n\n" in self.tokenizer.decode(tokens, skip_special_tokens=True):
                break
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        if blank_line_ends:
            text = text.split("\n\n")[0]
        return {"text": text, "tokens": tokens, "end_token": end, "margin": margin}


def expected():
    scorer = Scorer()
    found = {}
    for name in ("recall.jsonl", "sentences.jsonl"):
        found[name] = [[scorer.score(row["prompt"], choice) for choice in row["choices"]] for row in rows(name)]
    found["last_words.jsonl"] = [scorer.score(row["prompt"], row["gold"]) for row in rows("last_words.jsonl")]
    problems = rows("problems.jsonl")
    found["problems.jsonl raw"] = [scorer.write(scorer.encode(row["raw_prompt"]), True) for row in problems]
    chat = []
    for row in problems:
        message = [{"role": "user", "content": row["question"]}]
        text = scorer.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = scorer.tokenizer(text, add_special_tokens=False)["input_ids"]
        chat.append(scorer.write(ids, False))
    found["problems.jsonl chat"] = chat
    return found


def differences(found, stored, path=""):
    if isinstance(found, dict):
        for key in found.keys() | stored.keys():
            yield from differences(found.get(key), stored.get(key), f"{path}/{key}")
    elif isinstance(found, list) and len(found) == len(stored):
        for i, (a, b) in enumerate(zip(found, stored)):
            yield from differences(a, b, f"{path}/{i}")
    elif isinstance(found, float):
        if abs(found - stored) > 1e-5:
            yield f"{path}: {found} is not {stored}"
    elif found != stored:
        yield f"{path}: {found} is not {stored}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    path, found = HERE / "expected.json", expected()
    if args.check:
        wrong = list(differences(found, json.loads(path.read_text())))
        print("\n".join(wrong) or "equal")
        sys.exit(1 if wrong else 0)
    path.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
