"""What the API answers, as JSON schemas by name: the `components` of its OpenAPI document that no request model describes.

Owns the answers' shapes as clients may rely on them. The routes write them by hand; tests hold both together.
"""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: str | bool | None) -> Schema:
    return {"enum": list(values)}


def record(optional: Mapping[str, Schema] | None = None, /, **required: Schema) -> Schema:
    """An object with these keys. Others may come with later versions."""
    return {"type": "object", "properties": required | dict(optional or {}), "required": list(required)}


def listing(items: Schema) -> Schema:
    return record(object=one_of("list"), data=many(items))


_FINISHED = one_of("stop", "length", "tool_calls")
_UNFINISHED = one_of("stop", "length", "tool_calls", None)
_SOURCES = many(record(token_id=COUNT, proposer=maybe(TEXT)))
_TOKEN_IDS = many(COUNT)
_REASONING: dict[str, Schema] = {"reasoning": TEXT, "reasoning_content": TEXT}
_PROMPT_LOGPROBS = maybe(many(maybe({"type": "object", "additionalProperties": ref("PromptLogprob")})))
_CALL_DELTA = record({"id": TEXT, "type": one_of("function"), "function": record({"name": TEXT, "arguments": TEXT})}, index=COUNT)
_ENVELOPE = {"id": TEXT, "created": WHOLE, "model": TEXT, "system_fingerprint": TEXT}
_STOP_REASON = {"anyOf": [TEXT, WHOLE, {"type": "null"}]}
_TOTALS = {"usage": maybe(ref("Usage")), "metrics": ref("RequestMetrics")}
_RESPONSE_STATUS = one_of("queued", "in_progress", "completed", "incomplete", "cancelled", "failed")

ANSWERS: dict[str, Schema] = {
    "Error": record(error=record(message=TEXT, type=TEXT, param=maybe(TEXT), code=maybe(TEXT))),
    "Health": record(status=TEXT),
    "Version": record(version=TEXT),
    "Load": record(server_load=COUNT),
    "Model": record(
        {"root": TEXT, "parent": TEXT},  # of an adapter
        id=TEXT, object=one_of("model"), created=WHOLE, owned_by=TEXT, max_model_len=COUNT,
    ),
    "ModelList": listing(ref("Model")),
    "AdaptersLoaded": record(success=FLAG, loaded_adapters={"type": "object", "additionalProperties": TEXT}),
    "AdapterList": many(record(id=COUNT, path=TEXT, scale=NUMBER, name=TEXT)),
    "Tokens": record(count=COUNT, max_model_len=COUNT, tokens=_TOKEN_IDS, token_strs=maybe(many(TEXT))),
    "Detokenized": record(prompt=TEXT),
    "TokenizerInfo": record(
        tokenizer_class=TEXT, chat_template=maybe(TEXT), added_tokens_decoder=ANY_OBJECT, model_max_length=COUNT, vocab_size=COUNT
    ),
    "Usage": record(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=record(cached_tokens=COUNT),
        completion_tokens_details=record(accepted_prediction_tokens=COUNT, rejected_prediction_tokens=COUNT, reasoning_tokens=COUNT),
    ),
    "SpeculationFigures": record(
        mean_acceptance_length=NUMBER,
        draft_acceptance_rate={"type": "number", "minimum": 0, "maximum": 1},
        acceptance_histogram=many(COUNT),
        num_spec_steps=COUNT,
        num_draft_tokens=COUNT,
        num_accepted_draft_tokens=COUNT,
        num_spec_tokens=COUNT,
        lossy=maybe(TEXT),  # the acceptance rule, if it changes what is said
    ),
    "RequestMetrics": record(
        {
            "queue_time_ms": maybe(NUMBER),
            "time_to_first_token_ms": NUMBER,
            "generation_time_ms": NUMBER,
            "mean_itl_ms": maybe(NUMBER),
            "tokens_per_second": NUMBER,
        },
        speculative_decoding=ref("SpeculationFigures"),
    ),
    "TokenLogprob": record({"top_logprobs": many(ref("TokenLogprob"))}, token=TEXT, logprob=NUMBER, bytes=maybe(many(COUNT))),
    "PromptLogprob": record(logprob=NUMBER, rank=maybe(COUNT), decoded_token=maybe(TEXT)),
    "ChatLogprobs": record(content=many(ref("TokenLogprob")), refusal={"type": "null"}),
    "CompletionLogprobs": record(
        tokens=many(TEXT),
        token_logprobs=many(maybe(NUMBER)),
        top_logprobs=many(maybe({"type": "object", "additionalProperties": NUMBER})),
        text_offset=many(COUNT),
    ),
    "CalledTool": record(id=TEXT, type=one_of("function"), function=record(name=TEXT, arguments=TEXT)),
    "AssistantMessage": record(
        {**_REASONING, "tool_calls": many(ref("CalledTool"))}, role=one_of("assistant"), content=maybe(TEXT), refusal={"type": "null"}
    ),
    "ChatCompletion": record(
        {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _TOKEN_IDS},
        **_ENVELOPE,
        object=one_of("chat.completion"),
        choices=many(
            record(
                {"token_ids": _TOKEN_IDS, "speculative_decoding": ref("SpeculationFigures")},
                index=COUNT,
                message=ref("AssistantMessage"),
                logprobs=maybe(ref("ChatLogprobs")),
                finish_reason=_FINISHED,
                stop_reason=_STOP_REASON,
            )
        ),
        usage=ref("Usage"),
        metrics=ref("RequestMetrics"),
    ),
    "ChatCompletionChunk": record(
        {**_TOTALS, "prompt_token_ids": _TOKEN_IDS},
        **_ENVELOPE,
        object=one_of("chat.completion.chunk"),
        choices=many(
            record(
                {"stop_reason": _STOP_REASON, "speculation": _SOURCES, "token_ids": _TOKEN_IDS, "prompt_token_ids": _TOKEN_IDS},
                index=COUNT,
                delta=record({"role": one_of("assistant"), "content": TEXT, **_REASONING, "tool_calls": many(_CALL_DELTA)}),
                logprobs=maybe(ref("ChatLogprobs")),
                finish_reason=_UNFINISHED,
            )
        ),
    ),
    "Completion": record(
        _TOTALS,  # in a stream on the last chunk only
        **_ENVELOPE,
        object=one_of("text_completion"),
        choices=many(
            record(
                {
                    "stop_reason": _STOP_REASON,
                    "speculation": _SOURCES,
                    "speculative_decoding": ref("SpeculationFigures"),
                    "token_ids": _TOKEN_IDS,
                    "prompt_token_ids": _TOKEN_IDS,
                    "prompt_logprobs": _PROMPT_LOGPROBS,
                },
                index=COUNT,
                text=TEXT,
                logprobs=maybe(ref("CompletionLogprobs")),
                finish_reason=_UNFINISHED,
            )
        ),
    ),
    "Infill": record({"content": TEXT, "stop": FLAG, "timings": ANY_OBJECT}),
    "Embeddings": {
        **listing(record(object=one_of("embedding"), index=COUNT, embedding={"anyOf": [many(NUMBER), TEXT]})),
        "description": "embedding is a string, base64 of little-endian float32, where encoding_format asks for it",
    },
    "Response": record(
        {"metrics": ref("RequestMetrics")},
        id=TEXT,
        object=one_of("response"),
        created_at=WHOLE,
        status=_RESPONSE_STATUS,
        background=FLAG,
        completed_at=maybe(WHOLE),
        error=maybe(record(code=TEXT, message=TEXT)),
        incomplete_details=maybe(record(reason=TEXT)),
        model=TEXT,
        output=many(ref("ResponseItem")),
        previous_response_id=maybe(TEXT),
        store=FLAG,
        text=ANY_OBJECT,
        tool_choice={"anyOf": [TEXT, ANY_OBJECT]},
        tools=many(ANY_OBJECT),
        usage=maybe(record(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT)),
        metadata=ANY_OBJECT,
    ),
    "ResponseEvent": record(type=TEXT, sequence_number=COUNT),
    "ResponseItem": record(id=TEXT, type=one_of("message", "reasoning", "function_call", "function_call_output")),
    "ResponseItems": record(
        object=one_of("list"), data=many(ref("ResponseItem")), has_more=FLAG, first_id=maybe(TEXT), last_id=maybe(TEXT)
    ),
    "ResponseDeleted": record(id=TEXT, object=one_of("response"), deleted={"const": True}),
    "InputTokens": record({"object": one_of("response.input_tokens")}, input_tokens=COUNT),
    "AnthropicMessage": record(
        {"metrics": ref("RequestMetrics")},
        id=TEXT,
        type=one_of("message"),
        role=one_of("assistant"),
        model=TEXT,
        content=many(record(type=one_of("text", "thinking", "tool_use"))),
        stop_reason=one_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded", None),
        stop_sequence=maybe(TEXT),
        usage=record(input_tokens=COUNT, output_tokens=COUNT),
    ),
    "AnthropicEvent": record(type=TEXT),
    "AnthropicError": record(type=one_of("error"), error=record(type=TEXT, message=TEXT), request_id=maybe(TEXT)),
    "Corpus": record(id=TEXT, object=one_of("speculation.corpus"), corpus_id=TEXT, num_responses=COUNT, num_tokens=COUNT),
    "CorpusList": listing(ref("Corpus")),
    "CorpusDeleted": record(id=TEXT, object=one_of("speculation.corpus"), deleted={"const": True}),
}
