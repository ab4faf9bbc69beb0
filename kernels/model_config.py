"""config.json as transformers' classes read it, what it leaves out included. Llama's class is here.

transformers' own imports its activations, and with them torch._dynamo, torch.distributed and sympy: that takes as long as torch itself,
and no program needs it. (Fields are checked by their types, so `annotations` of __future__ would switch the checks off.)
"""

from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


@strict
class LlamaConfig(PreTrainedConfig):
    """In fields, defaults and checks as the class of the same name in transformers, which finds Llama's other classes by this name.

    But heads of a width of their own need not share the hidden size evenly (kanana-1.5-2.1b, drafters of 24 heads for 5,120).
    """

    model_type = "llama"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None  # as many as heads
    head_dim: int | None = None  # an equal share of the hidden size
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters | dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    attention_dropout: int | float | None = 0.0
    initializer_range: float = 0.02
    pretraining_tp: int | None = 1
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **others: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**others)

    def validate_architecture(self) -> None:
        if self.hidden_size % self.num_attention_heads and self.head_dim == self.hidden_size // self.num_attention_heads:
            raise ValueError(f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads ({self.num_attention_heads})")


def config_class(model_type: str) -> type[Any]:
    """The class for the settings of a family. Raises KeyError for one that transformers does not know."""
    return LlamaConfig if model_type == LlamaConfig.model_type else CONFIG_MAPPING[model_type]


def read_model_config(folder: Path, model_type: object) -> PreTrainedConfig:
    """The settings in a folder whose config.json says this type. Raises whatever their class does if they are not valid.

    How weights are stored is not among them: weights.py reads that beside the weights, and gives them in plain numbers.
    """
    reader: Any = LlamaConfig if model_type == LlamaConfig.model_type else AutoConfig
    found = reader.from_pretrained(folder, name_or_path=folder, trust_remote_code=False, local_files_only=True)
    for part in (found, found.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            vars(part).pop(name, None)
    return found
