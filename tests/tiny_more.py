"""More tiny configurations, swept with ``-m slow``: architectures nobody wrote a line of the exporter for."""

from __future__ import annotations

from typing import Any

from tests.tiny import EXPERTS, MAMBA_HEADS, STD, VOCAB, WINDOW, base, sizes

_DELTA_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_GROUPED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
_HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    # recurrent and convolutional state
    "bamba": ("bamba", base("head_dim", num_hidden_layers=4, attn_layer_indices=[1, 3], **MAMBA_HEADS)),
    "falcon_mamba": (
        "falcon_mamba",
        base("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", state_size=8),
    ),
    "jamba": (
        "jamba",
        base(
            "head_dim",
            num_hidden_layers=4,
            num_experts=4,
            num_experts_per_tok=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
    ),
    "kimi_linear": (
        "kimi_linear",
        base(
            "head_dim",
            num_key_value_heads=4,
            linear_num_heads=4,
            linear_head_dim=16,
            num_local_experts=4,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            **_HYBRID,
            **_LATENT,
            **EXPERTS,
        ),
    ),
    "lfm2_moe": (
        "lfm2_moe",
        base(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2, num_experts=4, num_dense_layers=1, **EXPERTS),
    ),
    "nemotron_h": (
        "nemotron_h",
        base(
            num_hidden_layers=4,
            hybrid_override_pattern="M*M-",
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=16,
            chunk_size=8,
        ),
    ),
    "olmo_hybrid": ("olmo_hybrid", base("head_dim", **_HYBRID, **_DELTA_HEADS)),
    "qwen3_5_text": ("qwen3_5_text", base(num_hidden_layers=4, **_DELTA_HEADS)),
    "zamba2": (
        "zamba2",
        base(
            "head_dim",
            num_hidden_layers=4,
            layers_block_type=["mamba", "hybrid"] * 2,
            num_mem_blocks=1,
            mamba_d_state=16,
            mamba_ngroups=1,
            n_mamba_heads=8,
            num_key_value_heads=4,
            adapter_rank=8,
            chunk_size=8,
        ),
    ),
    # attention
    "apertus": ("apertus", base()),
    "arcee": ("arcee", base()),
    "biogpt": ("biogpt", sizes("num_hidden_layers", "num_attention_heads", hidden_size=64, intermediate_size=128)),
    "bitnet": ("bitnet", base()),
    "cohere2_moe": (
        "cohere2_moe",
        base(num_hidden_layers=4, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
    ),
    "deepseek_v2": ("deepseek_v2", base("head_dim", num_key_value_heads=4, **_LATENT, **_GROUPED_EXPERTS)),
    "diffllama": ("diffllama", base()),
    "doge": ("doge", base()),
    "dots1": ("dots1", base(**_GROUPED_EXPERTS)),
    "ernie4_5": ("ernie4_5", base()),
    "exaone": ("exaone", base()),
    "gemma4_text": (
        "gemma4_text",
        base(
            num_hidden_layers=6,
            sliding_window=WINDOW,
            global_head_dim=32,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCAB,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 3,
        ),
    ),
    "glm4_moe": ("glm4_moe", base(**_GROUPED_EXPERTS)),
    "granitemoeshared": (
        "granitemoeshared",
        base("head_dim", num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=64),
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", base()),
    "jetmoe": ("jetmoe", base("num_attention_heads", kv_channels=16, num_local_experts=4, num_experts_per_tok=2)),
    "nanochat": ("nanochat", base()),
    "olmo3": ("olmo3", base("head_dim", sliding_window=WINDOW, num_hidden_layers=4)),
    "persimmon": ("persimmon", base("num_key_value_heads", "head_dim")),
    "phimoe": ("phimoe", base("head_dim", num_local_experts=4, num_experts_per_tok=2)),
    "seed_oss": ("seed_oss", base()),
    "vaultgemma": ("vaultgemma", base(sliding_window=WINDOW)),
    "xglm": (
        "xglm",
        {
            "d_model": 64,
            "ffn_dim": 128,
            "num_layers": 2,
            "attention_heads": 4,
            "vocab_size": VOCAB,
            "max_position_embeddings": 256,
            "init_std": STD,
        },
    ),
}
