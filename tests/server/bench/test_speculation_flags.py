import argparse
import json
from pathlib import Path

import pytest

from foretoken.engine.config import QUANTIZATIONS
from foretoken.engine.errors import ConfigError
from foretoken.server.bench.speculation_flags import add_flags, conversations_of, engine_options, evenly, numbers


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser, concurrency=(1, 8), max_tokens=32, num_prompts=6, rounds=3)
    return parser.parse_args(argv)


def test_defaults_and_what_the_engine_is_told() -> None:
    args = parsed()
    assert (args.k, args.concurrency, args.max_tokens, args.rounds, args.temperature) == ((1, 3, 5, 7), (1, 8), 32, 3, 0.0)
    assert engine_options(args) == {}
    args = parsed("./m", "--batch", "32,1", "--threads", "2", "--dtype", "float32", "--methods", "ngram,suffix,ngram")
    assert args.model == "./m" and args.concurrency == (1, 32) and args.methods == ("ngram", "suffix")
    assert engine_options(args) == {"threads": 2, "dtype": "float32"}
    for name in QUANTIZATIONS:
        assert name == "auto" or engine_options(parsed("--quantization", name)) == {"quantization": name}, "as for serve"


def test_our_own_prompts_are_spread_over_all_sets() -> None:
    texts = [conversation[0]["content"] for conversation in conversations_of(parsed())]
    assert len(set(texts)) == 6
    assert any("```" in text for text in texts) and not all("```" in text for text in texts), "code edits, and others"
    assert len(conversations_of(parsed("--dataset", "random", "--num-prompts", "4"))) == 4


def test_a_file_is_asked_up_to_its_first_answer(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    file.write_text(json.dumps({"messages": [*messages, {"role": "user", "content": "Bye"}]}))
    assert conversations_of(parsed("--dataset", str(file))) == [messages[:2]]
    assert conversations_of(parsed("--dataset", "mt_bench", "--dataset-path", str(file))) == [messages[:2]]


@pytest.mark.parametrize("name", ["nothing", "mt_bench"])
def test_a_set_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        conversations_of(parsed("--dataset", name))


def test_few_of_many_come_from_all_parts() -> None:
    assert evenly(range(10), 4) == [0, 2, 5, 7] and evenly(range(3), 9) == [0, 1, 2]


def test_numbers() -> None:
    assert numbers("8,1,1") == (1, 8)
    for text in ("1,x", "0", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="positive integer"):
            numbers(text)
