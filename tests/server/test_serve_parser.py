"""The help of the commands as people see it."""

import argparse
import re
from dataclasses import fields

import pytest

from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from foretoken.server.config import ServerConfig
from foretoken.server.generate_options import GenerateParser
from foretoken.server.run_batch_options import BatchParser
from foretoken.server.serve_parser import ServeParser
from foretoken.server.terminal.chat import parser as chat_parser

CONFIGS = (ModelConfig, CacheConfig, SchedulerConfig, EngineConfig, ServerConfig)
WITHOUT_DEFAULT = {"help", "no_enable_prefix_caching", "raw", "input", "output"}
SECTIONS = (
    "model:", "computing and number formats:", "speculation:", "memory and batching:", "API:", "network:", "security:",
    "logging and settings:", "examples:",
)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("parser", [ServeParser, GenerateParser, BatchParser, chat_parser])
def test_help_fits_80_columns_and_tells_defaults(narrow: None, parser: type[argparse.ArgumentParser]) -> None:
    made = parser()
    text = made.format_help()
    # Settings in JSON are copied, not read, and cannot be broken.
    assert all(len(line) <= 80 for line in text.splitlines() if "'{" not in line and "'[" not in line), text
    assert "\x1b" not in text and text.rindex("\nexamples:\n") > text.index("  --model ")
    for action in made._actions:
        name = action.option_strings[0].lstrip("-").replace("-", "_") if action.option_strings else "help"
        told = (action.help or "") % vars(action)
        if name not in WITHOUT_DEFAULT and "-h" not in action.option_strings and told != argparse.SUPPRESS:
            assert re.search(r"\[.+\]$", told), f"{name} does not tell its default: {told}"


def test_the_flags_of_serve_stand_by_subject(narrow: None) -> None:
    text = ServeParser().format_help()
    places = [text.index(f"\n{section}\n") for section in SECTIONS]
    assert places == sorted(places)


def test_the_help_tells_the_defaults_of_the_settings() -> None:
    settings = {f.name: f.default for config in CONFIGS for f in fields(config)}
    told = {action.dest: re.findall(r"\[([^\]]*)\]", action.help or "")[-1:] for action in ServeParser()._actions}
    compared = 0
    for name, default in settings.items():
        if name in told and type(default) in (int, float, str) and name not in ("seed", "model"):
            expected = f"{default:.12g}" if isinstance(default, float) else str(default)
            assert told[name] and re.split("[:;]", told[name][0])[0] == expected, (name, default, told[name])
            compared += 1
    assert compared >= 15


def test_commands_that_share_flags_hide_what_has_no_effect() -> None:
    for parser in (GenerateParser(), BatchParser()):
        assert "--port" in parser.flags and "--port" not in parser.format_help() and "--kv-cache-gb" in parser.format_help()
