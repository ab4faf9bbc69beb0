"""A frozen target, its documents packed, against transformers with each document by itself."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foretoken.proposers.training.frozen import FrozenTarget
from foretoken.proposers.training.packing import Packed

BOUNDS = (0, 9, 30)
SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}
GPT_OSS: dict[str, Any] = {"head_dim": 8, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SIZES),
        transformers.MistralConfig(**SIZES, sliding_window=4),
        transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=4, attn_logit_softcapping=1.0, final_logit_softcapping=1.0),
        transformers.GptOssConfig(**SIZES, **GPT_OSS, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
        transformers.AfmoeConfig(
            **SIZES, head_dim=8, num_experts=2, num_experts_per_tok=1, num_dense_layers=1, moe_intermediate_size=8, mup_enabled=True
        ),
        transformers.HyperCLOVAXConfig(**SIZES, logits_scaling=0.2),
        transformers.GraniteConfig(**SIZES, embedding_multiplier=3.0, logits_scaling=0.2, residual_multiplier=0.5),
    ],
    ids=lambda config: config.model_type,
)
def test_states_and_probabilities_are_the_models_own(config: transformers.PretrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)      # else no cap or sink shows
    model.save_pretrained(tmp_path)
    ids = torch.randint(1, 50, (BOUNDS[-1],))
    with torch.no_grad():
        alone = [model(input_ids=part[None], use_cache=False, output_hidden_states=True) for part in ids.split([9, 21])]
    embedded, first, last = (torch.cat([one.hidden_states[at][0] for one in alone]) for at in (0, 1, -1))

    target = FrozenTarget.load(tmp_path)
    loaded = weakref.ref(target.model)
    states = target(Packed(ids, torch.ones(30, dtype=torch.bool), BOUNDS), [0])

    torch.testing.assert_close(target.embed(ids), embedded)
    torch.testing.assert_close(states.layers[0], first)
    torch.testing.assert_close(states.last, last)
    probs = torch.cat([one.logits[0] for one in alone]).softmax(-1)
    torch.testing.assert_close(target.teacher(states.last, target.head, 1.0).probs(slice(None)), probs)
    gc.disable()
    del target
    gc.enable()
    assert loaded() is None, "gigabytes wait for the garbage collector"


def test_a_target_whose_layers_lie_elsewhere_is_refused(tmp_path: Path) -> None:
    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=50)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="targets of type gpt2 can be served, but drafters are not trained for them"):
        FrozenTarget.load(tmp_path)
