"""Chat templates: a conversation to the text that a model was trained on (rendered by transformers, from Jinja).

A checkpoint's own template is always used. Some published checkpoints have it only in Python files, which are never
run; for those the template is here, found by the architecture and the `template` field of config.json.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it announces on stderr that torch is absent

from transformers.utils.chat_template_utils import render_jinja_template


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """jinja: the template. stop_tokens: spellings of the special tokens that end an answer under it, besides the
    checkpoint's own end-of-sequence ids."""

    jinja: str
    stop_tokens: tuple[str, ...] = ()

    def render(self, messages: Sequence[Mapping[str, str]], names: Mapping[str, str]) -> str:
        """The conversation as text. names: what the template may call special tokens ("bos_token": "<s>").

        A last message of the assistant is left open, to be continued; else a new turn of the assistant is opened.
        Raises ValueError with the template's own words where it refuses the messages.
        """
        going_on = messages[-1]["role"] == "assistant"
        try:
            [text], _ = render_jinja_template(
                [list(messages)],
                chat_template=self.jinja,
                add_generation_prompt=not going_on,
                continue_final_message=going_on,
                **names,
            )
        except Exception as error:  # a template is a program of the checkpoint's, and may fail in any way
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return text


def _chatml(system: str, turn_end: str) -> ChatTemplate:
    """ChatML as of the models that always have a system message: `system` where the conversation brings none.
    turn_end: what follows <|im_end|>."""
    jinja = (
        "{{ bos_token }}"
        "{% if messages[0].role != 'system' %}<|im_start|>system\n" + system + "<|im_end|>" + turn_end + "{% endif %}"
        "{% for message in messages %}"
        "{% if message.role not in ('system', 'user', 'assistant') %}"
        "{{ raise_exception('the role ' ~ message.role ~ ' is unknown; known are system, user and assistant') }}"
        "{% endif %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>" + turn_end + "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    # Jinja drops the newline after a tag, so a newline is written as an expression.
    return ChatTemplate(jinja.replace("\n", "{{ '\\n' }}"), ("<|im_end|>", "<|im_start|>"))


BUILT_IN = {
    ("InternLM2ForCausalLM", None): _chatml(
        "You are an AI assistant whose name is InternLM (书生·浦语).\n"
        "- InternLM (书生·浦语) is a conversational language model that is developed by Shanghai AI Laboratory "
        "(上海人工智能实验室). It is designed to be helpful, honest, and harmless.\n"
        "- InternLM (书生·浦语) can understand and communicate fluently in the language chosen by the user such as "
        "English and 中文.",
        turn_end="\n",
    ),
    ("InternVLChatModel", "internlm2-chat"): _chatml(
        "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。",
        turn_end="",
    ),
    ("QWenLMHeadModel", None): _chatml("You are a helpful assistant.", turn_end="\n"),
}
"""(architecture, config.json's `template`) -> what the published chat code of such a model writes."""


def built_in_template(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ChatTemplate | None:
    """The template for a checkpoint that carries none, by its config.json and generation_config.json; None if we know
    none, or if the checkpoint says that it is no chat model."""
    if generation.get("chat_format") == "raw":  # Qwen's base models; "chatml" in the chat models
        return None
    architectures = config.get("architectures") or [None]
    return BUILT_IN.get((architectures[0], config.get("template")))
