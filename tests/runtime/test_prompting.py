"""From typed text to what ``generate`` takes."""

from types import SimpleNamespace

import pytest

from optkit.errors import UsageError
from optkit.runtime.prompting import as_prompt


def session(template):
    templates = {"default": "…"} if template else {}
    return SimpleNamespace(has_tokenizer=True, tokenizer=SimpleNamespace(chat_templates=templates), directory="dir")


def test_a_model_with_a_template_gets_a_message_and_one_without_gets_the_text():
    assert as_prompt(session(True), "hi") == [{"role": "user", "content": "hi"}]
    assert as_prompt(session(False), "hi") == "hi"


def test_plain_text_can_be_asked_for():
    assert as_prompt(session(True), "hi", chat=False) == "hi"


def test_a_system_message_comes_first():
    assert as_prompt(session(True), "hi", system="be brief")[0] == {"role": "system", "content": "be brief"}


@pytest.mark.parametrize("options", [{"chat": True}, {"system": "x"}])
def test_what_needs_a_template_is_refused_without_one(options):
    with pytest.raises(UsageError, match="has no chat template"):
        as_prompt(session(False), "hi", **options)


def test_a_system_message_without_chat_is_refused():
    with pytest.raises(UsageError, match="leave out --no-chat"):
        as_prompt(session(True), "hi", system="x", chat=False)


def test_a_model_without_a_tokenizer_gets_the_text():
    assert as_prompt(SimpleNamespace(has_tokenizer=False, directory="dir"), "hi") == "hi"
