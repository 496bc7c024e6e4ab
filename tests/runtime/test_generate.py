"""The loop, on a session whose every answer is known; and on real backends where two of them must agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optkit.errors import EngineError, LimitError, UsageError
from optkit.runtime.limits import SessionLimits
from optkit.runtime.sampling import log_softmax
from optkit.runtime.session import open_session
from tests.runtime.scripted import (
    BOS,
    END,
    EOS,
    VOCAB,
    ScriptedSession,
    byte_tokens,
    one_hot,
    random_model,
    saying,
    write_tokenizer,
)

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model", template=CHAT)


def speaker(directory: Path, text: str, **changes: object) -> ScriptedSession:
    """Answers the prompt "?" with ``text``, one byte per token."""
    return ScriptedSession(directory, saying({tuple(byte_tokens("?")): byte_tokens(text)}), **changes)


def test_n_tokens_cost_one_prefill_and_n_minus_one_decodes(directory: Path) -> None:
    session = speaker(directory, "abcdefgh")
    result = session.generate("?", max_new_tokens=5)
    assert result.text == "abcde"
    assert result.sequences[0].finish_reason == "length"
    assert [name for name, _ in session.runs] == ["extend"] + ["step"] * 4
    assert (result.stats.prefills, result.stats.decodes, result.stats.new_tokens) == (1, 4, 5)
    session.runs.clear()
    session.generate("?", max_new_tokens=1)
    assert [name for name, _ in session.runs] == ["extend"]


def test_every_token_of_the_eos_union_ends_a_row_and_stays_out_of_the_text(directory: Path) -> None:
    for end in (EOS, END):
        session = ScriptedSession(directory, saying({tuple(byte_tokens("?")): [*byte_tokens("hi"), end, *byte_tokens("no")]}))
        answer = session.generate("?", max_new_tokens=9).sequences[0]
        assert (answer.text, answer.tokens[-1], answer.finish_reason) == ("hi", end, "eos")
    session = ScriptedSession(directory, saying({tuple(byte_tokens("?")): [*byte_tokens("hi"), END, *byte_tokens("no")]}))
    assert session.generate("?", max_new_tokens=5, ignore_eos=True).tokens[0][2:] == [END, *byte_tokens("no")]
    assert session.generate("?", max_new_tokens=5, eos_token_id=byte_tokens("i")[0]).text == "hi"


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [("END", "one two ", "END"), (["xx", "END"], "one two ", "END"), ("two END", "one ", "two END"),
     ("é", "one two END caf", "é"), (["END", "wo E"], "one t", "wo E"), ("nothing", "one two END café", None),
     ("ENDE", "one two END café", None)],
)  # fmt: skip
def test_stop_strings_are_found_across_token_borders_and_never_shown(directory: Path, stop, text, found) -> None:
    session = speaker(directory, "one two END café")
    answer = session.generate("?", max_new_tokens=60, stop=stop).sequences[0]
    assert (answer.text, answer.stop) == (text, found)
    assert answer.finish_reason == ("stop" if found else "eos")
    pieces = [event.text for event in session.stream("?", max_new_tokens=60, stop=stop)]
    assert "".join(pieces) == text


def test_no_tokens_are_computed_after_a_stop_string(directory: Path) -> None:
    session = speaker(directory, "one END and much more")
    assert len(session.generate("?", max_new_tokens=60, stop="END").tokens[0]) == len("one END")


def test_a_special_token_as_stop_string_stops_though_decoding_hides_it(directory: Path) -> None:
    session = ScriptedSession(directory, saying({tuple(byte_tokens("?")): [*byte_tokens("a"), BOS, *byte_tokens("b")]}))
    assert session.generate("?", max_new_tokens=9, stop="<s>").text == "a"


@pytest.mark.parametrize("text", ["naïve café", "日本語のテキスト", "🙂🙃 emoji 👩‍👩‍👧", "mixed ß日🙂a", "½"])
def test_streaming_never_shows_half_a_character(directory: Path, text: str) -> None:
    session = speaker(directory, text)
    pieces = [event.text for event in session.stream("?", max_new_tokens=200)]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_a_row_cut_inside_a_character_shows_the_cut_only_at_the_end(directory: Path) -> None:
    session = speaker(directory, "ab日")
    events = list(session.stream("?", max_new_tokens=4))
    assert [event.text for event in events] == ["a", "b", "", "�"]
    assert session.generate("?", max_new_tokens=4).text == session.tokenizer.decode(byte_tokens("ab日")[:4])


def test_bytes_that_are_no_text_do_not_hold_the_stream_back_forever(directory: Path) -> None:
    junk = [byte_tokens("日")[0]] * 40
    session = ScriptedSession(directory, saying({tuple(byte_tokens("?")): junk}))
    shown = [event.text for event in session.stream("?", max_new_tokens=40, ignore_eos=True)]
    assert any(shown[:8])
    assert "".join(shown) == session.tokenizer.decode(junk)


def test_callback_and_iterator_see_the_same_events(directory: Path) -> None:
    session, seen = speaker(directory, "hello"), []
    result = session.generate("?", max_new_tokens=9, stream=seen.append)
    iterated = list(session.stream("?", max_new_tokens=9))
    assert [(e.row, e.token, e.text, e.finish_reason) for e in seen] == [
        (e.row, e.token, e.text, e.finish_reason) for e in iterated
    ]
    assert "".join(event.text for event in seen) == result.text
    assert seen[-1].finish_reason == "eos"
    assert seen[-1].stats is not None


def test_rows_that_end_leave_and_the_others_go_on(directory: Path) -> None:
    prompts = ["a?", "bb?", "c?"]
    answers = {"a?": "x", "bb?": "longer answer", "c?": "mid"}
    session = ScriptedSession(directory, saying({tuple(byte_tokens(p)): byte_tokens(t) for p, t in answers.items()}))
    result = session.generate(prompts, max_new_tokens=30)
    assert result.texts == ["x", "longer answer", "mid"]
    assert [answer.prompt_index for answer in result.sequences] == [0, 1, 2]
    widths = [len(counts) for name, counts in session.runs if name == "step"]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 3
    assert widths[-1] == 1
    for prompt, text in answers.items():
        assert session.generate(prompt, max_new_tokens=30).text == text


def test_several_answers_per_prompt_read_the_prompt_once(directory: Path) -> None:
    session = ScriptedSession(directory, random_model())
    result = session.generate(["ab", "cd"], max_new_tokens=6, num_return_sequences=3, do_sample=True, seed=5, ignore_eos=True)
    assert [answer.prompt_index for answer in result.sequences] == [0, 0, 0, 1, 1, 1]
    assert len({tuple(tokens) for tokens in result.tokens}) == 6
    assert session.runs[0] == ("extend", [2, 2])
    assert all(counts == [1] * 6 for _, counts in session.runs[1:])


def test_a_seed_repeats_and_seeds_per_row_do_not_depend_on_the_row(directory: Path) -> None:
    session = ScriptedSession(directory, random_model())
    options = {"max_new_tokens": 8, "temperature": 0.8, "ignore_eos": True}
    first = session.generate(["ab", "cd"], seed=3, **options)
    assert session.generate(["ab", "cd"], seed=3, **options).tokens == first.tokens
    assert session.generate(["ab", "cd"], seed=4, **options).tokens != first.tokens
    unseeded = session.generate("ab", **options)
    assert session.generate("ab", seed=unseeded.sequences[0].seed, **options).tokens == unseeded.tokens
    per_row = session.generate(["ab", "cd"], seed=[7, 8], **options)
    assert session.generate(["cd", "ab"], seed=[8, 7], **options).tokens == per_row.tokens[::-1]


def test_prompts_may_be_text_ids_arrays_or_chats_one_or_many(directory: Path) -> None:
    session = ScriptedSession(directory, random_model())
    ids = byte_tokens("hello")
    want = session.generate("hello", max_new_tokens=4).tokens
    for prompt in (["hello"], ids, [ids], np.array(ids), np.array([ids])):
        assert session.generate(prompt, max_new_tokens=4).tokens == want
    chat = [{"role": "user", "content": "hi"}]
    rendered = session.generate("user: hi\nassistant: ", max_new_tokens=4).tokens
    assert session.generate(chat, max_new_tokens=4).tokens == rendered
    assert session.generate([chat, chat], max_new_tokens=4).tokens == rendered * 2


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""]])
def test_empty_prompts_are_refused(directory: Path, prompt) -> None:
    with pytest.raises(UsageError, match="prompt"):
        ScriptedSession(directory, random_model()).generate(prompt, max_new_tokens=3)


def test_logprobs_are_the_model_s_own_not_those_after_penalties(directory: Path) -> None:
    session = ScriptedSession(directory, random_model())
    prompt = byte_tokens("ab")
    answer = session.generate(
        prompt, max_new_tokens=5, top_logprobs=3, repetition_penalty=3.0, temperature=0.5, seed=1, ignore_eos=True
    ).sequences[0]
    assert answer.logprobs is not None
    assert answer.top_logprobs is not None
    for n, token in enumerate(answer.tokens):
        want = log_softmax(session.answer(prompt + answer.tokens[:n]))
        assert answer.logprobs[n] == pytest.approx(want[token], abs=1e-5)
        best = np.argsort(-want)[:3]
        assert [i for i, _ in answer.top_logprobs[n]] == best.tolist()
        np.testing.assert_allclose([v for _, v in answer.top_logprobs[n]], want[best], atol=1e-5)


def test_a_logits_processor_sees_each_row_and_rules_its_tokens(directory: Path) -> None:
    """genai#523, TensorRT-LLM#1405, mlx-lm#566: users want access to the logits, per row."""
    forced = {0: byte_tokens("x")[0], 1: byte_tokens("y")[0]}

    def force(row: int, tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        return one_hot(forced[row])

    session = ScriptedSession(directory, random_model())
    assert session.generate(["ab", "cd"], max_new_tokens=3, logits_processors=[force]).texts == ["xxx", "yyy"]


def test_bad_words_are_banned_with_and_without_a_leading_space(directory: Path) -> None:
    session = speaker(directory, "a bad b")
    assert "bad" not in session.generate("?", max_new_tokens=12, bad_words=["bad"]).text


def test_min_new_tokens_holds_off_the_end(directory: Path) -> None:
    session = speaker(directory, "a")
    assert len(session.generate("?", max_new_tokens=9, min_new_tokens=4).tokens[0]) >= 5


def test_sampling_defaults_come_from_the_artifact_only_when_sampling(directory: Path) -> None:
    (directory / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "top_k": 1, "temperature": 5.0, "max_new_tokens": 3})
    )
    session = ScriptedSession(directory, random_model())
    greedy = session.generate("ab", ignore_eos=True)
    assert len(greedy.tokens[0]) == 3
    assert session.generate("ab", do_sample=True, seed=1, ignore_eos=True).tokens == greedy.tokens  # top_k 1
    assert session.generate("ab", do_sample=True, top_k=0, seed=1, ignore_eos=True).tokens != greedy.tokens


def test_what_does_not_fit_is_refused_before_anything_runs(directory: Path) -> None:
    session = ScriptedSession(directory, random_model(), max_seq_len=20)
    with pytest.raises(
        LimitError, match=r"a prompt of 15 tokens and max_new_tokens 6 need 21 positions, and max_seq_len is 20"
    ):
        session.generate([5] * 15, max_new_tokens=6)
    session.generate([5] * 15, max_new_tokens=5)
    assert len(session.generate([5] * 15, ignore_eos=True).tokens[0]) == 5  # by default, what there is room for
    with pytest.raises(LimitError, match="leaves no room"):
        session.generate([5] * 20)
    tight = ScriptedSession(directory, random_model(), SessionLimits(memory_limit=64 * 32 * 2, max_batch=3))
    tight.generate([[5], [6]], max_new_tokens=20)
    with pytest.raises(LimitError, match="memory_limit"):
        tight.generate([[5], [6], [7]], max_new_tokens=20)
    with pytest.raises(LimitError, match="max_batch is 3"):
        tight.generate([[5]] * 4, max_new_tokens=2)
    assert session.runs.count(("extend", [15])) == 2


def test_unknown_and_contradicting_arguments_are_named(directory: Path) -> None:
    session = ScriptedSession(directory, random_model())
    with pytest.raises(UsageError, match=r"'max_token'.*max_new_tokens"):
        session.generate("a", max_token=3)
    for wrong in (
        {"max_new_tokens": 0},
        {"num_return_sequences": 0},
        {"top_p": 2.0, "do_sample": True},
        {"stop": ""},
        {"seed": [1, 2]},
    ):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            session.generate("a", **wrong)
    assert session.runs == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_raise_and_name_row_and_step(directory: Path, value: float) -> None:
    """onnxruntime-genai#2444: a model that overflows answered "!!!!" forever."""

    def overflow(tokens: list[int]) -> np.ndarray:
        logits = one_hot(7)
        if len(tokens) == 4 and tokens[0] == 6:
            logits[100] = value
        return logits

    session = ScriptedSession(directory, overflow)
    with pytest.raises(EngineError, match=r"row 1 after \[4, 4\] tokens"):
        session.generate([[5, 5], [6, 5]], max_new_tokens=9)


def test_minus_infinity_for_some_tokens_is_legal(directory: Path) -> None:
    def masked(tokens: list[int]) -> np.ndarray:
        logits = one_hot(7)
        logits[200:] = -np.inf
        return logits

    assert ScriptedSession(directory, masked).generate([5], max_new_tokens=2).tokens == [[7, 7]]


def test_a_continued_conversation_is_not_read_again(directory: Path) -> None:
    session = ScriptedSession(directory, saying({}))
    chat = [{"role": "user", "content": "hello there"}]
    session.answer = lambda tokens: one_hot(byte_tokens("k")[0]) if tokens[-1] != byte_tokens("k")[0] else one_hot(EOS)
    reply = session.generate(chat, max_new_tokens=5)
    cached = session.cached_tokens[0]
    chat += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "and now?"}]
    session.runs.clear()
    second = session.generate(chat, max_new_tokens=5)
    assert second.stats.reused_tokens == len(cached)
    assert sum(session.runs[0][1]) == second.stats.prompt_tokens - len(cached)
    fresh = ScriptedSession(directory, session.answer)
    assert fresh.generate(chat, max_new_tokens=5).tokens == second.tokens


def test_an_equal_prompt_is_read_anew_unless_reuse_is_asked_for(directory: Path) -> None:
    session = ScriptedSession(directory, random_model())
    first = session.generate("hello", max_new_tokens=3)
    assert session.generate("hello", max_new_tokens=3).stats.reused_tokens == 0
    again = session.generate("hello", max_new_tokens=3, reuse_prefix=True)
    assert again.stats.reused_tokens == 4  # one token is read for the logits
    assert again.tokens == first.tokens


def test_statistics_count_and_time_every_run(directory: Path) -> None:
    stats = speaker(directory, "abcdef").generate("?", max_new_tokens=6).stats
    assert stats.prompt_tokens == 1
    assert stats.ttft_ms > 0
    assert 0 < stats.inter_token_p50_ms <= stats.inter_token_p90_ms <= stats.inter_token_p99_ms
    assert stats.tokens_per_second > 0
    assert stats.prefill_tokens_per_second > 0
    assert 0 < stats.engine_s <= stats.total_s
    assert set(stats.to_dict()) >= {"ttft_ms", "inter_token_p99_ms", "tokens_per_second", "kv_bytes", "loop_fraction"}


# ── two real backends ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "seed": 11},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 12},
        {"min_p": 0.05, "typical_p": 0.9, "seed": 13},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {9: 3.0}, "bad_words": [[11], [12, 13]]},
        {"num_return_sequences": 2, "temperature": 1.5, "seed": 14},
    ],
    ids=str,
)
def test_the_same_seed_gives_the_same_tokens_on_torch_and_onnx_runtime(
    checkpoint: Callable[..., Path], artifact: Callable[..., Path], options
) -> None:
    prompts = [np.random.default_rng(n).integers(5, 120, n).tolist() for n in (4, 17, 9)]
    tokens = []
    for path in (checkpoint("llama"), artifact("llama")):
        with open_session(path, threads=1) as session:
            tokens.append(session.generate(prompts, max_new_tokens=24, ignore_eos=True, **options).tokens)
    assert tokens[0] == tokens[1]


def test_a_batch_generates_what_each_prompt_generates_alone(artifact: Callable[..., Path]) -> None:
    prompts = [np.random.default_rng(n).integers(5, 120, n).tolist() for n in (3, 30, 12, 7)]
    with open_session(artifact("llama"), threads=1) as session:
        together = session.generate(prompts, max_new_tokens=40)
        assert len({len(tokens) for tokens in together.tokens}) > 1, "some row should end early"
        for row, prompt in enumerate(prompts):
            assert session.generate(prompt, max_new_tokens=40).tokens == together.tokens[row : row + 1]


def test_greedy_tokens_are_those_of_transformers_generate(
    checkpoint: Callable[..., Path], artifact: Callable[..., Path]
) -> None:
    import torch

    from tests import tiny

    ids = np.random.default_rng(0).integers(5, 120, 9)
    want = (
        tiny.build("llama")
        .generate(torch.from_numpy(ids)[None], max_new_tokens=32, do_sample=False, pad_token_id=0)[0, 9:]
        .tolist()
    )
    for path in (checkpoint("llama"), artifact("llama")):
        with open_session(path, threads=1) as session:
            assert session.generate(ids, max_new_tokens=32).tokens == [want]


def test_vocabulary_of_the_scripted_model_is_what_the_tests_assume() -> None:
    assert one_hot(3).shape == (VOCAB,)
