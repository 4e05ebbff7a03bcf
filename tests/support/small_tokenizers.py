"""Small real tokenizers of the two common kinds, trained on a few sentences: byte-level BPE, and pieces with byte
fallback as sentencepiece makes them."""

import json
from pathlib import Path

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


def load(tokenizer: Tokenizer, folder: Path, template: str | None = CHATML) -> ServedTokenizer:
    """Saved and loaded again, as it is served."""
    loaded = ServedTokenizer.load(save(tokenizer, folder, template))
    assert loaded is not None
    return loaded
