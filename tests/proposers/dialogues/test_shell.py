import re

from foretoken.proposers.training.corpus import Record, content_key
from foretoken.proposers.training.dialogues.shell import read_page, resolve, shell

TAR = """# tar

> Archiving utility.
> Often combined with a compression method.
> More information: <https://www.gnu.org/software/tar>.

- [c]reate an archive (verbosely):

`tar {{[-c|--create]}} {{path/to/target.tar}} {{path/to/file1 path/to/file2 ...}}`

- List the contents of a tar file:

`tar tvf {{path/to/source.tar[.gz|.bz2]}}`

- Do not extract anything:

`tar --nothing`

- Use a placeholder that never ends:

`tar {{x`
"""
UNKNOWN = """# frobnicate

> Frobnicate files.

- Frobnicate a file:

`frobnicate {{path/to/file}} {{[-n|--count]}} {{number}}`
"""


def record(text: str, origin: str) -> Record:
    return Record(origin, text, (), content_key(text))


def test_placeholders_become_plain_values():
    assert resolve("tar {{[-c|--create]}} {{path/to/target.tar}} {{path/to/file1 path/to/file2 ...}}") == "tar -c target.tar file1 file2"
    assert resolve("curl {{https://example.com}} {{[-o|--output]}} {{path/to/file}}") == "curl https://example.com -o file.txt"
    assert resolve("kill -{{9|15}} {{pid}}") == "kill -9 1234"


def test_a_page_is_its_purpose_and_its_plain_examples():
    page = read_page(TAR)
    assert page.name == "tar" and page.purpose == "Archiving utility. Often combined with a compression method."
    assert page.examples == [("create an archive", "tar -c target.tar file1 file2"),
                             ("list the contents of a tar file", "tar tvf source.tar")]


def test_known_programs_are_asked_about_and_answered_with_a_command():
    dialogues = list(shell([record(TAR, "pages/common/tar.md")]))
    answers = [dialogue.messages[-1]["content"] for dialogue in dialogues]
    commands = [match[1] for answer in answers if (match := re.fullmatch(r"To [^\n]+, run:\n\n```sh\n(.+)\n```", answer))]
    assert set(commands) == {"tar -c target.tar file1 file2", "tar tvf source.tar"}
    assert "This command is used to create an archive." in answers
    assert all("{{" not in answer for answer in answers)
    questions = [dialogue.messages[-2]["content"] for dialogue in dialogues]
    assert len(set(questions)) == len(questions) and all("tar" in question for question in questions)


def test_all_questions_about_one_example_are_on_one_side_of_the_split():
    dialogues = list(shell([record(TAR, "pages/common/tar.md")]))
    about = [dialogue for dialogue in dialogues if dialogue.messages[-1]["content"].endswith("tar tvf source.tar\n```")]
    assert len(about) == 2 and {dialogue.key for dialogue in about} == {content_key("tar tvf source.tar")}


def test_unknown_programs_come_with_the_page_to_copy_from():
    (dialogue,) = shell([record(UNKNOWN, "pages/linux/frobnicate.md")])
    assert "`frobnicate file.txt -n 10`" in dialogue.messages[-2]["content"]
    assert dialogue.messages[-1]["content"] == "To frobnicate a file, run:\n\n```sh\nfrobnicate file.txt -n 10\n```"


def test_aliases_and_empty_pages_are_left_out_and_the_rest_is_deterministic():
    alias = "# gtr\n\n> This command is an alias of GNU `tr`.\n\n- View documentation:\n\n`tldr tr`\n"
    assert list(shell([record(alias, "pages/common/gtr.md"), record("# tar\n\n> Nothing here.\n", "pages/common/tar.md")])) == []
    pages = [record(TAR, "pages/common/tar.md"), record(UNKNOWN, "pages/linux/frobnicate.md")]
    assert list(shell(pages)) == list(shell(pages))
