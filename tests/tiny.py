"""Seeded tiny models: one small random configuration per architecture, made from transformers' own config classes.

``ARCHITECTURES`` maps a name to ``(model_type, config arguments)``. They are small (hidden 64, vocabulary 128, 2 to 6
layers) but use every feature of their architecture: windows shorter than the test prompts, soft caps below the largest
logit, fewer KV heads than heads, ``head_dim`` that is not ``hidden / heads``, scaled rotary tables.

Weights: standard deviation 0.2 (0.02 hides bugs from the logits), then every parameter that transformers starts as a
constant (norm weights, biases, ``A_log``, ``D``, sinks, …) gets seeded noise, so that a dropped bias or norm shows.

    model = tiny.build("qwen3")                 # eval mode, float32, eager attention
    tiny.save("qwen3", directory)               # a HF directory with weights, config and a working tokenizer.json
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

VOCAB = 128
PAD, BOS, EOS = 0, 1, 2
WINDOW = 8  # tokens, the current one included
ROPE_SWITCH = 64  # positions after which longrope changes its table
POSITIONS = 256
STD = 0.2

_SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}


def base(*without: str, **changes: Any) -> dict[str, Any]:
    """The llama-like configuration most architectures share."""
    config: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "initializer_range": STD,
        **_SPECIAL,
        **changes,
    }
    return {key: value for key, value in config.items() if key not in without}


def sizes(layers: str, heads: str, **changes: Any) -> dict[str, Any]:
    """A configuration outside the llama naming: ``layers`` and ``heads`` are what it calls those two numbers."""
    return {layers: 2, heads: 4, "vocab_size": VOCAB, "initializer_range": STD, **_SPECIAL, **changes}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


_GRANITE = {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 2.0, "logits_scaling": 3.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT = sizes("n_layer", "n_head", n_embd=64, n_positions=POSITIONS)
_FALCON = sizes("num_hidden_layers", "num_attention_heads", hidden_size=64)
_LONGROPE = _rope(
    "longrope",
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[2.0 + 0.3 * i for i in range(8)],
    original_max_position_embeddings=ROPE_SWITCH,
)
MAMBA_HEADS = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # rotary, RMSNorm, gated MLP
    "llama": ("llama", base()),
    "llama_mqa": ("llama", base(num_key_value_heads=1)),
    "llama_mha": ("llama", base(num_key_value_heads=4, attention_bias=True, mlp_bias=True)),
    "llama_tied": ("llama", base(tie_word_embeddings=True)),
    "llama3_rope": (
        "llama",
        base(**_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)),
    ),
    "llama_yarn": ("llama", base(**_rope("yarn", factor=4.0, original_max_position_embeddings=64))),
    "llama_linear": ("llama", base(**_rope("linear", factor=2.0))),
    "llama_dynamic": ("llama", base(max_position_embeddings=ROPE_SWITCH, **_rope("dynamic", factor=4.0))),
    "mistral": ("mistral", base(sliding_window=WINDOW)),
    "ministral": ("ministral", base(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])),
    "ministral3": (
        "ministral3",
        base(
            **_rope(
                "yarn",
                factor=16.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.1,
            )
        ),
    ),
    "mixtral": ("mixtral", base(num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": ("qwen2", base()),
    "qwen2_window": ("qwen2", base(num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)),
    "qwen2_moe": ("qwen2_moe", base(num_experts=4, shared_expert_intermediate_size=48, decoder_sparse_step=1, **EXPERTS)),
    "qwen3": ("qwen3", base(head_dim=32)),
    "qwen3_moe": ("qwen3_moe", base(num_experts=4, decoder_sparse_step=1, **EXPERTS)),
    "smollm3": ("smollm3", base(num_hidden_layers=4, no_rope_layer_interval=4)),
    "olmo": ("olmo", base("head_dim", clip_qkv=3.0)),
    "olmo2": ("olmo2", base("head_dim")),
    "olmoe": ("olmoe", base(num_experts=4, num_experts_per_tok=2)),
    "granite": ("granite", base("head_dim", **_GRANITE)),
    "granitemoe": ("granitemoe", base("head_dim", num_local_experts=4, num_experts_per_tok=2, **_GRANITE)),
    "helium": ("helium", base()),
    "glm": ("glm", base(partial_rotary_factor=0.5)),
    "glm4": ("glm4", base(partial_rotary_factor=0.5)),
    "exaone4": ("exaone4", base(num_hidden_layers=4, sliding_window=WINDOW, sliding_window_pattern=4)),
    "deepseek_v3": (
        "deepseek_v3",
        base(
            "head_dim",
            num_key_value_heads=4,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            **EXPERTS,
        ),
    ),
    "gpt_oss": (
        "gpt_oss",
        base(
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            **_rope("yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=64, truncate=False),
        ),
    ),
    "llama4_text": (
        "llama4_text",
        base(
            num_local_experts=2,
            num_experts_per_tok=1,
            intermediate_size_mlp=128,
            attention_chunk_size=WINDOW,
            num_hidden_layers=4,
            no_rope_layers=[1, 1, 1, 0],
            floor_scale=8,  # temperature tuning of the layers without rotary starts inside the test
        ),
    ),
    # soft caps, (1 + w) norms, parallel blocks, LayerNorm
    "gemma": ("gemma", base()),
    "gemma2": (
        "gemma2",
        base(
            sliding_window=WINDOW,
            num_hidden_layers=4,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma3_text": ("gemma3_text", base(sliding_window=WINDOW, num_hidden_layers=6, query_pre_attn_scalar=16)),
    "gemma3n_text": (
        "gemma3n_text",
        base(
            num_hidden_layers=6,
            sliding_window=WINDOW,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=16,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 3,
            altup_num_inputs=2,
            laurel_rank=8,
            activation_sparsity_pattern=[0.5] + [0.0] * 5,
        ),
    ),
    "cohere": ("cohere", base("head_dim", use_qk_norm=True, logit_scale=0.6)),
    "cohere2": ("cohere2", base(sliding_window=WINDOW, num_hidden_layers=4, logit_scale=1.5)),
    "nemotron": ("nemotron", base(partial_rotary_factor=0.5)),
    "phi": ("phi", base("head_dim", partial_rotary_factor=0.5)),
    "phi3": ("phi3", base("head_dim", partial_rotary_factor=0.5)),
    "phi3_longrope": ("phi3", base("head_dim", original_max_position_embeddings=ROPE_SWITCH, **_LONGROPE)),
    "stablelm": ("stablelm", base("head_dim", partial_rotary_factor=0.5, use_qkv_bias=True)),
    "starcoder2": ("starcoder2", base("head_dim", sliding_window=WINDOW)),
    "gpt_neox": ("gpt_neox", base("head_dim", "num_key_value_heads")),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 8}),
    "codegen": ("codegen", {**_GPT, "n_ctx": POSITIONS, "rotary_dim": 8}),
    # learned or linear-bias positions
    "gpt2": ("gpt2", dict(_GPT)),
    "gpt_bigcode": ("gpt_bigcode", dict(_GPT)),
    "gpt_neo": (
        "gpt_neo",
        sizes(
            "num_layers",
            "num_heads",
            hidden_size=64,
            intermediate_size=128,
            attention_types=[[["global", "local"], 1]],
            window_size=WINDOW,
            max_position_embeddings=POSITIONS,
        ),
    ),
    "opt": (
        "opt",
        sizes(
            "num_hidden_layers",
            "num_attention_heads",
            hidden_size=64,
            ffn_dim=128,
            word_embed_proj_dim=64,
            max_position_embeddings=POSITIONS,
            init_std=STD,
        ),
    ),
    "bloom": ("bloom", sizes("n_layer", "n_head", hidden_size=64)),
    "mpt": ("mpt", sizes("n_layers", "n_heads", d_model=64, expansion_ratio=2, max_seq_len=POSITIONS)),
    "falcon": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_mqa": ("falcon", {**_FALCON, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}),
    "falcon_alibi": ("falcon", {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    # recurrent and convolutional state
    "mamba": ("mamba", base("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", state_size=8)),
    "mamba2": (
        "mamba2",
        sizes("num_hidden_layers", "num_heads", hidden_size=64, state_size=16, n_groups=2, chunk_size=8, head_dim=32),
    ),
    "lfm2": (
        "lfm2",
        base(
            num_hidden_layers=4,
            full_attn_idxs=[1, 3],
            layer_types=["conv", "full_attention"] * 2,
            block_auto_adjust_ff_dim=False,
        ),
    ),
    "qwen3_next": (
        "qwen3_next",
        base(
            num_hidden_layers=4,
            num_experts=4,
            shared_expert_intermediate_size=32,
            partial_rotary_factor=0.5,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            **EXPERTS,
        ),
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        base(
            "head_dim",
            num_hidden_layers=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
            layer_types=["mamba", "attention"] * 2,
            **_GRANITE,
            **MAMBA_HEADS,
        ),
    ),
    "falcon_h1": ("falcon_h1", base(mamba_d_ssm=128, **MAMBA_HEADS)),
}

_CONSTANT_NOISE = 0.2


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers reports missing optional kernels and unset config fields; neither matters for a tiny model."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def entry(name: str) -> tuple[str, dict[str, Any]]:
    """``(model_type, config arguments)`` of a key of :data:`ARCHITECTURES` or of tiny_more.py."""
    from tests.tiny_more import MORE

    return ARCHITECTURES[name] if name in ARCHITECTURES else MORE[name]


def config(name: str) -> Any:
    """The transformers config object of an entry."""
    model_type, arguments = entry(name)
    with _quiet():
        return AutoConfig.for_model(model_type, **arguments)


def build(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model in eval mode, float32, with transformers' eager attention; the same weights every time.

    Args:
        name: a key of :data:`ARCHITECTURES`, or of tiny_more.py.
        seed: of the weights.
        changes: config attributes to override, for instance ``sliding_window=7``.
    """
    model_type, arguments = entry(name)
    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = AutoConfig.for_model(model_type, **{**arguments, **changes})
        model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if (parameter.numel() and bool((parameter == parameter.flatten()[0]).all())) or parameter.dim() == 1:
                parameter.add_(_CONSTANT_NOISE * torch.randn(parameter.shape, generator=generator))
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer over the first :data:`VOCAB` ids: specials, then printable ASCII as single characters.

    Ids 0, 1, 2 are ``<pad>``, ``<s>``, ``</s>``, id 3 ``<unk>``; every other id is one character or a merged pair, and
    ``<s>`` is put before each text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    characters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # byte-level names of space and newline
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *characters])}
    merges = []
    for pair in (
        "th",
        "he",
        "in",
        "er",
        "an",
        "re",
        "on",
        "at",
        "en",
        "nd",
        "ti",
        "es",
        "or",
        "te",
        "of",
        "ed",
        "is",
        "it",
        "al",
        "ar",
    ):
        merges.append((pair[0], pair[1]))
        vocabulary[pair] = len(vocabulary)
    while len(vocabulary) < VOCAB:
        vocabulary[f"<extra_{len(vocabulary)}>"] = len(vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    core.add_special_tokens(["<pad>", "<s>", "</s>", "<unk>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def save(name: str, directory: str | Path, seed: int = 0, **changes: Any) -> Path:
    """Writes ``build(name, seed, **changes)`` as a HF directory: config, safetensors, generation config, tokenizer.

    Returns:
        The directory, as a path.
    """
    directory = Path(directory)
    with _quiet():
        build(name, seed, **changes).save_pretrained(directory)
        tokenizer().save_pretrained(directory)
    return directory
