"""Which format of tool calls a chat template speaks of."""

import pytest

from foretoken.server.tools.formats import detected
from foretoken.server.tools.gemma import FunctionGemma, Gemma4
from foretoken.server.tools.json_list import Granite, Hermes, Nemotron, Phi4Mini
from foretoken.server.tools.llama3_json import Llama3Json
from foretoken.server.tools.mistral import Mistral, MistralList
from foretoken.server.tools.openai import OpenAI
from foretoken.server.tools.parser import ToolParser
from foretoken.server.tools.pythonic import Lfm2, Olmo3, Pythonic
from foretoken.server.tools.qwen3_xml import GlmXml, MiniMaxM2, Qwen3Xml, SeedXml
from foretoken.server.tools.sections import DeepSeekV3, DeepSeekV31, KimiK2

TEMPLATES = [
    ("{%- if tools %}<tools></tools> <tool_call>\n{\"name\": <function-name>}", Hermes),
    ("{% for tool in tools %}<tool_call>\n<function=example>", Qwen3Xml),
    ("{{ '[AVAILABLE_TOOLS]' + (tools | tojson) }} [TOOL_CALLS][{", MistralList),
    ("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]", Mistral),
    ("{% if tools %}{{ 'functions.' + name + '<|channel|>commentary ' }}", OpenAI),
    ("{% if tools %}<|python_tag|>", Llama3Json),
    ('{% if tools %}<|start_header_id|> {"name": function name, "parameters": dict', Llama3Json),
    ("{% if tools %}respond only with <|tool_call|> followed by a JSON list", Granite),
    ("{{ '<|system|>' + m.content + '<|tool|>' + m['tools'] + '<|/tool|>' }}", Phi4Mini),
    ("{% for t in tools %} formatted as functools[{", Phi4Mini),
    ("{% if tools %}<tool_call>{function-name}\n<arg_key>", GlmXml),
    ("{% if tools %}<TOOLCALL>[{", Nemotron),
    ("{% if tools %}{{ '<|tool_call>call:' }}", Gemma4),
    ("{% if tools %}<start_function_call>call:", FunctionGemma),
    ("{% if tools %}<seed:tool_call>\n<function=", SeedXml),
    ("{% if tools %}{%- set toolcall_begin_token = '<minimax:tool_call>' -%}\n<invoke name=", MiniMaxM2),
    (f"{{% if tools %}}{DeepSeekV3.opening}{DeepSeekV3.begin}function{DeepSeekV3.separator}FUNCTION_NAME\n```json", DeepSeekV3),
    (f"{{% if tools %}}{DeepSeekV31.opening}{DeepSeekV31.begin}NAME{DeepSeekV31.separator}ARGUMENTS{DeepSeekV31.end}", DeepSeekV31),
    (f"{{{{ tools | tojson }}}}{KimiK2.opening}{KimiK2.begin}{{{{ formatted_id }}}}{KimiK2.separator}", KimiK2),
    ("List of tools: <|tool_list_start|>[{{ tools | tojson }}]<|tool_list_end|>", Lfm2),
    ("List of tools: [{{ tools | tojson }}]", Lfm2),
    ("{{ '<functions>' + (tools | tojson) }} within <function_calls></function_calls> XML tags", Olmo3),
    ("{% if tools %}<|start_header_id|> in the format of [func_name1(params_name1=params_value1...), func_name2(params)]", Pythonic),
    ("{% if tools %}{{ tools | tojson }}", None),
    ("{{ messages }} <tool_call>", None),
    ("", None),
]


@pytest.mark.parametrize(("template", "format"), TEMPLATES)
def test_the_format_is_what_the_template_says(template: str, format: type[ToolParser] | None) -> None:
    assert detected(template) is format
