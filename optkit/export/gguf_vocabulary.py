"""A tokenizer as the metadata of a GGUF file.

llama.cpp has tokenizers of its own and is told which one by name: ``gpt2`` (byte-level BPE, with ``pre`` naming the way text is
split first) or ``llama`` (SentencePiece's BPE, which merges by a score for each token). The names are the file format's. A
way of splitting that has no name here is refused, for with another one the model would read other tokens than it was trained
on, and nothing would say so.

SentencePiece's scores are lost in a ``tokenizer.json``; its merges are sorted by them, so the negative rank of the merge that
makes a token orders them the same way.

Source: the GGUF specification in ggml's documentation, "Tokenizer".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optkit.checkpoint import files
from optkit.errors import UnsupportedError
from optkit.manifest import ModelSpec

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: regular expression of a Split step -> llama.cpp's name
SPLITS = {_WORDS % "{1,3}": "llama-bpe", _WORDS % "": "qwen2"}
SPACE = "\u2581"


def vocabulary(directory: Path, spec: ModelSpec) -> dict[str, Any]:
    """The metadata of the tokenizer in ``directory``, without the ``tokenizer.`` prefix of its keys.

    Args:
        directory: holds ``tokenizer.json``.
        spec: gives the special ids and the number of rows.

    Raises:
        UnsupportedError: no ``tokenizer.json``, or one that llama.cpp has no counterpart for.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedError(f"{directory}: no tokenizer.json, and a GGUF file has its tokenizer inside")
    described = files.read_json(path)
    model = described["model"]
    if model.get("type") != "BPE":
        raise UnsupportedError(f"{path}: a {model.get('type')} tokenizer; written to GGUF are byte-level and SentencePiece BPE")
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    added = {entry["id"]: entry for entry in described.get("added_tokens", ())}
    tokens, types = _tokens(model, added, spec.vocab_size)
    found: dict[str, Any] = {"ggml.tokens": tokens, "ggml.token_type": types}
    if model.get("byte_fallback"):
        found |= {"ggml.model": "llama", "ggml.scores": _scores(tokens, types, merges)}
        found["ggml.add_space_prefix"] = _adds_space(described)
    else:
        found |= {"ggml.model": "gpt2", "ggml.pre": _pre(described, path), "ggml.merges": [" ".join(m) for m in merges]}
    return {**found, **_special(directory, path, spec)}


def _tokens(model: dict[str, Any], added: dict[int, Any], rows: int) -> tuple[list[str], list[int]]:
    names = {index: token for token, index in model["vocab"].items()} | {i: entry["content"] for i, entry in added.items()}
    if names and max(names) >= rows:
        raise UnsupportedError(f"the tokenizer has ids up to {max(names)}, and the model has {rows} rows")
    tokens, types = [], []
    for index in range(rows):
        token = names.get(index)
        tokens.append(f"[PAD{index}]" if token is None else token)
        if token is None:
            types.append(UNUSED)
        elif index in added:
            types.append(CONTROL if added[index].get("special") else USER_DEFINED)
        elif token == model.get("unk_token"):
            types.append(UNKNOWN)
        else:
            byte = model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x")
            types.append(BYTE if byte else NORMAL)
    unknown = model.get("unk_token")
    if model.get("byte_fallback") and unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    return tokens, types


def _scores(tokens: list[str], types: list[int], merges: list[tuple[str, ...]]) -> list[float]:
    rank: dict[str, int] = {}
    for index, pair in enumerate(merges):
        rank.setdefault("".join(pair), index)
    single = -float(len(merges))
    others = [single if kind == NORMAL else 0.0 for kind in types]
    return [-float(rank[token]) if token in rank else other for token, other in zip(tokens, others, strict=True)]


def _steps(described: dict[str, Any], key: str, parts: str) -> list[dict[str, Any]]:
    step = described.get(key)
    if step is None:
        return []
    return list(step[parts]) if step["type"] == "Sequence" else [step]


def _adds_space(described: dict[str, Any]) -> bool:
    """Is a space put before the text?"""
    normal = _steps(described, "normalizer", "normalizers")
    split = _steps(described, "pre_tokenizer", "pretokenizers")
    known = {"Prepend", "Replace", "Metaspace"}
    odd = [step["type"] for step in (*normal, *split) if step["type"] not in known]
    if odd:
        raise UnsupportedError(f"the tokenizer's {odd[0]} step has no counterpart in GGUF's SentencePiece tokenizer")
    prepends = any(step["type"] == "Prepend" for step in normal)
    return prepends or any(step.get("prepend_scheme", "always") != "never" for step in split if step["type"] == "Metaspace")


def _pre(described: dict[str, Any], path: Path) -> str:
    """llama.cpp's name of the way text is split before BPE."""
    normal = [step["type"] for step in _steps(described, "normalizer", "normalizers") if step["type"] != "NFC"]
    steps = _steps(described, "pre_tokenizer", "pretokenizers")
    kinds = [step["type"] for step in steps]
    name = None
    if not normal and kinds and kinds[-1] == "ByteLevel" and not steps[-1].get("add_prefix_space"):
        own = bool(steps[-1].get("use_regex", True))
        if kinds == ["ByteLevel"] and own:
            name = "gpt-2"
        elif kinds == ["Digits", "ByteLevel"] and own and steps[0].get("individual_digits"):
            name = "smollm"
        elif kinds == ["Split", "ByteLevel"] and not own and steps[0].get("behavior") == "Isolated":
            name = SPLITS.get(steps[0]["pattern"].get("Regex", ""))
    if name is None or bool(described["model"].get("ignore_merges")) != (name == "llama-bpe"):
        raise UnsupportedError(
            f"{path}: splits text in a way ({', '.join([*normal, *kinds]) or 'not at all'}) whose name in GGUF optkit does not "
            "know; convert this model with llama.cpp's own script"
        )
    return name


def _special(directory: Path, path: Path, spec: ModelSpec) -> dict[str, Any]:
    import tokenizers

    found: dict[str, Any] = {}
    for name, index in (("bos", spec.bos_token_id), ("padding", spec.pad_token_id)):
        if index is not None:
            found[f"ggml.{name}_token_id"] = index
    for name, index in zip(("eos", "eot"), spec.eos_token_ids, strict=False):
        found[f"ggml.{name}_token_id"] = index
    encoded = tokenizers.Tokenizer.from_file(str(path)).encode("a").ids
    found["ggml.add_bos_token"] = bool(encoded) and encoded[0] == spec.bos_token_id
    found["ggml.add_eos_token"] = bool(encoded) and len(encoded) > 1 and encoded[-1] in spec.eos_token_ids
    template = directory / "chat_template.jinja"
    config = files.read_json(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").is_file() else {}
    text = template.read_text(encoding="utf-8") if template.is_file() else config.get("chat_template")
    if isinstance(text, list):
        text = next((entry["template"] for entry in text if entry.get("name") == "default"), None)
    return {**found, "chat_template": text} if text else found
