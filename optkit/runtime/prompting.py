"""From what a person types to what ``generate`` takes: a chat message where the model has a template, plain text elsewhere.

An instruct model answers a message and continues plain text; a base model has no template and can only continue. So the
default follows the artifact: with a chat template the text becomes a user message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optkit.errors import UsageError
from optkit.runtime.base import Session


def has_chat_template(session: Session) -> bool:
    return session.has_tokenizer and "default" in session.tokenizer.chat_templates


def as_prompt(
    session: Session, text: str, system: str | None = None, chat: bool | None = None
) -> str | list[Mapping[str, Any]]:
    """The prompt for ``generate``.

    Args:
        session: decides when ``chat`` is ``None``.
        text: what the person wrote.
        system: a system message.
        chat: as a message, or as plain text to continue.

    Raises:
        UsageError: a chat or a system message is asked for, and there is no template.
    """
    template = has_chat_template(session)
    if (chat or (system and chat is None)) and not template:
        raise UsageError(
            f"{session.directory}: has no chat template, so text can only be continued: leave out --chat and --system"
        )
    if chat is False and system:
        raise UsageError("a system message needs the chat template: leave out --no-chat")
    if not (template if chat is None else chat):
        return text
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": text}]
