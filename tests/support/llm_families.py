"""The tested and the refused architectures of transformers' language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

WINDOW = 12
_WINDOW = {"sliding_window": WINDOW}
_HEAD = {"head_dim": 16}
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
}
_EXPERTS = {
    "num_local_experts": 6,
    "num_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 24, "n_shared_experts": 1}
# One layer with experts behind one without, whose experts are chosen from one group of two.
_GROUPS = {**_SHARED, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
_GEMMA_2 = {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 16}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
_LLAMA_3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        models: Models of the architecture.
        has: Its differences from Llama.
        changes: Keys of a tiny configuration that differ from ``checkpoints.CONFIG``.
        positions: Its encoding of positions.
        window: Which layers have a sliding window.
        copies: Whether a step copies the caches, because the module has its own attention.
        states: Whether layers keep states that each call replaces.
        quick: Whether ``make test`` runs it.
    """

    models: str
    has: str = ""
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    positions: str = "rotary"
    window: str = ""
    copies: bool = False
    states: bool = False
    quick: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama 1 to 3, SmolLM 1 and 2", "scaled rotation", _LLAMA_3),
    "mistral": Family("Mistral 7B", "", _WINDOW, window="all"),
    "ministral": Family("Ministral 8B", "", {**_WINDOW, "head_dim": 8}, window="all"),
    "ministral3": Family("Ministral 3", "queries scaled by position", _HEAD),
    "qwen2": Family("Qwen 2, Qwen 2.5", "biases of queries, keys and values"),
    "qwen3": Family("Qwen 3", "norms of queries and keys", _HEAD),
    "gemma": Family("Gemma 1", "norms with an offset, scaled embeddings", _HEAD),
    "gemma2": Family(
        "Gemma 2", "soft caps of scores and logits, four norms a layer", _GEMMA_2, window="some"
    ),
    "gemma3_text": Family(
        "Gemma 3",
        "a rotation for each kind of layer, norms of queries and keys",
        {**_GEMMA_2, **_MIXED},
        window="some",
        quick=True,
    ),
    "vaultgemma": Family("VaultGemma", "soft caps", _GEMMA_2, window="some"),
    "phi": Family(
        "Phi 1 to 2",
        "parallel layers, layer norms, biases",
        {"num_key_value_heads": 4},
        positions="rotary, partial",
    ),
    "phi3": Family("Phi 3, Phi 4", "stacked projections", _WINDOW, window="all"),
    "smollm3": Family("SmolLM 3", "layers without positions", positions="rotary, some layers"),
    "granite": Family("Granite 3", "multipliers of embeddings, scores, layers and logits"),
    "olmo": Family("OLMo 1", "layer norms without weights"),
    "olmo2": Family("OLMo 2", "norms after layers, norms of queries and keys"),
    "olmo3": Family("OLMo 3", "norms after layers", _MIXED, window="some"),
    "starcoder2": Family("StarCoder 2", "layer norms, biases", _WINDOW, window="all"),
    "gpt_neox": Family(
        "GPT-NeoX, Pythia", "parallel layers, stacked projections", positions="rotary, partial"
    ),
    "gpt2": Family("GPT-2", "stacked projections", positions="learnt"),
    "gpt_bigcode": Family("SantaCoder, StarCoder", "one key head", positions="learnt"),
    "bloom": Family("BLOOM", "a norm of embeddings", positions="ALiBi", copies=True),
    "falcon": Family(
        "Falcon",
        "one key head",
        {"alibi": True, "new_decoder_architecture": False},
        positions="ALiBi",
        copies=True,
    ),
    "gptj": Family(
        "GPT-J",
        "parallel layers, neighbouring channels rotated",
        {"rotary_dim": 4},
        positions="rotary, partial",
    ),
    "codegen": Family(
        "CodeGen",
        "parallel layers, neighbouring channels rotated",
        {"rotary_dim": 4},
        positions="rotary, partial",
    ),
    "xglm": Family(
        "XGLM",
        "scaled embeddings",
        {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
        positions="sines",
        copies=True,
    ),
    "stablelm": Family("StableLM", "layer norms", positions="rotary, partial"),
    "cohere": Family("Command R", "parallel layers, layer norms, a factor of logits"),
    "cohere2": Family(
        "Command R7B", "parallel layers, layers without positions", _MIXED, window="some"
    ),
    "exaone4": Family(
        "EXAONE 4", "norms after layers, layers without positions", _MIXED, window="some"
    ),
    "glm": Family("GLM 4 9B", "neighbouring channels rotated", _HEAD, positions="rotary, partial"),
    "glm4": Family("GLM 4 0414", "four norms a layer", _HEAD, positions="rotary, partial"),
    "helium": Family("Helium", "neighbouring channels rotated", {"head_dim": 8}),
    "arcee": Family("Arcee AFM", "ReLU squared, not gated"),
    "apertus": Family("Apertus", "xIELU"),
    "nemotron": Family(
        "Nemotron, Minitron",
        "ReLU squared, layer norms with an offset",
        positions="rotary, partial",
    ),
    "persimmon": Family(
        "Persimmon", "layer norms of queries and keys", positions="rotary, partial"
    ),
    "seed_oss": Family("Seed-OSS", "", _HEAD),
    "hunyuan_v1_dense": Family("Hunyuan 0.5B to 7B", "norms after the rotation", {"head_dim": 8}),
    "ernie4_5": Family("ERNIE 4.5 0.3B", "neighbouring channels rotated", _HEAD),
    "jais2": Family("Jais 2", "ReLU squared, layer norms"),
    "diffllama": Family("DiffLlama", "differences of attentions"),
    "nanochat": Family("nanochat", "norms without weights, a soft cap of logits"),
    "hyperclovax": Family("HyperCLOVA X SEED", "multipliers"),
    "lfm2": Family(
        "LFM2",
        "convolutions in some layers, norms of queries and keys",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        states=True,
    ),
    "mamba": Family(
        "Mamba",
        "recurrences in place of attention",
        {"state_size": 4, "time_step_rank": 4},
        positions="none",
        states=True,
    ),
    "falcon_mamba": Family(
        "Falcon Mamba 7B",
        "recurrences in place of attention",
        {"state_size": 4, "time_step_rank": 4},
        positions="none",
        states=True,
    ),
    "jamba": Family(
        "Jamba without experts",
        "recurrences (Mamba 1) in most layers",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        positions="none",
        states=True,
    ),
    "mamba2": Family(
        "Mamba 2, Codestral Mamba",
        "recurrences in place of attention",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
        positions="none",
        states=True,
    ),
    "bamba": Family(
        "Bamba 9B",
        "recurrences (Mamba 2) in most layers",
        {**_MAMBA_2, "attn_layer_indices": [1]},
        positions="rotary, partial",
        states=True,
    ),
    "falcon_h1": Family(
        "Falcon-H1",
        "a recurrence (Mamba 2) beside attention in every layer, multipliers",
        {**_MAMBA_2, "mamba_d_ssm": 64},
        states=True,
    ),
    "granitemoehybrid": Family(
        "Granite 4 H 350M, 1B and Micro",
        "recurrences (Mamba 2) in most layers, multipliers",
        {
            **_MAMBA_2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
        },
        positions="none",
        states=True,
    ),
    "nemotron_h": Family(
        "Nemotron-H, Nemotron Nano 2",
        "recurrences (Mamba 2) or attention or neither in a layer",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 16,
            "head_dim": 8,
        },
        positions="none",
        states=True,
    ),
    "zamba2": Family(
        "Zamba 2",
        "recurrences (Mamba 2), attention that layers share",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "hybrid_layer_ids": [1],
            "num_mem_blocks": 1,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "chunk_size": 16,
        },
        positions="none",
        states=True,
    ),
    "olmo_hybrid": Family(
        "OLMo Hybrid",
        "recurrences (gated delta rule) in most layers",
        {**_DELTA, "linear_num_key_heads": 4},
        positions="rotary",
        states=True,
    ),
    "qwen3_5_text": Family(
        "Qwen 3.5",
        "recurrences (gated delta rule) in most layers, gates of attention",
        {**_DELTA, **_HEAD},
        positions="rotary, partial",
        states=True,
    ),
    "minicpm3": Family("MiniCPM 3", "latent keys and values", _LATENT),
    "youtu": Family("Youtu-LLM", "latent keys and values", _LATENT),
    "opt": Family(
        "OPT", "layer norms, biases", {"ffn_dim": 48, "word_embed_proj_dim": 32}, positions="learnt"
    ),
    "biogpt": Family("BioGPT", "layer norms, scaled embeddings", positions="learnt"),
    "granite_swa": Family("Granite Swash 2B", "sinks", _MIXED, window="some"),
    "mixtral": Family("Mixtral", "experts", _EXPERTS),
    "qwen2_moe": Family("Qwen 1.5 MoE, Qwen 2 57B", "experts and a shared one", _SHARED),
    "qwen3_moe": Family("Qwen 3 30B A3B", "experts", {**_HEAD, **_EXPERTS}),
    "olmoe": Family("OLMoE", "experts, norms of queries and keys", _EXPERTS),
    "flex_olmo": Family("FlexOlmo", "experts, norms after layers", _EXPERTS),
    "granitemoe": Family("Granite 3 MoE", "experts, multipliers", _EXPERTS),
    "granitemoeshared": Family(
        "Granite MoE with a shared expert",
        "experts and a shared one",
        {**_EXPERTS, "shared_intermediate_size": 24},
    ),
    "granitemoe_swa": Family(
        "Granite Swash 3B A600M", "experts, sinks", {**_EXPERTS, **_MIXED}, window="some"
    ),
    "phimoe": Family("Phi 3.5 MoE", "experts, layer norms", _EXPERTS),
    "deepseek_v3": Family(
        "DeepSeek V3, R1",
        "experts in groups, shared experts, latent keys and values",
        {**_LATENT, **_GROUPS},
    ),
    "glm4_moe": Family(
        "GLM 4.5",
        "experts in groups, a shared one",
        {**_GROUPS, **_HEAD},
        positions="rotary, partial",
    ),
    "glm4_moe_lite": Family(
        "GLM 4.7 Flash", "experts in groups, latent keys and values", {**_LATENT, **_GROUPS}
    ),
    "dots1": Family("dots.llm1", "experts in groups, shared experts", {**_GROUPS, **_HEAD}),
    "ernie4_5_moe": Family(
        "ERNIE 4.5 21B A3B",
        "experts, shared experts",
        {**_HEAD, **_SHARED, "moe_num_experts": 6, "moe_k": 2},
    ),
    "hunyuan_v1_moe": Family(
        "Hunyuan A13B", "experts and a shared one", {**_SHARED, "head_dim": 8, "moe_topk": 2}
    ),
    "minimax_m2": Family(
        "MiniMax M2",
        "experts, norms of queries and keys",
        {**_HEAD, **_EXPERTS},
        positions="rotary, partial",
    ),
    "mimo_v2_flash": Family(
        "MiMo V2 Flash", "experts, sinks", {**_EXPERTS, **_HEAD, **_MIXED}, window="some"
    ),
    "gpt_oss": Family(
        "gpt-oss",
        "experts with biases and clamped gates, sinks",
        {**_EXPERTS, **_HEAD, **_MIXED},
        window="some",
    ),
    "exaone_moe": Family("K-EXAONE", "experts", {**_GROUPS, **_MIXED}, window="some"),
    "solar_open": Family("Solar Open", "experts in groups, a shared one", {**_GROUPS, **_HEAD}),
    "cohere2_moe": Family(
        "Command A+", "experts, parallel layers", {**_SHARED, **_MIXED}, window="some"
    ),
    "hy_v3": Family("Hy3", "experts", {**_SHARED, **_HEAD}),
    "mellum": Family("Mellum 2", "experts", {**_EXPERTS, **_MIXED, **_HEAD}, window="some"),
    "flint": Family(
        "Flint",
        "experts and a shared one, sinks",
        {**_SHARED, **_HEAD, **_MIXED, "mlp_only_layers": [0]},
        window="some",
    ),
    "laguna": Family("Laguna XS", "experts", {**_EXPERTS, **_HEAD}),
}
"""By ``model_type``."""

REFUSED: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "deepseek_v2": (
        {**_LATENT, **_GROUPS},
        "position embedding of a form that is not supported",
        "a rotation by complex numbers",
    ),
    "afmoe": (
        {**_SHARED, **_HEAD, **_MIXED},
        "AfmoeForCausalLM is not supported",
        "its module needs attention in one piece of memory",
    ),
    "llama4_text": ({}, "Llama4TextExperts", "experts with a special form"),
    "jetmoe": ({}, "JetMoeParallelExperts", "experts with a special form"),
    "mpt": ({}, "MptForCausalLM is not supported", "its biases are cut at a number of tokens"),
    "rwkv": ({}, "does not compute with a cache", "its module takes no cache"),
    "recurrent_gemma": (
        {},
        "does not compute with a cache",
        "its states are in its modules, not in a cache",
    ),
    "openai-gpt": ({}, "does not compute with a cache", "its module takes no cache"),
    "gpt_neo": (
        {"attention_types": [[["global", "local"], 1]]},
        "does not compute with a cache",
        "its masks cover only the context",
    ),
}
"""By ``model_type``: changes of a configuration, what the error says, and why in short."""

NEURAL_ENGINE = frozenset(
    (
        *("arcee", "exaone4", "gemma", "gemma2", "gemma3_text", "gpt_neox", "granite"),
        *("granite_swa", "hunyuan_v1_dense", "hyperclovax", "jais2", "lfm2", "llama"),
        *("ministral", "mistral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3"),
        *("qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma"),
    )
)
"""The families with a form for the neural engine."""
