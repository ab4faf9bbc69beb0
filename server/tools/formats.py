"""The formats by the names that vLLM gives them, and which one a chat template speaks of."""

from .gemma import FunctionGemma, Gemma4
from .json_list import Granite, Hermes, Hunyuan, Nemotron, Phi4Mini
from .llama3_json import Llama3Json
from .mistral import Mistral, MistralList
from .openai import CHANNEL, OpenAI
from .parser import ToolParser
from .pythonic import Lfm2, Olmo3, Pythonic
from .qwen3_xml import GlmXml, MiniMaxM2, Qwen3Xml, SeedXml
from .sections import FENCE, DeepSeekV3, DeepSeekV31, KimiK2

FORMATS: dict[str, type[ToolParser]] = {  # a format's own name comes before those of the models that share it
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
    "functiongemma": FunctionGemma,
    "gemma4": Gemma4,
    "glm45": GlmXml,
    "glm47": GlmXml,
    "granite": Granite,
    "hermes": Hermes,
    "ernie45": Hermes,
    "granite4": Hermes,
    "hunyuan_a13b": Hunyuan,
    "kimi_k2": KimiK2,
    "lfm2": Lfm2,
    "llama3_json": Llama3Json,
    "llama4_json": Llama3Json,
    "llama_nemotron_json": Nemotron,
    "minimax_m2": MiniMaxM2,
    "mistral": Mistral,
    "mistral_list": MistralList,
    "olmo3": Olmo3,
    "openai": OpenAI,
    "phi4_mini_json": Phi4Mini,
    "pythonic": Pythonic,
    "llama4_pythonic": Pythonic,
    "qwen3_coder": Qwen3Xml,
    "qwen3_xml": Qwen3Xml,
    "seed_oss": SeedXml,
}
NO_PARSER = "none"
"""The name, among those of parsers, of leaving the text as it is."""


def detected(template: str) -> type[ToolParser] | None:
    """The format that a chat template shows the model; None if it shows none that is known."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return Qwen3Xml if "<function=" in template else GlmXml if "<arg_key>" in template else Hermes
    if f"{CHANNEL}commentary" in template:
        return OpenAI
    if "[TOOL_CALLS]" in template:
        return Mistral if "[ARGS]" in template else MistralList
    if any(word in template for word in ("<|/tool|>", Phi4Mini.closing, "functools[")):
        return Phi4Mini
    if DeepSeekV31.opening in template:
        return DeepSeekV3 if FENCE in template else DeepSeekV31
    for format in (FunctionGemma, Gemma4, Granite, Hunyuan, KimiK2, MiniMaxM2, Nemotron, SeedXml):
        if format.opening in template:
            return format
    if any(word in template for word in (Lfm2.opening, "<|tool_list_start|>", "List of tools: [")):
        return Lfm2
    if Olmo3.opening in template and "<functions>" in template:
        return Olmo3
    if "func_name1(" in template:  # [func_name1(params_name1=params_value1, ...), func_name2(params)]
        return Pythonic
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters": ' in template):
        return Llama3Json
    return None
