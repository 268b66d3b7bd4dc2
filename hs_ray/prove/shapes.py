"""config.json of known classes, as their publishers spell it: options real, depths and widths only where they matter.

`twin.shrink` makes them small. Used by `batch` and the tests, where no model folder is at hand.
"""

from typing import Any

_PLAIN: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_YARN = {
    "type": "yarn", "rope_type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "moe_intermediate_size": 2048, "intermediate_size": 18432, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "rope_theta": 10000, "rope_scaling": _YARN, "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6, "vocab_size": 129280, "attention_bias": False, "ep_size": 1,
}  # fmt: skip


def _shape(architecture: str, model_type: str, **options: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **_PLAIN, **options}


SHAPES: dict[str, dict[str, Any]] = {
    "llama": _shape("LlamaForCausalLM", "llama", rope_theta=500000.0, rope_scaling=_LLAMA3_ROPE),
    "mistral": _shape("MistralForCausalLM", "mistral", rope_theta=1e6, sliding_window=None, head_dim=128),
    "phi3": _shape("Phi3ForCausalLM", "phi3", num_attention_heads=32, num_key_value_heads=32, hidden_size=3072,
                   intermediate_size=8192, rope_theta=10000.0, sliding_window=None, eos_token_id=32000,
                   pad_token_id=32000),
    "qwen2": _shape("Qwen2ForCausalLM", "qwen2", rope_theta=1e6, use_sliding_window=False, sliding_window=131072,
                    max_window_layers=28, hidden_size=3584, num_attention_heads=28, num_key_value_heads=4),
    "qwen3": _shape("Qwen3ForCausalLM", "qwen3", rope_theta=1e6, head_dim=128, attention_bias=False,
                    use_sliding_window=False, sliding_window=None),
    "qwen2_moe": _shape("Qwen2MoeForCausalLM", "qwen2_moe", rope_theta=1e6, hidden_size=3584, num_attention_heads=28,
                        num_key_value_heads=4, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=2560,
                        shared_expert_intermediate_size=20480, decoder_sparse_step=1, norm_topk_prob=False,
                        mlp_only_layers=[]),
    "qwen3_moe": _shape("Qwen3MoeForCausalLM", "qwen3_moe", rope_theta=1e6, hidden_size=2048, head_dim=128,
                        num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
                        decoder_sparse_step=1, norm_topk_prob=True, mlp_only_layers=[]),
    "qwen3_next": _shape("Qwen3NextForCausalLM", "qwen3_next", rope_theta=1e7, hidden_size=2048, head_dim=256,
                         num_attention_heads=16, num_key_value_heads=2, num_hidden_layers=48,
                         partial_rotary_factor=0.25, full_attention_interval=4, linear_conv_kernel_dim=4,
                         linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
                         linear_num_value_heads=32, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
                         shared_expert_intermediate_size=512, decoder_sparse_step=1, norm_topk_prob=True,
                         mlp_only_layers=[]),
    "gemma2": _shape("Gemma2ForCausalLM", "gemma2", hidden_size=2304, num_attention_heads=8, num_key_value_heads=4,
                     head_dim=256, query_pre_attn_scalar=256, sliding_window=4096, attn_logit_softcapping=50.0,
                     final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh",
                     hidden_act="gelu_pytorch_tanh", num_hidden_layers=26, tie_word_embeddings=True,
                     rope_theta=10000.0),
    "gemma3": _shape("Gemma3ForCausalLM", "gemma3_text", hidden_size=1152, num_attention_heads=4, num_key_value_heads=1,
                     head_dim=256, query_pre_attn_scalar=256, sliding_window=512, sliding_window_pattern=6,
                     hidden_activation="gelu_pytorch_tanh", num_hidden_layers=26, rope_theta=1e6,
                     rope_local_base_freq=10000, tie_word_embeddings=True),
    "gpt_oss": _shape("GptOssForCausalLM", "gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
                      num_attention_heads=64, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
                      experts_per_token=4, sliding_window=128, attention_bias=True, swiglu_limit=7.0, rope_theta=150000,
                      layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072,
                      rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                    "original_max_position_embeddings": 4096, "truncate": False}),
    "glm4": _shape("Glm4ForCausalLM", "glm4", head_dim=128, num_attention_heads=32, num_key_value_heads=2,
                   partial_rotary_factor=0.5, attention_bias=True, num_hidden_layers=40, rope_theta=10000.0),
    "glm4_moe": _shape("Glm4MoeForCausalLM", "glm4_moe", head_dim=128, num_attention_heads=96, use_qk_norm=True,
                       partial_rotary_factor=0.5, attention_bias=True, n_routed_experts=128, n_shared_experts=1,
                       num_experts_per_tok=8, moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1,
                       topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, num_hidden_layers=46,
                       num_nextn_predict_layers=1, rope_theta=1e6),
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **_PLAIN, **_DEEPSEEK},
    "kimi_k25": {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "tie_word_embeddings": False,
        "media_placeholder_token_id": 163605, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "text_config": {"architectures": ["DeepseekV3ForCausalLM"], **_PLAIN, **_DEEPSEEK, "vocab_size": 163840,
                        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1,
                        "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827},
        "vision_config": {"model_type": "kimi_k25_vision"},
    },
    "minimax_m2": _shape("MiniMaxM2ForCausalLM", "minimax_m2", hidden_size=3072, intermediate_size=1536,
                         num_attention_heads=48, head_dim=128, rotary_dim=64, num_local_experts=256,
                         num_experts_per_tok=8, num_hidden_layers=62, use_qk_norm=True, qk_norm_type="per_layer",
                         scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0, use_mtp=False,
                         attn_type_list=[1] * 62, rope_theta=5e6, partial_rotary_factor=0.5),
    "llama4": _shape("Llama4ForCausalLM", "llama4_text", hidden_size=5120, intermediate_size=8192,
                     intermediate_size_mlp=16384, num_attention_heads=40, head_dim=128, num_local_experts=16,
                     num_experts_per_tok=1, interleave_moe_layer_step=1, no_rope_layer_interval=4, use_qk_norm=True,
                     attention_chunk_size=8192, attn_temperature_tuning=True, floor_scale=8192, attn_scale=0.1,
                     num_hidden_layers=48, rope_theta=500000.0,
                     rope_scaling={**_LLAMA3_ROPE, "factor": 16.0, "high_freq_factor": 1.0}),
    "olmo2": _shape("Olmo2ForCausalLM", "olmo2", rope_theta=500000.0, num_key_value_heads=32),
    "granite": _shape("GraniteForCausalLM", "granite", attention_multiplier=0.0078125, embedding_multiplier=12.0,
                      logits_scaling=16.0, residual_multiplier=0.22, attention_bias=False, rope_theta=1e7,
                      num_hidden_layers=40),
    "mixtral": _shape("MixtralForCausalLM", "mixtral", num_local_experts=8, num_experts_per_tok=2, rope_theta=1e6,
                      sliding_window=None),
    "cohere": _shape("CohereForCausalLM", "cohere", logit_scale=0.0625, use_qk_norm=False, layer_norm_eps=1e-5,
                     tie_word_embeddings=True, rope_theta=8e6),
}  # fmt: skip
