"""The tokenizer in a GGUF file, as the tokenizers library has it: byte-level BPE, and SentencePiece's BPE.

A file has tokens and merges. How a text is cut before is told by a name only, which stands for what the published tokenizers of that
name do.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKED = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES_ALONE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = [_BYTES_ALONE | {"use_regex": True}]


def _cut(pattern: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, _BYTES_ALONE]


_CUTS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx", "lfm2"), _cut(_WORDS % "{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _cut(_WORDS % "")),
    "qwen35": _cut(_MARKED),
    "tekken": _cut(_CASED % ("", "", "")),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _cut(_CASED % (f"{_ENGLISH}?", f"{_ENGLISH}?", "{1,3}"))),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "mellum", "exaone4", "a.x-4.0", "trillion"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), [{"type": "Digits", "individual_digits": True}, *_GPT2]),
}
_COMPOSED = ("qwen2", "qwen35")  # texts are brought into Unicode's form C first
# A word that is a token is that, without merges; and texts begin with a first token where a file does not say.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken")
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<|return|>")


def tokenizer_files(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """tokenizer.json and tokenizer_config.json by name, from what a file says; None if it is of a kind that is not read."""
    of = _Tokens(values)
    match of.get("model"):
        case "gpt2" if of.get("pre") in _CUTS and of.get("merges"):
            parts = _byte_level(of)
        case "llama" if of.get("scores"):
            parts = _sentencepiece(of)
        case _:
            return None
    starts = of.get("add_bos_token", of.get("model") == "llama" or of.get("pre") in _WHOLE_WORDS)
    first = of.token("bos_token_id") if starts else None
    special = {first: {"id": first, "ids": [of.get("bos_token_id")], "tokens": [first]}} if first is not None else {}
    beginning = [{"SpecialToken": {"id": first, "type_id": 0}}] if first is not None else []
    template = {
        "type": "TemplateProcessing",
        "single": [*beginning, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [*beginning, {"Sequence": {"id": "A", "type_id": 0}}, *beginning, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }
    names = {f"{kind}_token": of.token(f"{key}_token_id") for kind, key in _SPECIAL.items()}
    config = {name: token for name, token in names.items() if token is not None}
    if template_of_chats := values.get("tokenizer.chat_template"):
        config["chat_template"] = template_of_chats
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": of.added(), "post_processor": template, **parts}
    return {"tokenizer.json": whole, "tokenizer_config.json": config}


def ends(values: Mapping[str, Any]) -> list[int]:
    """Tokens that end a text or a turn: those that a file calls so, and those whose names say it."""
    of = _Tokens(values)
    told = {of.get(f"{kind}_token_id") for kind in ("eos", "eot", "eom")} - {None}
    return sorted(told.union(index for index in of.of_types(_CONTROL, _USER_DEFINED) if of.tokens[index] in _ENDS))


_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


class _Tokens:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.tokens: Sequence[str] = self.get("tokens", ())
        self.types: Sequence[int] = self.get("token_type", ()) or [1] * len(self.tokens)

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(f"tokenizer.ggml.{key}", default)

    def token(self, key: str) -> str | None:
        index = self.get(key)
        return self.tokens[index] if isinstance(index, int) and index < len(self.tokens) else None

    def of_types(self, *types: int) -> list[int]:
        return [index for index, type in enumerate(self.types) if type in types]

    def vocabulary(self) -> dict[str, int]:
        """Without what fills a table up to a round size."""
        filling = re.compile(r"\[PAD\d+\]")
        unused = {index for index in self.of_types(_UNUSED) if filling.fullmatch(self.tokens[index])}
        return {token: index for index, token in enumerate(self.tokens) if index not in unused}

    def added(self) -> list[dict[str, Any]]:
        """Those that texts have whole. Runs of spaces are not among them: they are written otherwise in a text."""
        strips = self._values.get("general.architecture") == "phi3" and self.get("model") == "llama"
        return [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": strips and token not in ("<unk>", "<s>", "<|endoftext|>"),  # as Phi-3's says
                "normalized": False,
                "special": self.types[index] in (_UNKNOWN, _CONTROL),
            }
            for index in self.of_types(_UNKNOWN, _CONTROL, _USER_DEFINED)
            if (token := self.tokens[index]).strip("▁")
        ]


def _byte_level(of: _Tokens) -> dict[str, Any]:
    pre = of.get("pre")
    model = {"type": "BPE", "vocab": of.vocabulary(), "merges": [pair.split(" ", 1) for pair in of.get("merges")]}
    return {
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _CUTS[pre]},
        "decoder": _BYTES_ALONE,
        "model": model | {"ignore_merges": pre in _WHOLE_WORDS, "byte_fallback": False, "fuse_unk": False},
    }


def _sentencepiece(of: _Tokens) -> dict[str, Any]:
    """Its merges are not written down: any two tokens merge that make one, the likeliest first."""
    vocabulary, scores = of.vocabulary(), of.get("scores")
    whole = set(of.of_types(_UNKNOWN, _CONTROL, _BYTE))
    merges: list[tuple[float, list[str]]] = []
    for token, index in vocabulary.items():
        if index not in whole:
            pairs = ([token[:cut], token[cut:]] for cut in range(1, len(token)))
            merges += [(-scores[index], pair) for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
    merges.sort(key=lambda merge: merge[0])
    prefix = of.get("add_space_prefix", True)
    to_space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    normalizers = [{"type": "Prepend", "prepend": "▁"}] * prefix + [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    model = {"type": "BPE", "vocab": vocabulary, "merges": [pair for _, pair in merges], "byte_fallback": True, "fuse_unk": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": model | {"unk_token": of.token("unknown_token_id"), "ignore_merges": False},
    }
