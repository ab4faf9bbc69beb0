from pathlib import Path

import pytest
from tiny_models import CHAT_TEMPLATE, save_tokenizer

from foretoken.engine.chat_template import in_parts, takes_tools, wants_parts, writes_calls

OF_PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
OF_EITHER = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, False),
        (OF_PARTS, True),
        (OF_EITHER, False),
        ("{% for m in messages %}{{ 'user: ' + m.content[0].text }}{% endfor %}", True),
        ("nothing of what is said", False),
        ("{{ raise_exception('never') }}", False),
        ("{% for %}", False),
        (None, False),
    ],
)
def test_templates_are_tried(tmp_path: Path, template: str | None, expected: bool) -> None:
    tokenizer = save_tokenizer(tmp_path)
    assert wants_parts(tokenizer, template) is expected
    tokenizer.chat_template = template
    assert wants_parts(tokenizer) is expected


def test_turns_in_parts() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": []}]
    assert in_parts(turns) == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {**turns[1], "content": []}]


@pytest.mark.parametrize(
    ("template", "place"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}", "argument"),
        ("{% for m in messages %}{{ m.content[0].text }}{% endfor %}{{ tools }}", "argument"),
        ("{% for m in messages %}{{ m.content }}{% if 'tools' in m %}{{ m['tools'] }}{% endif %}{% endfor %}", "system"),
        ("{% for m in messages %}{{ m.content }}{% endfor %} no tools", None),
        ("{{ raise_exception('tools') }}", "argument"),
        (CHAT_TEMPLATE, None),
        (None, None),
    ],
)
def test_where_tools_are_taken_from(tmp_path: Path, template: str | None, place: str | None) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = template
    assert takes_tools(tokenizer) == place


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, False),
        (CHAT_TEMPLATE + "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}", True),
        ("{{ raise_exception('no role of tools') }}", True),
    ],
)
def test_whether_calls_are_written(tmp_path: Path, template: str, expected: bool) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = template
    assert writes_calls(tokenizer) is expected
