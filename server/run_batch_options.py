"""The flags of `foretoken run-batch`: its own, and those of `serve` but for the network."""

from .option_forms import count
from .serve_parser import NETWORK, SECURITY, ServeParser

DESCRIPTION = """\
Answer a file of requests without a server, many at once.

The input has OpenAI's batch format: a JSON object a line, with custom_id,
method ("POST"), url (/v1/chat/completions, /v1/completions, /v1/embeddings or
/v1/responses) and body. Each answer is a line of the output, in the order they
are done: custom_id, response (status_code, request_id, body) or error.

A run that was stopped or killed goes on when the same command is given again.
Lines that fail are answered with their error and stop nothing.

MODEL and the flags below are those of serve. Defaults stand in brackets.
"""
EXAMPLES = """\
examples:
  foretoken run-batch --input questions.jsonl --output answers.jsonl
  foretoken run-batch -i questions.jsonl -o answers.jsonl ./my-model \\
      --served-model-name gpt-4o-mini --max-num-seqs 64 --quantization int8

a line of the input:
  {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", "body":
   {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}}

Exit status: 0 if every line was answered, 65 if some failed or the files are
not what they should be, 130 if it was stopped.
"""


class BatchParser(ServeParser):
    """All flags of `foretoken run-batch`."""

    def __init__(self) -> None:
        usage = "--input FILE --output FILE [MODEL] [flags]"
        super().__init__("run-batch", usage, DESCRIPTION, EXAMPLES, hidden=(NETWORK, SECURITY))

    def add_own_flags(self) -> None:
        add = self.section("batch").add
        add("--input", "-i", "--input-file", metavar="FILE", help="requests, one JSON object a line")
        add("--output", "-o", "--output-file", metavar="FILE", help="answers; one that is there is continued")
        add("--concurrency", type=count, metavar="N", help="most requests under way [twice --max-num-seqs]")
