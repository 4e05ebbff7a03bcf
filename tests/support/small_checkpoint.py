"""A tiny Llama with random weights (tests/data/golden/llama-tied-tiny) and a real tokenizer: answers are noise, but the
same noise every time, and they pass through every part that a real model's answers pass through."""

import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from support.small_tokenizers import TEXT, save

WEIGHTS = Path(__file__).parents[1] / "data" / "golden" / "llama-tied-tiny"
"""Without a tokenizer. 256 positions, 320 ids, end of sequence 2."""


def with_tokenizer(folder: Path) -> Path:
    """A copy in `folder` with a byte-level tokenizer of 320 entries and ChatML's template; id 2 is <|im_end|>."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copyfile(WEIGHTS / name, folder / name)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    assert tokenizer.get_vocab_size() == 320
    return save(tokenizer, folder)
