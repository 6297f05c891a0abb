"""The keys of a config.json: read by type, with what transformers takes where one is absent; none is passed over.

A family reads its keys through `Keys`, which remembers them. What is left is then one of three: a key that is known to
change no number; a key that would change the numbers, which has to have a value under which it does not; or a word that
nobody knows, which is said once and kept.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from capibara.errors import rule_error, say_once, unknown_name

__all__ = ["Keys"]

_log = logging.getLogger(__name__)

_REQUIRED = object()

# Metadata, generation defaults and what only matters while transformers itself trains or initialises.
_WORDS = """
    _name_or_path architectures model_type transformers_version torch_dtype dtype use_cache initializer_range
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id cls_token_id unk_token_id mask_token_id
    output_attentions output_hidden_states output_router_logits return_dict return_dict_in_generate torchscript
    pretraining_tp gradient_checkpointing tokenizer_class problem_type id2label label2id num_labels finetuning_task
    task_specific_params prefix chunk_size_feed_forward is_decoder is_encoder_decoder add_cross_attention
    tie_encoder_decoder cross_attention_hidden_size max_length min_length do_sample temperature top_k top_p typical_p
    num_beams num_beam_groups diversity_penalty length_penalty repetition_penalty early_stopping no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values forced_bos_token_id
    forced_eos_token_id exponential_decay_length_penalty suppress_tokens begin_suppress_tokens output_scores
    attn_implementation _attn_implementation _attn_implementation_autoset experts_implementation _experts_implementation
    use_return_dict tf_legacy_loss use_bfloat16 unsloth_version unsloth_fixed transformers.js_config
    original_max_position_embeddings
"""
_HARMLESS = frozenset(_WORDS.split())

# Numbers hang on these in some model or another; the values are those under which they do not.
_NOTHING: tuple[Any, ...] = (None, False, 0, 0.0, [], {})
_INERT: Mapping[str, tuple[Any, ...]] = {
    "attention_dropout": (None, 0, 0.0),
    "attn_pdrop": (None, 0, 0.0),
    "dropout": (None, 0, 0.0),
    "embd_pdrop": (None, 0, 0.0),
    "embedding_dropout": (None, 0, 0.0),
    "hidden_dropout": (None, 0, 0.0),
    "resid_pdrop": (None, 0, 0.0),
    "router_jitter_noise": (None, 0, 0.0),
    "layerdrop": (None, 0, 0.0),
    "attention_bias": (None, False),
    "attention_out_bias": (None, False),
    "mlp_bias": (None, False),
    "qkv_bias": (None, False),
    "lm_head_bias": (None, False),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "scale_emb": (None, 1, 1.0),
    "scale_depth": (None,),
    "logit_scale": (None, 1, 1.0),
    "clip_qkv": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "rotary_pct": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None, 0),
    "position_embedding_type": (None, "rope", "absolute"),
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "attention_sinks": (None, False),
    "layer_types": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "sliding_window_pattern": (None,),
    "num_experts": _NOTHING,
    "num_local_experts": _NOTHING,
    "n_routed_experts": _NOTHING,
    "n_shared_experts": _NOTHING,
    "num_shared_experts": _NOTHING,
    "shared_expert_intermediate_size": _NOTHING,
    "routed_scaling_factor": (None, 1, 1.0),
    "moe_layer_freq": (None,),
    "first_k_dense_replace": (None, 0),
    "num_nextn_predict_layers": (None, 0),
    "q_lora_rank": (None,),
    "kv_lora_rank": (None,),
    "is_causal": (None, True),
    "pruned_heads": (None, {}),
    "per_layer_config": (None, {}),
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    "auto_map": (None, {}),
    "adapter_config": (None, {}),
}
_WHY = {
    "quantization_config": "load it where it was quantized, and save it dequantized",
    "compression_config": "load it where it was compressed, and save it plain",
    "auto_map": "its numbers are those of code of its own; take the key out where that is the family's plain decoder",
    "attention_dropout": "set it to 0.0; it counts while training alone",
    "router_jitter_noise": "set it to 0.0; it counts while training alone",
}


class Keys:
    """A config.json as a family reads it."""

    def __init__(self, values: Mapping[str, Any], family: str) -> None:
        self.values = values
        self.family = family
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Whatever is there."""
        self._read.add(key)
        return self.values.get(key, default)

    def whole(self, key: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        """A whole number. One that is null or absent is the default."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._wrong(key, f"a whole number from {least} up")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A number above 0. One that is null or absent is the default."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self._wrong(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false. One that is null or absent is the default."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def word(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """What a word of the choices stands for."""
        value = self._value(key, default)
        if value not in choices:
            raise unknown_name(f"{key} of {self.family}", value, choices)
        return choices[value]

    def check_rest(self) -> None:
        """What no one read is harmless, or has a value that changes nothing; what nobody knows is said once."""
        unknown = []
        for key, value in self.values.items():
            if key in self._read:
                continue
            if key in _INERT:
                if not _is_inert(value, _INERT[key]):
                    raise rule_error(
                        f"{key} would change the numbers of a {self.family} model, and there is no such part here",
                        f"{key} = {value!r}",
                        _WHY.get(key, f"set it to {_spelled(_INERT[key])} if the model was trained without it"),
                    )
            elif key not in _HARMLESS:
                unknown.append(key)
        if unknown:
            say_once(
                _log,
                (self.family, tuple(unknown)),
                "config.json of a %s model has keys that the family does not have: %s. They are kept and change "
                "nothing here",
                self.family,
                ", ".join(unknown),
            )

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise rule_error(
                f"config.json of a {self.family} model has {key}", "none", f'add "{key}": the number it was made with'
            )
        return default

    def _wrong(self, key: str, what: str) -> ValueError:
        return rule_error(f"{key} of config.json is {what}", repr(self.values.get(key)), f"mend {key}")


def _is_inert(value: Any, inert: Collection[Any]) -> bool:
    # 0 == False, and both are meant where one is; 1 == True is not.
    return any(value == one and (isinstance(value, bool) == isinstance(one, bool) or not value) for one in inert)


def _spelled(inert: tuple[Any, ...]) -> str:
    shown = inert[-1]
    return "null" if shown is None else str(shown).lower() if isinstance(shown, bool) else repr(shown)
