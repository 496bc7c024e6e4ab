"""Text to tokens and back with the ``tokenizers`` library alone, as transformers does it.

* **Special tokens.** ``tokenizer.json`` decides what ``encode`` adds, through its post-processor; flags in
  ``tokenizer_config.json`` do not override it (transformers 5 ignores them too when there is a ``tokenizer.json``).
* **BOS exactly once.** Many chat templates write the BOS text themselves, others rely on the tokenizer, and some users paste
  a rendered prompt. No per-model rule is right for all of them (unsloth#10312; lm-evaluation-harness#2676 measured 0.26
  instead of 0.85 without BOS), so it is decided on each rendered prompt: if its first token is BOS already, nothing is added.
* **Chat templates** are programs from strangers: they run in jinja2's immutable sandbox, with the names transformers gives
  them (``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes, loop controls, the ``generation`` tag).
* **Streaming** never shows half a character: a byte-level token may end within one, and the decoder shows U+FFFD for such a
  tail, so text is held back until the tail is complete (see :class:`Detokenizer`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from optkit.errors import ArtifactError, UsageError

Message = Mapping[str, Any]
REPLACEMENT = "\ufffd"
LONGEST_TAIL = 4  # tokens; a UTF-8 character has at most 4 bytes, and a byte-level token has at least one


class Tokenizer:
    """The tokenizer of an artifact or checkpoint directory.

    Args:
        directory: holds ``tokenizer.json`` and perhaps ``tokenizer_config.json`` and ``chat_template.jinja``.

    Raises:
        ArtifactError: there is no ``tokenizer.json``, or it cannot be read.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise ArtifactError(f"{self.directory}: no tokenizer.json, so text needs to be given as token ids")
        try:
            self._core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"{path}: not a tokenizer this version of `tokenizers` reads ({error})") from error
        self._core.no_padding()
        self._core.no_truncation()
        self._config = _read_json(self.directory / "tokenizer_config.json")
        self.texts_alone: dict[bool, dict[int, str]] = {True: {}, False: {}}  # what detokenizers met, by skip_special_tokens

    @property
    def vocab_size(self) -> int:
        """Ids, added tokens included."""
        return self._core.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Id -> text of the special tokens, which decoding leaves out."""
        return {i: token.content for i, token in self._core.get_added_tokens_decoder().items() if token.special}

    def token_id(self, text: str | None) -> int | None:
        return None if text is None else self._core.token_to_id(text)

    def named_token(self, name: str) -> str | None:
        """The text of ``bos_token``, ``eos_token``, … in tokenizer_config.json."""
        value = self._config.get(name)
        return value.get("content") if isinstance(value, Mapping) else value

    @cached_property
    def bos_token_id(self) -> int | None:
        return self.token_id(self.named_token("bos_token"))

    @cached_property
    def eos_token_id(self) -> int | None:
        return self.token_id(self.named_token("eos_token"))

    @cached_property
    def pad_token_id(self) -> int | None:
        return self.token_id(self.named_token("pad_token"))

    @cached_property
    def adds_bos(self) -> bool:
        """Plain text gets a BOS from the post-processor."""
        return self.bos_token_id is not None and self._core.encode("", add_special_tokens=True).ids[:1] == [self.bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens are added unless the text already begins with BOS."""
        ids = self._core.encode(text, add_special_tokens=False).ids
        if not add_special_tokens or (self.bos_token_id is not None and ids[:1] == [self.bos_token_id]):
            return ids
        return self._core.encode(text, add_special_tokens=True).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        return Detokenizer(self, skip_special_tokens)

    # ── chat ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """Name -> Jinja source; files win over tokenizer_config.json, as in transformers."""
        found: dict[str, str] = {}
        inline = self._config.get("chat_template")
        if isinstance(inline, str):
            found["default"] = inline
        elif isinstance(inline, Sequence):
            found.update({entry["name"]: entry["template"] for entry in inline})
        for path in sorted((self.directory / "additional_chat_templates").glob("*.jinja")):
            found[path.stem] = path.read_text(encoding="utf-8")
        main = self.directory / "chat_template.jinja"
        if main.is_file():
            found["default"] = main.read_text(encoding="utf-8")
        return found

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text the chat template makes of ``messages`` (each with ``role`` and ``content``).

        Args:
            messages: the conversation.
            add_generation_prompt: end with what opens the assistant's answer.
            template: name of a template; by default ``tool_use`` when there are tools and such a template, else ``default``.
            tools: JSON schemas of functions the model may call.
            variables: further names for the template (``enable_thinking=False``, …).

        Raises:
            UsageError: no template, a message without role or content, or the template refuses the conversation.
        """
        for message in messages:
            if "role" not in message:
                raise UsageError(f"chat message {message!r}: needs a 'role' (system, user, assistant, …)")
        name = template or ("tool_use" if tools and "tool_use" in self.chat_templates else "default")
        if name not in self.chat_templates:
            known = ", ".join(self.chat_templates) or "none"
            raise UsageError(f"{self.directory}: no chat template {name!r} (there is {known}); give the prompt as text")
        special = {key: self.named_token(key) for key in self._config if key.endswith("_token") and self.named_token(key)}
        try:
            return self._compiled(name).render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **special,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise UsageError(f"{self.directory}: the chat template refuses this conversation: {error}") from error

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a rendered chat, with BOS exactly once if the tokenizer gives plain text a BOS."""
        ids = self.encode(self.render_chat(messages, **options), add_special_tokens=False)
        if self.adds_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id or 0)
        return ids

    def _compiled(self, name: str) -> jinja2.Template:
        cache = self.__dict__.setdefault("_templates", {})
        if name not in cache:
            try:
                cache[name] = _environment().from_string(self.chat_templates[name])
            except jinja2.TemplateError as error:
                raise ArtifactError(f"{self.directory}: chat template {name!r} does not compile: {error}") from error
        return cache[name]


class Detokenizer:
    """Text of one row's tokens, piece by piece; the pieces joined are ``decode`` of all tokens.

    The new piece is what decoding the last few tokens shows beyond what it showed without the new one, so rules that look
    at neighbouring tokens (joined spaces, byte fallback) come out right. A piece that ends in U+FFFD is held back: its last
    character may lack bytes. After LONGEST_TAIL tokens it cannot be completed any more and is shown as it is.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens)
        self._hidden = tokenizer.special_tokens if skip_special_tokens else {}
        self._alone = tokenizer.texts_alone[skip_special_tokens]
        self._tokens: list[int] = []  # those whose text was shown last, then those held back
        self._shown = 0
        self._context = ""  # the text of the first ``_shown`` of them

    def push(self, token: int) -> str:
        """Adds a token; the text that is now certain, perhaps empty."""
        if token in self._hidden:
            return ""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(REPLACEMENT) and len(self._tokens) - self._shown < LONGEST_TAIL:
            return ""
        return self._take(text)

    def flush(self) -> str:
        """What was held back, at the end of the row."""
        return self._take(self._decode(self._tokens))

    def _take(self, text: str) -> str:
        piece = text[len(self._context) :]
        self._tokens = self._tokens[self._shown :] or self._tokens
        self._shown = len(self._tokens)
        if self._shown != 1:
            self._context = self._decode(self._tokens)
        else:
            (token,) = self._tokens
            if token not in self._alone:
                self._alone[token] = self._decode([token])
            self._context = self._alone[token]
        return piece


class StopStrings:
    """Finds the first stop string in a stream of text pieces and never lets a part of one through.

    Args:
        stops: the strings; the earliest occurrence wins, of several at one place the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise UsageError("stop: an empty string would stop everything; leave it out")
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Text that is certain not to belong to a stop string, and the stop string that was found, if any."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: hit[0])
            self._held = ""
            return text[:at], stop
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, when no stop string came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that is a beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path}: not JSON ({error})") from error
    return data if isinstance(data, dict) else {}


# ── the sandbox ───────────────────────────────────────────────────────────────────────────────────────────────────────


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's part for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
