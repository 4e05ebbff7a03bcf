"""Chat templates for checkpoints that carry none: what those models' published code writes, and when they apply."""

import hashlib
import json
from pathlib import Path

import pytest
from support.published_tokenizers import QWEN as QWEN_GOLDEN
from support.published_tokenizers import save_published_internlm2, save_published_qwen
from support.small_tokenizers import CHATML, byte_level, save, save_internlm2, save_qwen

from pallasite.serve.templates import BUILT_IN, ChatTemplate, built_in_template
from pallasite.serve.tokenizer import Tokenizer

PROMPT = json.loads((Path(__file__).parents[1] / "data" / "golden" / "prompt" / "expected.json").read_text())
CASES = {case["name"]: case for case in PROMPT["cases"]}

INTERNVL2 = {
    "architectures": ["InternVLChatModel"],
    "template": "internlm2-chat",
    "llm_config": {"architectures": ["InternLM2ForCausalLM"]},
}
INTERNLM2 = {"architectures": ["InternLM2ForCausalLM"]}
QWEN = {"architectures": ["QWenLMHeadModel"]}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def built_in(config: dict, generation: dict | None = None) -> ChatTemplate:
    template = built_in_template(config, generation or {})
    assert template is not None
    return template


def load(folder: Path, config: dict, generation: dict | None = None) -> Tokenizer:
    loaded = Tokenizer.load(folder, config, generation or {})
    assert loaded is not None
    return loaded


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def turns_of(case: dict) -> list[dict[str, str]]:
    """The messages of InternVL's own chat()."""
    given = case["original_chat"]["input"]
    before = [turn for question, answer in given["history"] or [] for turn in (user(question), assistant(answer))]
    return [*before, user(given["question"])]


@pytest.mark.parametrize("name", ["text_only", "literal_image_text_only", "image_second_turn_no_marker"])
def test_internvl2_writes_what_its_chat_writes(name):
    expected = CASES[name]["original_chat"]
    text = built_in(INTERNVL2).render(turns_of(CASES[name]), {})
    assert text == expected["prompt_compact"]
    assert hashlib.sha256(text.encode()).hexdigest() == expected["prompt_sha256"]


@pytest.mark.parametrize("name", ["text_only", "literal_image_text_only", "system_message"])
def test_internvl2_writes_what_lmdeploy_writes(name):
    case = CASES[name]["lmdeploy"]
    text = built_in(INTERNVL2).render(case["input"]["messages"], {"bos_token": "<s>"})
    assert text == "<s>" + case["registered_template"]["prompt_compact"]


def test_internvl2s_ids_begin_with_bos(tmp_path):
    """Of every case's layout <s> is the first token, once; the tokens between are the control tokens alone."""
    tokenizer = load(save_internlm2(tmp_path, None), INTERNVL2)
    ids = tokenizer.encode_chat([user("Hello, who are you?")])
    assert shown(tokenizer, ids) == "<s>" + CASES["text_only"]["original_chat"]["prompt_compact"]
    layout = [part["token"] for part in CASES["text_only"]["original_chat"]["layout"] if "token" in part]
    assert [shown(tokenizer, [i]) for i in ids if i in tokenizer.hidden_ids] == layout


@pytest.mark.parametrize("name", ["literal_context_text_only", "literal_im_end"])
def test_b09_what_a_user_types_is_text(name, tmp_path):
    """Where the original makes control tokens of it."""
    tokenizer = load(save_internlm2(tmp_path, None), INTERNVL2)
    ids = tokenizer.encode_chat(turns_of(CASES[name]))
    assert shown(tokenizer, ids) == "<s>" + CASES[name]["original_chat"]["prompt_compact"]
    plain = tokenizer.encode_chat([user("plain")])
    assert [i for i in ids if i in tokenizer.hidden_ids] == [i for i in plain if i in tokenizer.hidden_ids]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            [user("你好")],
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n你好<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            [system("Be brief."), user("a"), assistant("b"), user("c")],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
            "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [user("a"), assistant("According to ")],
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
            "<|im_start|>assistant\nAccording to ",
        ),
    ],
)
def test_qwen_writes_chatml_with_its_system_message(messages, expected, tmp_path):
    """The first is the prompt of the golden case of its tokenizer."""
    assert built_in(QWEN).render(messages, {}) == expected
    tokenizer = load(save_qwen(tmp_path, None), QWEN)
    assert tokenizer.encode_chat(messages) == tokenizer.encode(expected)


def test_the_published_vocabularies_give_the_golden_ids(tmp_path):
    qwen = load(save_published_qwen(tmp_path), QWEN)
    [golden] = [case for case in QWEN_GOLDEN["cases"] if case["text"].startswith("<|im_start|>system")]
    assert qwen.encode_chat([user("你好")]) == golden["ids"]
    (tmp_path / "vl").mkdir()
    internvl2 = load(save_published_internlm2(tmp_path / "vl"), INTERNVL2)
    ids = internvl2.encode_chat(turns_of(CASES["text_only"]))
    layout = CASES["text_only"]["original_chat"]["layout"]
    assert [i for i in ids if i in internvl2.hidden_ids] == [part["id"] for part in layout if "token" in part]
    assert shown(internvl2, ids) == "".join(part.get("token") or part["text"] for part in layout)
    assert internvl2.eos_ids == (2, 92542, 92543)


def test_internlm2_writes_its_meta_instruction():
    text = built_in(INTERNLM2).render([user("a")], {"bos_token": "<s>"})
    assert text.startswith(
        "<s><|im_start|>system\nYou are an AI assistant whose name is InternLM (书生·浦语).\n- Intern"
    )
    assert text.endswith("English and 中文.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    own = built_in(INTERNLM2).render([system("x"), user("a")], {})
    assert own == "<|im_start|>system\nx<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("config", [INTERNVL2, INTERNLM2, QWEN])
def test_roles_that_they_do_not_know_are_refused(config):
    for messages in ([{"role": "tool", "content": "x"}], [user("a"), {"role": "Developer", "content": "x"}]):
        with pytest.raises(ValueError, match=r"refuses these messages: the role (tool|Developer) is unknown; known"):
            built_in(config).render(messages, {})


@pytest.mark.parametrize("content", ["{{ 7 * 7 }}", "{% raw %}", "{% endfor %}", "a\n", "\n a", " ", ""])
@pytest.mark.parametrize("config", [INTERNVL2, INTERNLM2, QWEN])
def test_content_is_no_template_and_keeps_its_spaces(config, content):
    assert f"<|im_start|>user\n{content}<|im_end|>" in built_in(config).render([user(content)], {})


@pytest.mark.parametrize(
    ("config", "saved"), [(INTERNVL2, save_internlm2), (INTERNLM2, save_internlm2), (QWEN, save_qwen)]
)
def test_its_stop_tokens_end_answers(config, saved, tmp_path):
    tokenizer = load(saved(tmp_path, None), config)
    assert tokenizer.has_chat_template
    names = [shown(tokenizer, [i]) for i in tokenizer.eos_ids]
    assert names == ["<|endoftext|>" if config is QWEN else "</s>", "<|im_end|>", "<|im_start|>"]


@pytest.mark.parametrize(
    ("config", "saved"), [(INTERNVL2, save_internlm2), (INTERNLM2, save_internlm2), (QWEN, save_qwen)]
)
def test_a_checkpoints_own_template_goes_first(config, saved, tmp_path):
    tokenizer = load(saved(tmp_path, CHATML), config)
    assert (
        shown(tokenizer, tokenizer.encode_chat([user("a")])) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(tokenizer.eos_ids) == 1
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    changed = load(tmp_path, config)
    assert shown(changed, changed.encode_chat([user("a")])) == "a!"


def test_of_several_templates_the_default_counts(tmp_path):
    folder = save_qwen(tmp_path, None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": several}))
    tokenizer = load(folder, QWEN)
    assert shown(tokenizer, tokenizer.encode_chat([user("a")])) == "a"


@pytest.mark.parametrize(
    ("config", "generation"),
    [
        ({}, {}),
        ({"architectures": []}, {}),
        ({"architectures": ["LlamaForCausalLM"]}, {}),
        (INTERNVL2 | {"template": "Hermes-2"}, {}),
        (INTERNVL2 | {"template": None}, {}),
        (QWEN, {"chat_format": "raw"}),
    ],
)
def test_else_there_is_none(config, generation):
    assert built_in_template(config, generation) is None
    assert built_in_template(QWEN, {"chat_format": "chatml"}) is BUILT_IN["QWenLMHeadModel", None]


def test_a_vocabulary_without_its_control_tokens_gets_none(tmp_path):
    """As of a base model."""
    folder = save_internlm2(tmp_path, None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert not load(folder, INTERNLM2).has_chat_template


def test_the_folders_name_does_not_matter(tmp_path):
    for name in ("internlm2-chat-7b", "Qwen-14B-Chat", "x"):
        assert not load(save_qwen(tmp_path / name, None), {}).has_chat_template
        assert load(save_qwen(tmp_path / name, None), QWEN).has_chat_template
    assert not load(save(byte_level(), tmp_path / "Qwen-14B-Chat-2", None), {}).has_chat_template


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ [][0].x }}"],
)
def test_a_template_that_fails_in_any_way_is_an_error_of_the_caller(template):
    with pytest.raises(ValueError, match="the chat template refuses these messages"):
        ChatTemplate(template).render([user("a")], {})
