"""config.json: every key that changes the numbers is read or refused by name; the others are kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.models.weights import hf_models

from capibara.models import ModularModelConfig
from capibara.models.weights import FAMILIES, config_from_hf, config_to_hf

LLAMA = hf_models.CONFIGS["llama"]


def _block(name: str, block: str, **changes: Any) -> Any:
    return config_from_hf({**hf_models.CONFIGS[name], **changes}).blocks[block]


@pytest.mark.quick
@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_the_config_comes_back(name: str) -> None:
    config = {**hf_models.CONFIGS[name], "of_mine": [None, {"a": 1}]}
    model = config_from_hf(config)
    assert config_to_hf(model) == config
    assert list(config_to_hf(model)) == list(config)


@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_without_its_config_a_model_is_written_as_one_that_says_the_same(name: str) -> None:
    model = config_from_hf(hf_models.CONFIGS[name])
    written = config_to_hf(dataclasses.replace(model, huggingface=""))
    again = config_from_hf(written)
    assert again.parameters == model.parameters
    for number in range(model.layers):
        layer = [[m.blocks[n] for n in m.period[number % len(m.period)]] for m in (model, again)]
        assert layer[0] == layer[1]


@pytest.mark.quick
def test_what_the_families_read() -> None:
    assert _block("llama", "attention").kv_heads == 2
    assert _block("llama", "attention", num_key_value_heads=None).kv_heads == 4
    assert _block("llama", "attention", rope_scaling=None).rope_scaling is None
    assert _block("llama", "attention").rope_scaling["original_length"] == 16
    assert _block("llama_biased", "attention").out_bias
    assert _block("llama_biased", "attention").head_dim == 16
    assert _block("llama_biased", "mlp").bias
    assert _block("llama", "mlp", hidden_act="gelu_pytorch_tanh").activation == "geglu_tanh"
    assert _block("qwen2", "window").window == 5
    assert _block("qwen2", "attention").bias
    assert not _block("qwen2", "attention").out_bias
    assert _block("qwen3", "attention").qk_norm
    assert _block("mixtral", "moe").normalize
    assert not _block("qwen2_moe", "moe").normalize
    assert _block("qwen2_moe", "moe").shared_ffn == 24
    assert _block("qwen2_moe", "attention", qkv_bias=False).bias is False
    assert _block("qwen3_moe", "moe", num_experts=None, num_local_experts=8).experts == 8
    assert config_from_hf({**LLAMA, "rms_norm_eps": 1e-3}).norm_eps == 1e-3
    assert config_from_hf({**LLAMA, "max_position_embeddings": 99}).max_length == 99


def test_what_is_absent_is_what_transformers_takes() -> None:
    """And null is not absent: as many key heads as heads."""
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 2}
    for model_type, kv, eps, length, base in (
        ("llama", 32, 1e-6, 2048, 1e4),
        ("mistral", 8, 1e-6, 131072, 1e4),
        ("qwen2", 32, 1e-6, 32768, 1e4),
        ("qwen3", 32, 1e-6, 32768, 1e4),
        ("mixtral", 8, 1e-5, 131072, 1e6),
        ("qwen2_moe", 16, 1e-6, 32768, 1e4),
        ("qwen3_moe", 4, 1e-6, 32768, 1e4),
    ):
        config = {"model_type": model_type, "num_attention_heads": 32, **sizes}
        model = config_from_hf(config)
        block = model.blocks["attention"]
        assert (block.kv_heads, model.norm_eps, model.max_length, block.rope_base) == (kv, eps, length, base), (
            model_type
        )
        assert config_from_hf({**config, "num_key_value_heads": None}).blocks["attention"].kv_heads == 32
    assert (
        config_from_hf({"model_type": "mistral", "num_attention_heads": 8, **sizes}).blocks["attention"].window == 4096
    )
    assert (
        config_from_hf({"model_type": "qwen3", "num_attention_heads": 32, **sizes}).blocks["attention"].head_dim == 128
    )
    no_dense = {key: value for key, value in hf_models.CONFIGS["qwen3_moe"].items() if key != "intermediate_size"}
    assert config_from_hf({**no_dense, "mlp_only_layers": []}).pattern == "attention+moe"
    with pytest.raises(ValueError, match="has intermediate_size"):
        config_from_hf(no_dense)


@pytest.mark.parametrize(
    ("name", "change", "pattern"),
    [
        ("qwen2_moe", {"decoder_sparse_step": 1}, "attention+moe"),
        ("qwen2_moe", {"mlp_only_layers": [1, 3]}, "attention+mlp"),
        ("qwen2_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [3]}, "3 attention+moe : 1 attention+mlp"),
        ("qwen3_moe", {"mlp_only_layers": None}, "attention+moe"),
        ("qwen2", {"max_window_layers": 4}, "attention+mlp"),
        ("qwen2", {"max_window_layers": 0}, "attention+mlp"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention", "full_attention"] * 2},
            "1 attention+mlp : 1 full_attention+mlp",
        ),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": 4, "decoder_sparse_step": 1, "max_window_layers": 9},
            "1 attention+moe : 1 full_attention+moe",
        ),
    ],
)
def test_which_layers_are_what(name: str, change: dict[str, Any], pattern: str) -> None:
    assert config_from_hf({**hf_models.CONFIGS[name], **change}).pattern == pattern


# Published models, by the keys that shape them, and how many parameters each is published to have.
PUBLISHED = {
    "Llama-3.1-8B": (
        8_030_261_248,
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
            "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "vocab_size": 128256,
        },
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {
            "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
        },
    ),
    "Qwen2.5-7B": (
        7_615_616_512,
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_size": 3584,
            "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
            "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
            "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
        },
    ),
    "Qwen3-0.6B": (
        596_049_920,
        {
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 1024,
            "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
            "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
            "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
        },
    ),
    "Mixtral-8x7B-v0.1": (
        46_702_792_704,
        {
            "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
            "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
        },
    ),
    "Qwen1.5-MoE-A2.7B": (
        14_315_784_192,
        {
            "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048,
            "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
            "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": False,
            "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
            "use_sliding_window": False, "vocab_size": 151936,
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        {
            "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
            "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
            "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
            "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
            "use_sliding_window": False, "vocab_size": 151936,
        },
    ),
}  # fmt: skip


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_size(name: str, caplog: pytest.LogCaptureFixture, nothing_said_yet: None) -> None:
    parameters, config = PUBLISHED[name]
    model = config_from_hf(config)
    assert model.parameters == parameters
    assert len(model.period) == 1, "one layer, scanned over"
    assert config_to_hf(model) == config
    assert not caplog.text, "every key of it is known"


@pytest.mark.quick
def test_both_spellings_of_rope_say_the_same() -> None:
    plain = {key: value for key, value in LLAMA.items() if key not in ("rope_scaling", "rope_theta")}
    new = {**plain, "rope_parameters": {**hf_models.LLAMA3, "rope_theta": 10000.0}}
    assert config_from_hf(new).blocks == config_from_hf(LLAMA).blocks
    assert config_to_hf(config_from_hf(new)) == new
    default = {**plain, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    block = config_from_hf(default).blocks["attention"]
    assert (block.rope_base, block.rope_scaling) == (5e5, None)
    # A length beside the table counts before the one in it; without any it is the context's.
    assert _block("llama", "attention", original_max_position_embeddings=32).rope_scaling["original_length"] == 32
    short = {k: v for k, v in hf_models.LLAMA3.items() if not k.startswith("original")}
    assert _block("llama", "attention", rope_scaling=short).rope_scaling["original_length"] == 128


def test_yarn_is_read_as_transformers_reads_it() -> None:
    def scaling(**keys: Any) -> Any:
        table = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **keys}
        return _block("qwen2", "attention", rope_scaling=table).rope_scaling

    assert scaling()["attention_factor"] == pytest.approx(1.1386, abs=1e-4)
    assert scaling(attention_factor=1.25)["attention_factor"] == 1.25
    assert scaling(mscale=1.0, mscale_all_dim=1.0)["attention_factor"] == 1.0
    assert scaling(factor=None)["factor"] == 4.0
    assert scaling(beta_fast=16)["beta_fast"] == 16
    with pytest.raises(ValueError, match="truncate"):
        scaling(truncate=False)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout would change"),
        ({"sliding_window": 4096}, "sliding_window would change"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "save it dequantized"),
        ({"auto_map": {"AutoModelForCausalLM": "mine.Model"}}, "code of its own"),
        ({"num_experts": 8}, "num_experts"),
        ({"layer_types": ["full_attention", "full_attention"]}, "layer_types"),
        ({"per_layer_config": {"0": {"hidden_act": "gelu"}}}, "per_layer_config"),
        ({"is_causal": False}, "is_causal"),
        ({"residual_multiplier": 0.5}, "residual_multiplier"),
        ({"residual_multiplier": True}, "residual_multiplier"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "'beta_fast'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "factor of linear rope is a number"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "turns the whole of a head"),
        ({"rope_scaling": ["linear"]}, "a table of keys"),
        ({"hidden_act": "relu2"}, "'relu2'"),
        ({"hidden_size": "32"}, "hidden_size of config.json is a whole number"),
        ({"hidden_size": 33}, "num_attention_heads divides hidden_size"),
        ({"num_hidden_layers": None}, "has num_hidden_layers"),
        ({"rms_norm_eps": 0}, "rms_norm_eps of config.json is a number above 0"),
        ({"attention_bias": 1}, "attention_bias of config.json is true or false"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_change_the_numbers_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config_from_hf({**LLAMA, **change})


@pytest.mark.parametrize(
    "inert",
    [
        {"attention_dropout": 0},
        {"attention_dropout": None},
        {"sliding_window": None},
        {"pretraining_tp": 2},
        {"partial_rotary_factor": 1.0},
        {"quantization_config": None},
    ],
)
def test_values_that_change_nothing_are_taken_and_kept(inert: dict[str, Any]) -> None:
    config = {**LLAMA, **inert}
    assert config_to_hf(config_from_hf(config)) == config


def test_a_word_that_nobody_knows_is_said_once(caplog: pytest.LogCaptureFixture, nothing_said_yet: None) -> None:
    for _ in range(2):
        config_from_hf({**LLAMA, "temperature_of_the_sun": 5772})
    assert caplog.text.count("temperature_of_the_sun") == 1


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("qwen2", {"layer_types": ["full_attention"]}, "a word a layer"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}, "have a window"),
        ("qwen2_moe", {"mlp_only_layers": "first"}, "mlp_only_layers is a list"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("mixtral", {"num_experts_per_tok": 5}, "top_k is at most"),
    ],
)
def test_families_refuse_what_is_theirs(family: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config_from_hf({**hf_models.CONFIGS[family], **change})


@pytest.mark.quick
def test_a_changed_model_keeps_its_own_keys_and_gets_the_new_ones() -> None:
    old = {**LLAMA, "mine": 1}
    model = config_from_hf(old)
    changed = model.with_overrides(blocks={"attention": {"rope_base": 7e5}}, vocab=128)
    assert config_to_hf(changed) == {**old, "vocab_size": 128, "rope_theta": 7e5}
    new = {k: v for k, v in old.items() if not k.startswith("rope")} | {"rope_parameters": {"rope_theta": 1e4}}
    base = config_from_hf(new).with_overrides(blocks={"attention": {"rope_base": 7e5}})
    written = config_to_hf(base)
    assert written["rope_theta"] == 7e5
    assert "rope_parameters" not in written
    norms = model.with_overrides(blocks={"attention": {"qk_norm": True}})
    with pytest.raises(ValueError, match=r"qk_norm of layer 0 would be False.*huggingface"):
        config_to_hf(norms)
    assert config_to_hf(dataclasses.replace(norms, huggingface=""))["model_type"] == "qwen3"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"softcap": 30.0}, "softcap = 30"),
        ({"norm": "layer"}, "norm = 'layer'"),
        ({"embed_scale": 2.0}, "embed_scale"),
        ({"blocks": {"attention": {"heads": 4, "softcap": 5.0}, "mlp": {"ffn": 8}}}, "softcap = 5.0 of attention"),
        ({"blocks": {"attention": {"heads": 4}, "mlp": {"ffn": 8, "activation": "gelu"}}}, "gated"),
        ({"pattern": "mlp+attention"}, "attention, then an mlp"),
        (
            {"blocks": {"attention": {"heads": 4, "bias": True, "qk_norm": True}, "mlp": {"ffn": 8}}},
            "llama: qk_norm of layer 0 would be False",
        ),
    ],
)
def test_what_no_family_has_is_named(keys: dict[str, Any], said: str) -> None:
    blocks = {"attention": {"heads": 4}, "mlp": {"ffn": 8}}
    model = ModularModelConfig(**{"hidden": 16, "layers": 2, "vocab": 32, "blocks": blocks, **keys})
    with pytest.raises(ValueError, match=said):
        config_to_hf(model)


def test_families_are_found_by_either_name() -> None:
    for model_type, family in FAMILIES.items():
        by_type = config_from_hf({"model_type": model_type, **hf_models.BASE})
        by_name = config_from_hf({"architectures": [family.architecture], **hf_models.BASE})
        assert by_type.blocks == by_name.blocks
