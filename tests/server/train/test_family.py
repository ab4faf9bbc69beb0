"""What the recipe of a family writes beside its weights. Whole trainings are in test_command.py and tests/proposers/training."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from foretoken.engine.demo_model import __file__ as demo_model
from foretoken.server.train.family import publish

TOKENIZER = Path(demo_model).parent / "target" / "tokenizer.json"


@pytest.mark.parametrize("space", ["Ġ", " "], ids=["bytes", "text"])
def test_a_published_tokenizer_is_the_same_in_fewer_bytes(space: str, tmp_path: Path) -> None:
    """A merge is one string where no token has a space in it."""
    family, out = tmp_path / "family", tmp_path / "out"
    (family / "target").mkdir(parents=True)
    written = family / "target" / "tokenizer.json"
    text = Tokenizer.from_file(str(TOKENIZER)).to_str(pretty=True).replace("Ġ", space)
    written.write_text(text, encoding="utf-8")
    (family / "pard").mkdir()
    (family / "pard" / "tokenizer.json").write_text(text, encoding="utf-8")
    for name, template in (("target", "{{ 1 }}"), ("draft_model", "{{ 1 }}"), ("pard", "{{ 2 }}")):
        (family / name).mkdir(exist_ok=True)
        (family / name / "chat_template.jinja").write_text(template)
    publish(family, out)
    publish(family, out)  # over what is there
    published = out / "target" / "tokenizer.json"
    assert json.loads(Tokenizer.from_file(str(published)).to_str()) == json.loads(text)
    assert published.stat().st_size < 0.6 * written.stat().st_size
    assert (published.stat().st_size == TOKENIZER.stat().st_size) == (space == "Ġ")
    link = out / "pard" / "tokenizer.json"
    assert link.is_symlink() and link.read_bytes() == published.read_bytes()
    same, other = (out / name / "chat_template.jinja" for name in ("draft_model", "pard"))
    assert same.is_symlink() and same.read_text() == "{{ 1 }}" and not other.is_symlink() and other.read_text() == "{{ 2 }}"
