"""Encodes and decodes texts with the `tokenizers` package of Python.

texts.json: the texts. NAME.json, for each tokenizer: `ids` of each text with and without special tokens,
`decoded` with and without them, and for streams of ids that are no text: `decoded`. Of `synthetic.json` each entry
also holds the tokenizer: small ones, made here, with every decoder that models use.
"""

import json
import pathlib
import random
import tempfile

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
FOLDERS = {p.name: p for p in sorted((ROOT / "tests/fixtures").iterdir()) if (p / "tokenizer.json").exists()}
for same in ["llama-untied", "qwen2"]:  # the same files as llama-tied and qwen3
    del FOLDERS[same]
FOLDERS["demo-qwen3_5"] = ROOT / "goldens/models/demo-qwen3_5"

TEXTS = [
    "", " ", "  ", "\n", "\r\n", "\t", "a", " a", "a ", "\u00a0", "\u3000",
    "emoji \U0001f469\u200d\U0001f4bb\U0001f468\u200d\U0001f469\u200d\U0001f467 flag \U0001f1e9\U0001f1ea tone \U0001f44d\U0001f3fd",
    "e\u0301\u0302\u0323 \u1e69 s\u0323\u0307 \ufb01 \u00bd \u2126 \uac00 \u1100\u1161\u11a8",
    "\u0915\u094d\u0937\u093f \u0e01\u0e33 \u05e9\u05c1\u05dc\u05d5\u05dd \u0627\u0644\u0639\u064e\u0631\u064e",
    "今天天气很好，我们去公园吧。こんにちは世界。안녕하세요 세계",
    "a\r\nb\rc\n\n\n  d\t\te \r\n \n f",
    "x" + " " * 300 + "y" + "\n" * 100 + "\t" * 50 + " " * 7,
    "It's we'll I'D don'T 'S 's''s \u017f 'ſ ’s",
    "1 22 333 4444 1234567890 ½ ² ٣ 五 1.5e-3 0x1F",
    "fn main() { let x: Vec<u8> = vec![0; 16]; } // <<>> != === ->",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "a<|im_end|>b <|im_end|> c<|im_end|><|im_end|>  <|im_end|>\n",
    "<|im_start |><|IM_START|><|im_start|<|im_start|>>",
    "<|begin_of_text|><|begin_of_text|> <|eot_id|>x<s></s> <s> [INST]a[/INST] <unk><pad>",
    "<tool_call>{\"a\": 1}</tool_call><think>é</think>\u200b<|vision_start|><|image_pad|><|vision_end|>",
    "\ufeffBOM \u200b\u200c\u200d\u2060 \ufffd \ufffe \x00 \x01 \x7f \x1b[0m",
    "\U0001d54f\U0001d7d8 \U00020000 \U0010ffff \ue000",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "ÀÉÎÕÜ àéîõü ÇçÑñ ŁłŻż ßẞ İıIi ΑΣ σς",
    "a" * 500, "ab" * 200, "=" * 130 + "-" * 77, "é" * 60, "🙂" * 40,
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\dir\\file.txt",
    "¿Qué? ¡Sí! «oui» „ja“ ‘a’ “b” — – … • ° € £ ¥ © ® ™ × ÷ ≤ ≠",
]


def streams(tok, rng):
    """Ids that are no text: random ones, and each id alone."""
    size = tok.get_vocab_size()
    for _ in range(24):
        yield [rng.randrange(size) for _ in range(rng.randrange(1, 24))]
    # Bytes that split characters: tokens of bytes above 0x7f, in any order.
    high = [i for i in range(size) if (t := tok.id_to_token(i)) and len(t) == 1 and ord(t) > 0xa0]
    for _ in range(24):
        yield [rng.choice(high) if high and rng.random() < 0.85 else rng.randrange(size) for _ in range(rng.randrange(1, 20))]
    yield [size, size + 5, 0, size + 99]


def decode(tok, ids, skip):
    try:
        return tok.decode(ids, skip_special_tokens=skip)
    except BaseException as error:
        # `Strip` of the package indexes past the end of a text shorter than what it may cut.
        assert type(error).__name__ == "PanicException", error
        return None


def rows(tok, texts):
    rng = random.Random(5)
    tok.no_truncation()
    tok.no_padding()
    out = {"texts": [], "streams": []}
    for text in texts:
        ids = tok.encode(text).ids
        plain = tok.encode(text, add_special_tokens=False).ids
        out["texts"].append({
            "ids": ids, "plain": None if plain == ids else plain,
            "decoded": decode(tok, ids, False),
            "skipped": decode(tok, ids, True),
        })
    for ids in streams(tok, rng):
        out["streams"].append({"ids": ids, "decoded": decode(tok, ids, False), "skipped": decode(tok, ids, True)})
    return out


def write(name, value):
    (HERE / name).write_text(json.dumps(value, separators=(",", ":")) + "\n")


def byte_fallback(decoder, normalizer=None, pre=None):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for b in range(256):
        vocab[f"<0x{b:02X}>"] = len(vocab)
    for piece in ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "é", "今", ".", ",", "'", "n", "t", "##a", "##b", "\n", "▁▁", "Ġ", "do", "not", "</w>"]:
        vocab[piece] = len(vocab)
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "▁")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizer
    tok.pre_tokenizer = pre
    tok.decoder = decoder
    tok.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tok.add_tokens([AddedToken("<end of turn>", special=False), AddedToken("é x", special=False, normalized=False)])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return tok


def synthetic():
    llama2 = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    spm = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    yield "llama 2", byte_fallback(decoders.Sequence(llama2), spm)
    yield "gemma", byte_fallback(decoders.Sequence(llama2[:3]), normalizers.Replace(" ", "▁"))
    yield "metaspace", byte_fallback(decoders.Metaspace(), None, pre_tokenizers.Metaspace())
    yield "metaspace never", byte_fallback(decoders.Metaspace(prepend_scheme="never"), None, pre_tokenizers.Metaspace(prepend_scheme="never"))
    yield "bytes then metaspace", byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), None, pre_tokenizers.Metaspace())
    yield "wordpiece", byte_fallback(decoders.WordPiece("##", True))
    yield "wordpiece without cleanup", byte_fallback(decoders.WordPiece("##", False))
    yield "no decoder", byte_fallback(None)
    yield "byte level", byte_fallback(decoders.ByteLevel())
    yield "fuse", byte_fallback(decoders.Fuse())
    yield "strip the end", byte_fallback(decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 2), decoders.Strip("a", 1, 0)]))
    yield "byte level strip", byte_fallback(decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 2, 0)]))
    yield "strip each", byte_fallback(decoders.Sequence([decoders.Replace("▁", "  "), decoders.Strip(" ", 1, 0)]))


write("texts.json", TEXTS)
for name, folder in FOLDERS.items():
    write(f"{name}.json", rows(Tokenizer.from_file(str(folder / "tokenizer.json")), TEXTS))

SHORT = ["", "a", " ab", "ab ab", "ab  abc\n", "é今x", "🙂", "a🙂b", "<s>a</s>", "é x<end of turn> a", "do not . ' n't", "<0x41>"]
out = []
for name, tok in synthetic():
    out.append({"name": name, "tokenizer": json.loads(tok.to_str()), "inputs": SHORT, **rows(tok, SHORT)})
write("synthetic.json", out)

# tokenizer_config.json: what transformers puts around a text.
wrapped = []
for name, extra in [
    ("llama-tied", {}), ("llama-tied", {"add_bos_token": False}), ("qwen3", {"add_eos_token": True}),
    ("qwen3_5", {"split_special_tokens": True}),
    ("qwen3", {"added_tokens_decoder": {"507": {"content": "<|endoftext|>", "special": True}, "512": {"content": "<new>", "special": True}, "513": {"content": "<plain>", "special": False, "normalized": False}}}),
]:
    with tempfile.TemporaryDirectory() as at:
        at = pathlib.Path(at)
        (at / "tokenizer.json").write_text((FOLDERS[name] / "tokenizer.json").read_text())
        config = json.loads((FOLDERS[name] / "tokenizer_config.json").read_text())
        config.update(extra)
        (at / "tokenizer_config.json").write_text(json.dumps(config))
        hf = AutoTokenizer.from_pretrained(str(at))
        text = "a <|im_end|> b<|eot_id|></s> <new>c<plain>"
        ids = hf(text)["input_ids"]
        wrapped.append({"name": name, "config": extra, "text": text, "ids": ids, "plain": hf(text, add_special_tokens=False)["input_ids"], "skipped": hf.decode(ids, skip_special_tokens=True)})
write("wrapped.json", wrapped)
for row in wrapped:
    print(row["name"], row["config"], row["ids"][:2], row["ids"][-2:])
