"""Text in and out, against transformers where it does the same thing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from optkit.errors import ArtifactError, UsageError
from optkit.runtime.tokenizer import StopStrings, Tokenizer
from tests.runtime.scripted import BOS, byte_tokens, write_tokenizer

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WRITES_BOS = "{{ bos_token }}" + PLAIN
CHAT = [{"role": "user", "content": "hé"}]


def theirs(directory: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(directory)


def write_sentencepiece_like(directory: Path) -> Path:
    """Spaces as a leading mark, unknown characters as single bytes, the first space dropped: what llama-2 tokenizers do."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "."]
    core = Core(models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True,
    ))  # fmt: skip
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.pre_tokenizer = None or pre_tokenizers.Split("\n", "isolated")
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    directory.mkdir(parents=True)
    core.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return directory


@pytest.mark.parametrize("bos", [False, True])
def test_encoding_and_decoding_equal_transformers(tmp_path: Path, bos: bool) -> None:
    directory = write_tokenizer(tmp_path / "t", bos=bos)
    ours, want = Tokenizer(directory), theirs(directory)
    for text in ("hello wörld", "日本 🙂", "a</s>b", "  two  spaces\n"):
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == want(text, add_special_tokens=special).input_ids
        ids = want(text).input_ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == want.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("template", [PLAIN, WRITES_BOS])
def test_a_chat_gets_bos_once_if_tokenizer_or_template_want_one(tmp_path: Path, bos: bool, template: str) -> None:
    """unsloth#10312: of 30 chat models 11 got two BOS, and a blanket fix took it from 2; lm-evaluation-harness#2676."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "t", bos=bos, template=template))
    ids = tokenizer.encode_chat(CHAT)
    assert ids.count(BOS) == (1 if bos or template is WRITES_BOS else 0)
    assert ids[ids.count(BOS) :] == byte_tokens("user: hé\n")


def test_a_pasted_rendered_prompt_does_not_get_a_second_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "t", bos=True))
    assert tokenizer.encode("hi") == [BOS, *byte_tokens("hi")]
    assert tokenizer.encode("<s>hi") == [BOS, *byte_tokens("hi")]
    assert tokenizer.encode("hi", add_special_tokens=False) == byte_tokens("hi")


def test_templates_render_as_in_transformers(tmp_path: Path) -> None:
    template = """{%- set ns = namespace(n=0) -%}
    {% for m in messages %}
        {% if m.role == 'tool' %}{% continue %}{% endif %}
        {%- set ns.n = ns.n + 1 %}
<{{ m['role'] }} {{ ns.n }}>{{ m.content | trim }}{{ m.extra | tojson if m.extra -}}
{% generation %}!{% endgeneration %}{{ eos_token }}
    {% endfor %}
{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}{{ strftime_now('%Y')[:2] }}
{% if add_generation_prompt %}<assistant>{% endif %}
{{- flag }}"""
    directory = write_tokenizer(tmp_path / "t", template=template)
    messages = [
        {"role": "system", "content": " <b>&'x' "},
        {"role": "tool", "content": "no"},
        {"role": "user", "content": "é", "extra": {"b": "<ü>", "a": [1]}},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for prompt in (True, False):
        ours = Tokenizer(directory).render_chat(messages, add_generation_prompt=prompt, tools=tools, flag="on")
        want = theirs(directory).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, tools=tools, flag="on"
        )
        assert ours == want


def test_a_template_can_refuse_and_cannot_escape(tmp_path: Path) -> None:
    refusing = Tokenizer(write_tokenizer(tmp_path / "a", template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(UsageError, match="roles must alternate"):
        refusing.render_chat(CHAT)
    for attack in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set _ = messages.append(1) %}",
    ):
        tokenizer = Tokenizer(write_tokenizer(tmp_path / str(abs(hash(attack))), template=attack))
        with pytest.raises(UsageError, match=r"unsafe|not safe|undefined"):
            tokenizer.render_chat(CHAT)


def test_named_templates_and_the_tool_template(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "t", chat_template=named))
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, tools=[{}]) == "tools"
    with pytest.raises(UsageError, match=r"no chat template 'x' \(there is default, tool_use\)"):
        tokenizer.render_chat(CHAT, template="x")
    with pytest.raises(UsageError, match="there is none"):
        Tokenizer(write_tokenizer(tmp_path / "bare")).render_chat(CHAT)
    with pytest.raises(UsageError, match="role"):
        tokenizer.render_chat([{"content": "x"}])


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("text", ["ab a b.", "ab 日 a🙂b é.", "日本語", "🙂" * 9, "a\nb", "é" + "a" * 20 + "日", " b"])
def test_pieces_joined_are_the_decoded_text_and_whole_characters(tmp_path: Path, kind: str, text: str) -> None:
    make = write_tokenizer if kind == "bytes" else write_sentencepiece_like
    tokenizer = Tokenizer(make(tmp_path / "t"))
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in ids]
    assert not any("�" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


def test_special_tokens_between_the_bytes_of_a_character_do_not_break_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "t"))
    first, *rest = byte_tokens("日")
    ids = [*byte_tokens("a"), BOS, first, *[BOS] * 30, *rest, BOS]
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) == "a日" == tokenizer.decode(ids)
    shown = tokenizer.detokenizer(skip_special_tokens=False)
    assert "".join(map(shown.push, [*byte_tokens("a"), BOS])) + shown.flush() == "a<s>"


def test_stop_strings_hold_back_what_may_become_one_and_release_the_rest() -> None:
    stops = StopStrings(["abc", "bd"])
    assert stops.push("xa") == ("x", None)
    assert stops.push("b") == ("", None)
    assert stops.push("e") == ("abe", None)
    assert stops.push("aab") == ("a", None)
    assert stops.push("dc") == ("a", "bd")
    assert StopStrings(["ab", "abc"]).push("xabc") == ("x", "abc")
    held = StopStrings(["abc"])
    assert held.push("zab") == ("z", None)
    assert held.flush() == "ab"
    with pytest.raises(UsageError):
        StopStrings([""])
