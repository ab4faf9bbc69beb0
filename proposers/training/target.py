"""A target in training: a Llama-shaped model from scratch that learns the text it reads."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from . import packed_attention
from .cross_entropy import linear_cross_entropy
from .frozen import product_type
from .loop import Losses, Trainee
from .packing import Packed
from .tokenizer import END_OF_TEXT

TEMPERATURE = 0.7
"""That is recommended: at 1 such a small model strays."""


@dataclass(frozen=True)
class Shape:
    """Size of one Llama model; the head has the embedding's weights."""

    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 688

    def build(self, vocab_size: int) -> LlamaForCausalLM:
        """Random weights. The ids of <|im_end|> and <|pad|> are the tokenizer module's."""
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=3,
        ))
        model.set_attn_implementation(packed_attention.NAME)
        return model


class TargetTrainee(Trainee):
    """Next-token cross-entropy; tokens that are only read (prompts) count `read_weight`."""

    def __init__(self, model: LlamaForCausalLM, read_weight: float = 0.3):
        super().__init__()
        self.model, self.read_weight = model, read_weight

    def loss(self, batch: Packed) -> Losses:
        hidden = last_states(self.model, batch)
        labels, answers = batch.ahead(1)
        weights = answers + self.read_weight * (batch.inside(1) - answers)
        total, right = linear_cross_entropy(hidden.to(product_type(hidden)), self.model.lm_head.weight, labels, weights)
        weight = float(weights.sum())
        return Losses(total, weight, {"loss": (float(total.detach()), weight), "accuracy": (float(right.sum()), weight)})


def last_states(model: LlamaForCausalLM, batch: Packed) -> Tensor:
    """[N, hidden] behind the last norm, of a model with packed attention."""
    return model.model(
        input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, bounds=batch.bounds,
    ).last_hidden_state[0]


def write_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A folder that transformers loads: bfloat16 weights, configuration, tokenizer and chat template. `model` stays as it is."""
    half = LlamaForCausalLM(model.config).bfloat16()
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=TEMPERATURE,
    )
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
