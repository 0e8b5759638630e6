"""`chat_text.py`: chat templates that are missing, refuse the system role, or refuse everything (fault A5)."""

from __future__ import annotations

import logging

import pytest
from tiny_models import tiny_tokenizer

from autoround_fp8.calibration.chat_text import ChatRenderer, add_system_message, merge_system_message

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "be kind"}
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def test_template_is_applied_without_a_generation_prompt():
    rendered = ChatRenderer(tiny_tokenizer(), "data").render([SYSTEM, USER, ASSISTANT])
    assert rendered is not None
    assert rendered.text == "<s>system : be kind user : hi assistant : yo "
    assert not rendered.add_special_tokens


def test_a5_no_template_gives_plain_text_with_one_warning(caplog: pytest.LogCaptureFixture):
    renderer = ChatRenderer(tiny_tokenizer(chat_template=None), "data.jsonl")
    texts = [renderer.render([SYSTEM, USER]), renderer.render([USER, ASSISTANT])]
    assert [t.text for t in texts if t] == ["system: be kind\nuser: hi", "user: hi\nassistant: yo"]
    assert all(t.add_special_tokens for t in texts if t)
    assert len(caplog.records) == 1
    assert "data.jsonl: the tokenizer has no chat template" in caplog.text


def test_a5_refused_system_role_is_retried_once_without_it(caplog: pytest.LogCaptureFixture):
    renderer = ChatRenderer(tiny_tokenizer(NO_SYSTEM), "data")
    for _ in range(2):
        rendered = renderer.render([SYSTEM, USER, ASSISTANT])
        assert rendered is not None
        assert rendered.text == "[user]be kind\n\nhi[assistant]yo"
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "System role not supported" in caplog.text
    assert renderer.num_refused == 0


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('never') }}", "never"),
        ("{{ messages[0].content.missing.deeper }}", "UndefinedError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% broken", "TemplateSyntaxError"),
    ],
)
def test_a5_template_that_always_fails_is_counted_not_raised(template: str, reason: str):
    renderer = ChatRenderer(tiny_tokenizer(template), "data")
    assert renderer.render([SYSTEM, USER]) is None
    assert renderer.render([USER]) is None
    assert renderer.num_refused == 2
    assert reason in renderer.first_refusal


def test_a5_object_without_any_template_attribute_is_no_attribute_error():
    rendered = ChatRenderer(object(), "data").render([USER])
    assert rendered is not None
    assert rendered.text == "user: hi"


def test_merge_and_add_system_message_leave_their_input_alone():
    chat = [SYSTEM, USER]
    assert merge_system_message(chat) == [{"role": "user", "content": "be kind\n\nhi"}]
    assert merge_system_message([SYSTEM, ASSISTANT]) == [ASSISTANT]
    assert add_system_message([USER], "new") == [{"role": "system", "content": "new"}, USER]
    assert add_system_message(chat, "new") is chat
    assert add_system_message([USER], None) == [USER]
    assert chat == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
