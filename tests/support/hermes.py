"""A model whose template shows it all that it is given, thinks where it is told to, and calls two functions as Hermes does."""

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}~{{ m.reasoning_content }}~{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING = TEMPLATE + "{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}"
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
