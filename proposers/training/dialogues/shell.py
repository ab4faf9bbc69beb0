"""Shell questions out of tldr pages: the command for a task, the task of a command, what a program is for."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from ..corpus import Conversation, Record, content_key
from .common import fenced, pair

# A small model cannot learn seven thousand programs. Those named here it learns by heart; of others it is shown the page.
KNOWN = frozenset("""
7z alias apt apt-get awk base64 basename bash bc brew bunzip2 bzip2 cal cargo cat cd chgrp chmod chown clear cmake cmp code comm cp
crontab curl cut date dd df diff dig dir dirname dnf docker du echo env exit export false ffmpeg file find fold free g++ gcc gdb git
go gpg grep groups gunzip gzip head history hostname htop id ifconfig ip java javac jobs join journalctl jq kill killall kubectl last
less ln locate ls lsblk lscpu lsof make man md5sum mkdir more mount mv nano nc netstat nice nl node nohup npm nproc od openssl paste
passwd pgrep ping pip pkill printenv printf ps pwd python python3 read rename reset rev rm rmdir rsync scp screen sed seq service
sha256sum shred shuf shutdown sleep snap sort source split ssh ssh-keygen sort stat strings su sudo systemctl tac tail tar tee
telnet test time timeout tmux top touch tr traceroute tree true type umask umount uname uniq unlink unzip uptime useradd userdel
vim virtualenv watch wc wget whatis which who whoami xargs yarn yes zip zless zcat
""".split())
WITH_SUBCOMMANDS = frozenset({"git", "docker", "apt", "npm", "pip", "cargo", "go", "systemctl"})      # "git add" has a page of its own

VALUES = {                                             # what stands in an example for a placeholder of tldr
    "path/to/directory": "my_folder", "path/to/file": "file.txt", "path/to/file_or_directory": "my_folder", "url": "https://example.com",
    "username": "alice", "user": "alice", "password": "secret", "host": "example.com", "hostname": "example.com",
    "ip_address": "192.168.1.10", "ip": "192.168.1.10", "port": "8080", "number": "10", "count": "10", "seconds": "5", "pid": "1234",
    "search_pattern": "pattern", "regex": "pattern", "remote_host": "example.com", "n": "10",
}

HOW = ("How do I {what} with {name}?", "How can I use {name} to {what}?", "Which {name} command do I need to {what}?",
       "Give me a {name} command to {what}.", "Show me how to {what} with {name}.", "{name}: how do I {what}?",
       "I want to {what}. How do I do that with {name}?", "What is the {name} command to {what}?", "Use {name} to {what}.")
EXPLAIN = ("What does `{command}` do?", "Explain this command:\n\n{block}", "Explain `{command}`.", "What does this command do?\n\n{block}",
           "What happens when I run `{command}`?")
PURPOSE = ("What does {name} do?", "What is {name}?", "What is {name} for?", "What is the {name} command for?",
           "Explain the {name} command.")
EXAMPLES = ("Show me some examples of {name}.", "How do I use {name}?", "Give me {count} examples of {name}.", "Show me how to use {name}.",
            "What can I do with {name}?")
FROM_PAGE = ("Here is the help page of {name}:\n\n{page}\n\nHow do I {what}?", "{page}\n\nUsing this page, how do I {what}?",
             "Read this page:\n\n{page}\n\nWhich command do I need to {what}?")


@dataclass(frozen=True)
class Page:
    """A tldr page: a program, what it is for, and its examples as (task, command), e.g. ("list all files", "ls -a")."""

    name: str
    purpose: str
    examples: list[tuple[str, str]]


def shell(records: Iterable[Record]) -> Iterator[Conversation]:
    """Dialogues about well-known programs; about others, only with their page in the question to copy from."""
    for record in records:
        page = read_page(record.text)
        if "alias of" in page.purpose or not page.examples or not page.purpose:
            continue
        if _known(page) and record.origin.startswith(("pages/common", "pages/linux")):
            yield from _by_heart(page, record.key)
        elif len(page.examples) <= 4 and len(record.text) < 700:
            yield _with_page(page, record.key)


def _known(page: Page) -> bool:
    program, *subcommand = page.name.split()
    return program in KNOWN and (not subcommand or program in WITH_SUBCOMMANDS) and "git-extras" not in page.purpose


def read_page(text: str) -> Page:
    """Take a page apart and fill in its placeholders."""
    title, _, body = text.partition("\n")
    purpose = [line[2:] for line in body.splitlines() if line.startswith("> ") and not re.match(r"> (More info|See also|Note)", line)]
    examples = [(_task(what), resolve(command)) for what, command in re.findall(r"^- (.+?):\n\n`(.+?)`$", body, flags=re.M)]
    return Page(title.lstrip("# ").strip(), " ".join(purpose[:2]), [example for example in examples if _is_plain(*example)])


def _is_plain(what: str, command: str) -> bool:
    """Whether an example reads as one task and one short line, all placeholders filled."""
    return what != "" and not what.startswith(("do not", "don't")) and len(command) < 100 and not re.search(r"[{}<>]|\.\.\.", command)


def resolve(command: str) -> str:
    """Fill the placeholders of an example: tar {{[-c|--create]}} {{path/to/file}} -> tar -c file.txt."""
    return re.sub(r" +", " ", re.sub(r"\{\{(.*?)\}\}(?!\})", lambda match: _value(match[1]), command)).strip()


def _value(placeholder: str) -> str:
    option = re.fullmatch(r"\[([^|\]]+)\|[^\]]+\]", placeholder)
    if option:
        return option[1]                               # [-c|--create]: the short form
    first = re.sub(r"\[[^\]]*\]|\s*\.\.\.", "", placeholder).split("|")[0].strip()
    words = []
    for word in first.split(" "):
        filled = VALUES.get(word.removeprefix("/")) or re.sub(r"^(/?path/to/|file://)", "", word)
        words.append(re.sub(r"^(directory|file)(\d)$", r"\1\2", filled))
    return " ".join(words)


def _task(what: str) -> str:
    """The task as it stands in a sentence: "[c]reate an archive (and show it)" -> "create an archive"."""
    what = re.sub(r"\s*\([^)]*\)", "", re.sub(r"\[(\w+)\]", r"\1", what)).strip()
    first = what.split(" ")[0]
    return what if first.isupper() or first.startswith("`") else what[:1].lower() + what[1:]


def _by_heart(page: Page, page_key: int) -> Iterator[Conversation]:
    chance = Random(page_key)
    for name_form in chance.sample(PURPOSE, k=2):
        yield pair(page_key, name_form.format(name=_named(page, chance)), f"`{page.name}`: {page.purpose}")
    for what, command in page.examples:
        # Each example is held out by itself: a question about a program never seen at all could not be answered.
        key = content_key(command)
        how = _answer(what, command)
        for wording in chance.sample(HOW, k=2):
            yield pair(key, wording.format(what=what, name=_named(page, chance)), how)
        asked = chance.choice(EXPLAIN).format(command=command, block=fenced("sh", command))
        yield pair(key, asked, f"This command is used to {what}." if what[0].islower() else f"{what}.")
    some = [example for example in page.examples if not Conversation([], content_key(example[1])).held_out][:4]
    if len(some) >= 2:
        listed = "\n".join(f"- To {what}: `{command}`" for what, command in some)
        asked = chance.choice(EXAMPLES).format(name=_named(page, chance), count=len(some))
        yield pair(page_key, asked, f"Here are {len(some)} examples:\n\n{listed}")


def _with_page(page: Page, key: int) -> Conversation:
    chance = Random(key)
    what, command = chance.choice(page.examples)
    shown = "\n".join([f"{page.name}: {page.purpose}", *(f"- {task}: `{line}`" for task, line in page.examples)])
    return pair(key, chance.choice(FROM_PAGE).format(name=page.name, page=shown, what=what), _answer(what, command))


def _answer(what: str, command: str) -> str:
    return f"To {what}, run:\n\n{fenced('sh', command)}"


def _named(page: Page, chance: Random) -> str:
    return f"`{page.name}`" if chance.random() < 0.3 else page.name
