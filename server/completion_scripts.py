"""Completion scripts of bash, zsh and fish for a list of commands and their flags."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from shlex import quote

BASH = """\
# bash completion of foretoken
_foretoken() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} at=${COMP_WORDS[1]} flags="" words="" files=""
    # --dtype=f comes as three words
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $before == "=" ]]; then
        before=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "@TOP@" -- "$current"))
        return
    fi
    case $at in
@GROUPS@
    esac
    case $at in
@COMMANDS@
    esac
    if [[ $current == -* && -z $words$files ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$current"))
    elif [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    elif [[ $files == yes ]]; then
        compopt -o filenames 2> /dev/null
        local IFS=$'\\n'
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}
complete -F _foretoken foretoken
"""
ZSH = """\
#compdef foretoken
_foretoken() {
    local at=$words[2]
    if ((CURRENT == 2)); then
        local -a names=(
@TOP@
        )
        _describe command names
        return
    fi
    case $at in
@GROUPS@
    esac
    shift words
    ((CURRENT--))
    case $at in
@COMMANDS@
    esac
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _foretoken "$@"
else
    compdef _foretoken foretoken
fi
"""
FISH = """\
# fish completion of foretoken
function __foretoken_at
    set -l words (commandline -opc)
    set -e words[1]
    set -l size (count $argv)
    test (count $words) -ge $size; and test "$words[1..$size]" = "$argv"
end
function __foretoken_just
    set -l words (commandline -opc)
    set -e words[1]
    test "$words" = "$argv"
end
complete -c foretoken -f
"""


@dataclass(frozen=True)
class Flag:
    """What a shell must know of one flag."""

    name: str  # its first long spelling
    help: str
    takes_value: bool
    value: str  # its metavar
    choices: tuple[str, ...]
    is_file: bool


@dataclass(frozen=True)
class Command:
    """One command, `bench serve` for instance."""

    words: tuple[str, ...]
    help: str
    flags: tuple[Flag, ...]
    operands: tuple[str, ...] | None  # choices of the words without a flag; empty = files, None = there are none


def bash(commands: Sequence[Command]) -> str:
    groups = _bash_groups(commands)
    cases = [line for command in commands for line in _bash_command(command)]
    return BASH.replace("@TOP@", " ".join(_tops(commands))).replace("@GROUPS@", "\n".join(groups)).replace("@COMMANDS@", "\n".join(cases))


def _bash_groups(commands: Sequence[Command]) -> Iterable[str]:
    for name, members in _groups(commands).items():
        yield f"        {name})"
        yield "            if ((COMP_CWORD == 2)); then"
        yield f'                COMPREPLY=($(compgen -W "{" ".join(command.words[1] for command in members)}" -- "$current"))'
        yield "                return"
        yield "            fi"
        yield "            at+=\" ${COMP_WORDS[2]}\""
        yield "            ;;"


def _bash_command(command: Command) -> Iterable[str]:
    yield f"        {quote(' '.join(command.words))})"
    yield f'            flags="{" ".join(flag.name for flag in command.flags)}"'
    if command.operands is not None:
        yield f"            [[ $current == -* ]] || {_bash_offer(command.operands, is_file=True)}"
    offers: dict[str, list[str]] = {}
    for flag in command.flags:
        if flag.takes_value:
            offers.setdefault(_bash_offer(flag.choices, flag.is_file), []).append(flag.name)
    if offers:
        yield "            case $before in"
        for offer, names in offers.items():
            yield f'                {"|".join(names)}) flags="" files="" {offer} ;;'
        yield "            esac"
    yield "            ;;"


def _bash_offer(choices: Sequence[str], is_file: bool) -> str:
    if choices:
        return f'words="{" ".join(choices)}"'
    return "files=yes" if is_file else ""


def zsh(commands: Sequence[Command]) -> str:
    top = [f"            {_zsh_named(name, _help_of(name, commands))}" for name in _tops(commands)]
    groups: list[str] = []
    for name, members in _groups(commands).items():
        named = " ".join(_zsh_named(command.words[1], command.help) for command in members)
        groups += [
            f"        {name})",
            "            if ((CURRENT == 3)); then",
            f"                local -a names=({named})",
            "                _describe command names",
            "                return",
            "            fi",
            '            at+=" $words[3]"',
            "            shift words",
            "            ((CURRENT--))",
            "            ;;",
        ]
    cases: list[str] = []
    for command in commands:
        specs = [_zsh_flag(flag) for flag in command.flags]
        if command.operands is not None:
            specs.append(quote(f"*:operand:({' '.join(command.operands)})" if command.operands else "*:file:_files"))
        cases += [f"        {quote(' '.join(command.words))})", f"            _arguments -S {' '.join(specs) or '*:'}", "            ;;"]
    return ZSH.replace("@TOP@", "\n".join(top)).replace("@GROUPS@", "\n".join(groups)).replace("@COMMANDS@", "\n".join(cases))


def _zsh_named(name: str, help: str) -> str:
    return quote(f"{name}:{_plain(help)}")


def _zsh_flag(flag: Flag) -> str:
    spec = f"{flag.name}[{_plain(flag.help)}]"
    if flag.takes_value:
        offered = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.is_file else " "
        spec += f":{_plain(flag.value)}:{offered}"
    return quote(spec)


def fish(commands: Sequence[Command]) -> str:
    helps = {name: _fish_quoted(_help_of(name, commands)) for name in _tops(commands)}
    lines = [f"complete -c foretoken -n __foretoken_just -a {quote(name)} -d {help}" for name, help in helps.items()]
    for name, members in _groups(commands).items():
        lines += [
            f"complete -c foretoken -n '__foretoken_just {name}' -a {quote(command.words[1])} -d {_fish_quoted(command.help)}"
            for command in members
        ]
    for command in commands:
        at = f"-n '__foretoken_at {' '.join(command.words)}'"
        if command.operands is not None:
            lines.append(f"complete -c foretoken {at} " + (f"-a '{' '.join(command.operands)}'" if command.operands else "-F"))
        lines += [f"complete -c foretoken {at} {_fish_flag(flag)}" for flag in command.flags]
    return FISH + "\n".join(lines) + "\n"


def _fish_flag(flag: Flag) -> str:
    value = ""
    if flag.takes_value:
        value = f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r -F" if flag.is_file else " -x"
    kind = "-l" if flag.name.startswith("--") else "-s" if len(flag.name) == 2 else "-o"
    return f"{kind} {flag.name.lstrip('-')}{value} -d {_fish_quoted(flag.help)}"


def _fish_quoted(text: str) -> str:
    return "'" + _plain(text).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _plain(help: str) -> str:
    """The first words of a help text, without what has a meaning to a shell's completion."""
    text = help.translate(str.maketrans({"[": "(", "]": ")", ":": ",", "\\": "/", "`": "'", "$": ""}))
    return text if len(text) <= 76 else text[:73] + "..."


def _tops(commands: Sequence[Command]) -> list[str]:
    return list(dict.fromkeys(command.words[0] for command in commands))


def _groups(commands: Sequence[Command]) -> dict[str, list[Command]]:
    """Commands of two words, by the first."""
    return {name: members for name in _tops(commands) if (members := [c for c in commands if c.words[0] == name and len(c.words) > 1])}


def _help_of(name: str, commands: Sequence[Command]) -> str:
    found = [command for command in commands if command.words[0] == name]
    return found[0].help if len(found[0].words) == 1 else ", ".join(command.words[1] for command in found)


SCRIPTS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
