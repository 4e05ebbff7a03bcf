"""A Hugging Face fast tokenizer from a GGUF file's metadata: byte-level BPE, without torch or sentencepiece."""

import os
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pallasite.convert.formats.gguf_metadata import Metadata

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it announces on stderr that torch is absent
from transformers import PreTrainedTokenizerFast

CONTROL, USER_DEFINED = 3, 4
"""Token types (llama.h, LLAMA_TOKEN_TYPE_*) of tokens that are never split: special ones, and added text."""

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def pre_tokenizer(name: str) -> tuple[Any, bool, bool]:
    """For GGUF's name of a pre-tokenizer: how text is cut before merging, whether whole words skip the merges
    ("ignore_merges"), and whether BOS is added unless the file says otherwise. Raises ValueError for other names."""
    byte_level = pre_tokenizers.ByteLevel
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level(add_prefix_space=False)]), False, False
    if name == "gpt-2":
        return byte_level(add_prefix_space=False), False, False
    if name in ("llama-bpe", "qwen2"):
        llama = name == "llama-bpe"
        split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN if llama else QWEN2_PATTERN), behavior="isolated")
        return pre_tokenizers.Sequence([split, byte_level(add_prefix_space=False, use_regex=False)]), llama, llama
    raise ValueError(f"pre-tokenizer {name!r} is not supported; known: smollm, gpt-2, llama-bpe, qwen2")


def build_tokenizer(metadata: Metadata) -> PreTrainedTokenizerFast | None:
    """The tokenizer that the metadata describes, with its chat template; None if it has none.

    Raises ValueError naming a model or pre-tokenizer that we can't rebuild exactly.
    """
    kind = metadata.get("tokenizer.ggml.model", "no_vocab")
    if kind in ("none", "no_vocab"):
        return None
    if kind != "gpt2":
        raise ValueError(f"tokenizer model {kind!r} is not supported; only 'gpt2' (byte-level BPE) is")
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    cut, ignore_merges, default_bos = pre_tokenizer(pre)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.need("tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = cut
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    added = [(t, kind) for t, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in added if kind == USER_DEFINED])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t, kind in added if kind == CONTROL])

    def token(key: str) -> str | None:
        i = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return tokens[i] if i is not None and 0 <= i < len(tokens) else None

    bos = token("bos")
    offsets = processors.ByteLevel(trim_offsets=False)
    if metadata.get("tokenizer.ggml.add_bos_token", default_bos) and bos:
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
        tokenizer.post_processor = processors.Sequence([offsets, template])
    else:
        tokenizer.post_processor = offsets
    special = {
        "bos_token": bos,
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
    }
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=int(metadata.get(f"{metadata.get('general.architecture')}.context_length", 1 << 30)),
        clean_up_tokenization_spaces=False,
        **{key: value for key, value in special.items() if value is not None},
    )
    wrapped.chat_template = metadata.get("tokenizer.chat_template")
    return wrapped
