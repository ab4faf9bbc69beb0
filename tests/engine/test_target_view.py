from pathlib import Path

import transformers
from tiny_models import save_tokenizer

from foretoken.engine.config import ModelConfig
from foretoken.engine.model import load_model
from foretoken.engine.target_view import target_view


def test_sizes_are_found_under_the_names_of_the_family(tmp_path: Path) -> None:
    """GPT-2's file says n_embd; without the view nothing of that family could be served, with drafters or without."""
    tokenizer = save_tokenizer(tmp_path)
    config = transformers.GPT2Config(vocab_size=len(tokenizer), n_embd=24, n_layer=2, n_head=4, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    view = target_view(load_model(ModelConfig(str(tmp_path)), lambda line: None))
    assert (view.hidden_size, view.num_layers, view.vocab_size, view.max_model_len) == (24, 2, len(tokenizer), 64)
