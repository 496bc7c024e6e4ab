"""The arguments of ``generate``, their defaults and where those come from.

Order of precedence: what the caller gives; the artifact's ``generation_config.json`` for the sampling filters, once sampling
is asked for, and for penalties; the neutral value. Generation is greedy unless ``do_sample`` or a sampling filter is given,
so that the same call gives the same text.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from optkit.errors import LimitError, UsageError, nearest
from optkit.runtime.sampling import LogitsProcessor, SamplingParams

if TYPE_CHECKING:
    from optkit.runtime.base import Session

DEFAULT_NEW_TOKENS = 256
FILTERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
PENALTIES = ("repetition_penalty", "no_repeat_ngram_size")


@dataclass(frozen=True)
class GenerationOptions:
    """Every argument of ``generate`` and ``stream`` after the prompts.

    Attributes:
        max_new_tokens: tokens per row; ``None`` is the artifact's own default or 256, or less if the limit is near.
        min_new_tokens: end-of-sequence tokens are banned before that many.
        do_sample: draw; ``None`` means yes if one of temperature, top_k, top_p, min_p, typical_p is given.
        temperature, top_k, top_p, min_p, typical_p: see :class:`SamplingParams`. A temperature of 0 is greedy.
        repetition_penalty, presence_penalty, frequency_penalty, no_repeat_ngram_size: see :class:`SamplingParams`.
        logit_bias: token id or tuple of ids -> number added.
        bad_words: strings or token sequences that must not appear.
        seed: one number, or one per row; ``None`` takes a random one, which the result names.
        stop: strings that end a row; they are not part of the text.
        eos_token_id: ids that end a row, instead of the model's own (union of config, generation config and tokenizer).
        ignore_eos: go on to ``max_new_tokens`` whatever comes.
        num_return_sequences: answers per prompt.
        num_beams: beam search with that many beams (greedy scoring, no sampling).
        length_penalty: exponent of the length in a beam's score.
        early_stopping: end beam search as soon as ``num_beams`` answers are complete.
        logprobs: natural-log probabilities of the chosen tokens under the model (before penalties and temperature).
        top_logprobs: also the most likely alternatives, that many.
        logits_processors: hooks, see :class:`LogitsProcessor`.
        stream: called with every :class:`StreamEvent`.
        add_special_tokens: let the tokenizer add BOS and the like to text prompts.
        skip_special_tokens: leave special tokens out of the text.
        chat_options: further arguments of the chat template (``tools``, ``enable_thinking``, …).
        reuse_prefix: continue from cached tokens that the prompt begins with; ``None`` does it for a conversation that has an
            assistant's turn in it. The logits then differ by rounding from those of a fresh prefill.
        speculative: guess tokens and check several at once: ``prompt_lookup`` guesses from the text so far, an open session
            of a smaller model with the same vocabulary drafts; see :mod:`optkit.runtime.speculate`.
        draft_tokens: guesses at most per step.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int | None = None
    logit_bias: Mapping[int | tuple[int, ...], float] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    seed: int | Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    eos_token_id: int | Sequence[int] | None = None
    ignore_eos: bool = False
    num_return_sequences: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    logits_processors: Sequence[LogitsProcessor] = ()
    stream: Callable[[Any], object] | None = None
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    chat_options: Mapping[str, Any] | None = None
    reuse_prefix: bool | None = None
    speculative: Any = None
    draft_tokens: int = 8

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens {self.max_new_tokens}: at least 1")
        for name in ("num_return_sequences", "num_beams", "draft_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: at least 1")
        if self.top_logprobs < 0:
            raise UsageError(f"top_logprobs {self.top_logprobs}: 0 or a number of tokens")
        if self.num_beams > 1:
            if self.do_sample or self.speculative or self.stream or self.logprobs:
                raise UsageError("num_beams above 1 does not go with do_sample, speculative, stream or logprobs")
            if self.num_return_sequences > self.num_beams:
                raise UsageError(f"num_return_sequences {self.num_return_sequences}: at most num_beams ({self.num_beams})")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> GenerationOptions:
        """From keyword arguments; an unknown one is an error that names the nearest."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise UsageError(f"generate has no argument {name!r}{nearest(name, known)}")
        return cls(**given)


@dataclass(frozen=True)
class Request:
    """Options resolved for one session and its prompts.

    Attributes:
        prompts: token ids, one list per prompt.
        options: as given.
        sampling: per token.
        max_new_tokens: resolved.
        eos: ids that end a row.
        stops: strings that end a row.
        seeds: key of each row's draws (prompts times answers).
        conversation: the prompt is a chat with an assistant's turn in it.
    """

    prompts: list[list[int]]
    options: GenerationOptions
    sampling: SamplingParams
    max_new_tokens: int
    eos: frozenset[int]
    stops: tuple[str, ...]
    seeds: tuple[tuple[int, int], ...]
    conversation: bool


def resolve(session: Session, prompts: Any, options: GenerationOptions) -> Request:
    """Tokenizes, fills in defaults and refuses what does not fit, before anything runs.

    Raises:
        UsageError: prompts of no known form, or arguments that contradict each other.
        LimitError: prompt and answer do not fit.
    """
    token_prompts, conversation = encode_prompts(session, prompts, options)
    rows = len(token_prompts) * max(options.num_return_sequences, options.num_beams)
    longest = max(map(len, token_prompts))
    new = _max_new_tokens(session, longest, options)
    session.check_fits(longest, new, rows)
    eos, stops = _ends(session, options)
    return Request(token_prompts, options, _sampling(session, options), new, eos, stops, _seeds(options, rows), conversation)


def encode_prompts(session: Session, prompts: Any, options: GenerationOptions) -> tuple[list[list[int]], bool]:
    """Token ids of one or many prompts, each a string, a list of ids or a chat; and whether it is a chat being continued."""
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | np.integer | Mapping)):
        prompts = [prompts]
    if not prompts:
        raise UsageError("no prompt: give a string, token ids, chat messages, or a list of one of these")
    ids, conversation = [], False
    for prompt in prompts:
        if isinstance(prompt, str):
            ids.append(session.tokenizer.encode(prompt, options.add_special_tokens))
        elif len(prompt) and isinstance(prompt[0], Mapping):
            ids.append(session.tokenizer.encode_chat(prompt, **(options.chat_options or {})))
            conversation = any(message.get("role") == "assistant" for message in prompt)
        else:
            ids.append([int(token) for token in prompt])
    for number, prompt in enumerate(ids):
        if not prompt:
            raise UsageError(f"prompt {number} is empty: give at least one token (a BOS token starts a text from nothing)")
    return ids, conversation


def _max_new_tokens(session: Session, longest: int, options: GenerationOptions) -> int:
    if options.max_new_tokens is not None:
        return options.max_new_tokens
    room = session.max_seq_len - longest
    if room < 1:
        raise LimitError(f"a prompt of {longest} tokens leaves no room for an answer: max_seq_len is {session.max_seq_len}")
    return min(room, int(session.generation_defaults.get("max_new_tokens") or DEFAULT_NEW_TOKENS))


def _ends(session: Session, options: GenerationOptions) -> tuple[frozenset[int], tuple[str, ...]]:
    """Ids and strings that end a row. A stop string that is one special token is an id: decoding leaves it out of the text."""
    if options.ignore_eos:
        eos: set[int] = set()
    elif options.eos_token_id is None:
        eos = set(session.spec.eos_token_ids)
    else:
        given = options.eos_token_id
        eos = {given} if isinstance(given, int) else set(given)
    stops = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())
    if any(not stop for stop in stops):
        raise UsageError("stop: an empty string would stop everything; leave it out")
    if stops and options.skip_special_tokens:
        special = {text: token for token, text in session.tokenizer.special_tokens.items()}
        eos |= {special[stop] for stop in stops if stop in special}
        stops = tuple(stop for stop in stops if stop not in special)
    return frozenset(eos), stops


def _sampling(session: Session, options: GenerationOptions) -> SamplingParams:
    defaults = session.generation_defaults
    given = {name: getattr(options, name) for name in FILTERS if getattr(options, name) is not None}
    do_sample = bool(given) if options.do_sample is None else options.do_sample
    if options.num_beams > 1 or given.get("temperature") == 0:
        do_sample = False
    filters = {name: given.get(name, defaults.get(name)) for name in FILTERS} if do_sample else {}
    penalties = {
        name: getattr(options, name) if getattr(options, name) is not None else defaults.get(name) for name in PENALTIES
    }
    chosen = {name: value for name, value in {**filters, **penalties}.items() if value is not None}
    return SamplingParams(
        do_sample=do_sample,
        min_new_tokens=options.min_new_tokens,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=dict(options.logit_bias or {}),
        bad_words=_bad_words(session, options.bad_words or ()),
        **chosen,
    )


def _bad_words(session: Session, words: Sequence[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Token sequences; a string is banned as it stands and after a space."""
    found: list[tuple[int, ...]] = []
    for word in words:
        if isinstance(word, str):
            forms = (word, " " + word) if not word.startswith(" ") else (word,)
            found += [tuple(session.tokenizer.encode(form, add_special_tokens=False)) for form in forms]
        else:
            found.append(tuple(int(token) for token in word))
    return tuple(dict.fromkeys(found))


def _seeds(options: GenerationOptions, rows: int) -> tuple[tuple[int, int], ...]:
    """One seed makes a different sequence for each row; seeds given per row are used as they are, wherever the row stands."""
    if options.seed is None or isinstance(options.seed, int):
        seed = secrets.randbits(63) if options.seed is None else options.seed
        return tuple((seed, row) for row in range(rows))
    if len(options.seed) != rows:
        raise UsageError(f"seed: {len(options.seed)} numbers for {rows} rows")
    return tuple((int(seed), 0) for seed in options.seed)
