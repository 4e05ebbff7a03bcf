"""Small real tokenizers, trained on a few sentences and saved as checkpoints hold them: byte-level BPE, pieces with
byte fallback, and the files of the families whose tokenizer is no tokenizer.json (Qwen 1, InternLM2)."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pallasite.serve.tokenizer import Tokenizer as ServedTokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, and the fox runs on and on.",
    "def main():\n    return [x for x in range(10)]\n\n    # a comment\n\tprint('hello')\n",
    "A pallasite is a meteorite whose metal holds crystals of olivine. Stop here! And there, hello world.",
    "the end the end the end    and    again    four    spaces",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('the first role must be user') }}{% endif %}" + CHATML


def byte_level() -> Tokenizer:
    """As of GPT-2, Qwen and Llama 3: any text is bytes, any byte is a token; pieces carry their space in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def pieces(prepend: str = "normalizer") -> Tokenizer:
    """As of Llama 2 and InternLM2: "▁" is the space, a text gets one in front, and what has no piece becomes bytes.

    prepend: the space in front comes from a "normalizer" (then every stretch between special tokens gets one) or from
    a Metaspace pre-tokenizer that gives it to the "first" stretch only.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")  # no "▁" inside a piece
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *model["vocab"]]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [tuple(m) for m in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, template: str | None = CHATML, eos: str = "<|im_end|>") -> Path:
    """The folder as a checkpoint would hold it."""
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)
    hf.chat_template = template
    hf.save_pretrained(folder)
    return folder


def byte_letters() -> dict[int, str]:
    """The letter that the byte-level alphabet (GPT-2's) writes for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def save_qwen(folder: Path, template: str | None = CHATML) -> Path:
    """First-generation Qwen's files: qwen.tiktoken, the single bytes first, then the merges of byte_level()."""
    byte_of = {letter: bytes([b]) for b, letter in byte_letters().items()}
    merges = json.loads(byte_level().to_str())["model"]["merges"]
    merged = [b"".join(byte_of[c] for c in first + second) for first, second in merges]
    tokens = dict.fromkeys([*(bytes([b]) for b in range(256)), *merged])
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (folder / "qwen.tiktoken").write_text("".join(lines))
    settings = {
        "tokenizer_class": "QWenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]},
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | ({"chat_template": template} if template else {}))
    )
    return folder


RESERVED = 4
"""Pieces [UNUSED_TOKEN_0], ... of save_internlm2, from id 3 on; the last two are <|im_end|> and <|im_start|>."""
INTERNLM2_SIZE = 317


def sentencepiece_model() -> bytes:
    """A tokenizer.model with InternLM2's settings, of INTERNLM2_SIZE pieces."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXT * 4 for line in text.split("\n")]),
        model_writer=out,
        model_type="bpe",
        vocab_size=INTERNLM2_SIZE,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=[f"[UNUSED_TOKEN_{i}]" for i in range(RESERVED)],
        minloglevel=2,
    )
    return out.getvalue()


def save_internlm2(folder: Path, template: str | None = CHATML) -> Path:
    """InternLM2's files: tokenizer.model, and special tokens that take the ids of reserved pieces or follow them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    added = {0: "<unk>", 1: "<s>", 2: "</s>", RESERVED + 1: "<|im_end|>", RESERVED + 2: "<|im_start|>"}
    added |= {INTERNLM2_SIZE + i: name for i, name in enumerate(("<img>", "</img>", "<IMG_CONTEXT>"))}
    settings = {
        "tokenizer_class": "InternLM2Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        "added_tokens_decoder": {str(i): {"content": name, "special": True} for i, name in added.items()},
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | ({"chat_template": template} if template else {}))
    )
    return folder


SAVERS: dict[str, Callable[[Path], Path]] = {
    "bytes": lambda folder: save(byte_level(), folder),
    "pieces": lambda folder: save(pieces(), folder),
    "pieces-first": lambda folder: save(pieces("first"), folder),
    "qwen": save_qwen,
    "internlm2": save_internlm2,
}
"""Each writes the files of a tokenizer with ChatML's template into a folder."""


def load(tokenizer: Tokenizer, folder: Path, template: str | None = CHATML) -> ServedTokenizer:
    """Saved and loaded again, as it is served."""
    loaded = ServedTokenizer.load(save(tokenizer, folder, template))
    assert loaded is not None
    return loaded
