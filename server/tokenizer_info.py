"""GET /tokenizer_info: what a client needs to know to tokenize as this server does. No file's path is told."""

from typing import Any

from fastapi import FastAPI

from .serving import Serving


def add_tokenizer_info(app: FastAPI, serving: Serving) -> None:
    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """In the names of a tokenizer_config.json, as vLLM has them; the vocabulary's size and the context besides."""
        tokenizer = serving.engine.engine.tokenizer
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "chat_template": tokenizer.chat_template,
            **tokenizer.special_tokens_map,
            "added_tokens_decoder": {
                str(token): {
                    "content": entry.content,
                    "lstrip": entry.lstrip,
                    "normalized": entry.normalized,
                    "rstrip": entry.rstrip,
                    "single_word": entry.single_word,
                    "special": entry.special,
                }
                for token, entry in tokenizer.added_tokens_decoder.items()
            },
            "model_max_length": serving.max_model_len,
            "vocab_size": len(tokenizer),
        }
