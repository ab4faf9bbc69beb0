"""Reading: passages of books to summarise, to answer questions about, to find a sentence in, to repeat and to continue."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from ..corpus import Conversation, Record, content_key
from .common import pair

PASSAGES_A_BOOK = 200                # spread over the book, so that one long novel does not outweigh ten short tales
PASSAGE_WORDS = (50, 170)

SUMMARISE = ("Summarise this text:\n\n{}", "Summarize this passage:\n\n{}", "Give me a short summary of this text.\n\n{}",
             "What happens in this passage?\n\n{}", "{}\n\nSummarise this.", "What is this text about?\n\n{}",
             "Retell this in a few words:\n\n{}", "tl;dr of this text:\n\n{}", "Shorten this text:\n\n{}", "{}\n\nWhat happens here?")
REPEAT = ("Repeat this text:\n\n{}", "Copy the following exactly:\n\n{}", "Say this again, word for word:\n\n{}",
          "Repeat the text below without any change.\n\n{}", "Write this text again:\n\n{}")
CONTINUE = ("Continue this story:\n\n{}", "{}\n\nWhat happens next?", "How does this story go on?\n\n{}", "Continue the story.\n\n{}",
            "Write the next part of this story:\n\n{}")
MENTIONS = ('Find the sentence that mentions "{word}":\n\n{text}', 'Which sentence contains the word "{word}"?\n\n{text}',
            '{text}\n\nWhat does this text say about "{word}"?', 'Quote the sentence with the word "{word}" from this text:\n\n{text}')
WHO_SAID = ('{text}\n\nWho said "{quote}"?', 'Read this text:\n\n{text}\n\nWho says "{quote}"?',
            'Who said "{quote}" in this text?\n\n{text}')
COMPLETE = ('{text}\n\nComplete this sentence from the text: "{start} ..."',
            'Complete the sentence "{start} ..." from this text:\n\n{text}',
            'How does the sentence that begins with "{start}" end?\n\n{text}')
FIRST = {"first": ("What is the first sentence of this text?\n\n{}", "Give me the first sentence.\n\n{}",
                   "How does this text begin?\n\n{}"),
         "last": ("What is the last sentence of this text?\n\n{}", "Give me the last sentence.\n\n{}", "How does this text end?\n\n{}")}

SPEECH = re.compile(r'"([^"]{6,70})[,!?.]" (said|asked|cried|answered|replied|exclaimed|shouted) '
                    r"(the [a-z]+(?: [A-Z][a-z]+)?\b|(?:(?:Mr|Mrs|Miss|Dr)\.? )?[A-Z][a-z]+(?: [A-Z][a-z]+)?\b)")
ABBREVIATION = re.compile(r"\b(Mr|Mrs|Dr|St|Ms|No)\.$")
DULL = frozenset("""the a an and or but of to in on at for with by from as is was were are be been had has have did do does not no he she it
they we you i his her its their our your my me him them us this that these those there then than so very said would could should will
shall may might must can when what who which how where why if into out up down over all one some any more now just only too""".split())


def stories(records: Iterable[Record]) -> Iterator[Conversation]:
    """One or two tasks for each passage of each book (or piece of a book)."""
    for record in records:
        for passage, following in _passages(record):
            key = content_key(passage)
            tasks = (_summary, _summary, _summary, _who_said, _who_said, _mention, _completion, _edge, _repetition, _continuation)
            for task in Random(key).sample(tasks, k=2):
                dialogue = task(passage, following, key)
                if dialogue:
                    yield dialogue


def summary(text: str, most: int = 2) -> str:
    """The sentences whose words recur most in `text`, in their order: centrality without a model (after Luhn, 1958)."""
    sentences = _sentences(text)
    counts = Counter(word for word in _words(text) if word not in DULL)

    def weight(sentence: str) -> float:
        words = [word for word in _words(sentence) if word not in DULL]
        return sum(counts[word] - 1 for word in words) / (len(words) + 4) if 5 <= len(sentence.split()) <= 40 else -1.0

    best = sorted(range(len(sentences)), key=lambda index: (-weight(sentences[index]), index))[:most]
    return " ".join(sentences[index] for index in sorted(best))


def _passages(record: Record) -> Iterator[tuple[str, str]]:
    """(whole paragraphs of PASSAGE_WORDS words, the paragraph after them), without headings, verse and tables."""
    paragraphs = [_plain(paragraph) for paragraph in record.text.split("\n\n")]
    found: list[tuple[str, str]] = []
    chosen: list[str] = []
    for paragraph, following in zip(paragraphs, [*paragraphs[1:], ""], strict=True):
        if not _is_prose(paragraph):
            chosen = []
            continue
        chosen.append(paragraph)
        words = sum(len(part.split()) for part in chosen)
        if words >= PASSAGE_WORDS[0]:
            if words <= PASSAGE_WORDS[1] and len(chosen) <= 6:
                found.append(("\n\n".join(chosen), following if _is_prose(following) else ""))
            chosen = []
    picked = sorted(Random(record.key).sample(range(len(found)), k=min(PASSAGES_A_BOOK, len(found))))
    yield from (found[index] for index in picked)


def _plain(paragraph: str) -> str:
    straight = paragraph.translate(str.maketrans({"“": '"', "”": '"', "’": "'", "‘": "'", "—": "--"}))
    return re.sub(r"\s+", " ", re.sub(r"[_*\\]", "", straight)).strip()


def _is_prose(paragraph: str) -> bool:
    return len(paragraph) > 20 and paragraph[0] in '"\'ABCDEFGHIJKLMNOPQRSTUVWXYZ' and paragraph[-1] in '.!?"' and not re.search(
        r"[#|<>\[\]{}=]|Gutenberg|Chapter|CHAPTER", paragraph) and paragraph.count('"') % 2 == 0


def _sentences(text: str) -> list[str]:
    """Sentences in order; speech stays in one piece, from its first quotation mark to the end of the sentence around it."""
    found: list[str] = []
    for paragraph in text.split("\n\n"):
        open_part = ""
        for part in re.split(r"(?<=[.!?])(?=\s)|(?<=[.!?]\")(?=\s[A-Z\"])", paragraph):
            open_part += part
            if open_part.count('"') % 2 == 0 and not ABBREVIATION.search(open_part):
                found.append(open_part.strip())
                open_part = ""
        if open_part.strip():
            found.append(open_part.strip())
    return [sentence for sentence in found if sentence]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def _wording(forms: Sequence[str], key: int) -> str:
    return Random(key + 1).choice(forms)


def _summary(passage: str, _: str, key: int) -> Conversation | None:
    count = len(_sentences(passage))
    if count < 4:
        return None
    return pair(key, _wording(SUMMARISE, key).format(passage), f"In short: {summary(passage, 1 if count < 6 else 2)}")


def _who_said(passage: str, _: str, key: int) -> Conversation | None:
    for quote, verb, speaker in SPEECH.findall(passage):
        if passage.count(quote) == 1 and speaker.strip() not in ("He", "She", "They"):
            asked = _wording(WHO_SAID, key).format(text=passage, quote=quote)
            name = speaker.strip()
            return pair(key, asked, f'{name[0].upper()}{name[1:]} {verb}: "{quote}"')
    return None


def _mention(passage: str, _: str, key: int) -> Conversation | None:
    counts = Counter(_words(passage))
    rare = [word for word in _words(passage) if counts[word] == 1 and len(word) > 4 and word not in DULL]
    sentences = _sentences(passage)
    if not rare or len(sentences) < 3:
        return None
    word = Random(key).choice(rare)
    found = [sentence for sentence in sentences if word in _words(sentence)]
    return pair(key, _wording(MENTIONS, key).format(word=word, text=passage), found[0]) if found and word in found[0] else None


def _completion(passage: str, _: str, key: int) -> Conversation | None:
    long = [sentence for sentence in _sentences(passage) if 10 <= len(sentence.split()) <= 40 and '"' not in sentence]
    if not long:
        return None
    sentence = Random(key).choice(long)
    start = " ".join(sentence.split()[:5])
    return pair(key, _wording(COMPLETE, key).format(text=passage, start=start), sentence)


def _edge(passage: str, _: str, key: int) -> Conversation | None:
    end = Random(key).choice(("first", "last"))
    return pair(key, _wording(FIRST[end], key).format(passage), _sentences(passage)[0 if end == "first" else -1])


def _repetition(passage: str, _: str, key: int) -> Conversation | None:
    return pair(key, _wording(REPEAT, key).format(passage), passage) if len(passage.split()) < 110 else None


def _continuation(passage: str, following: str, key: int) -> Conversation | None:
    return pair(key, _wording(CONTINUE, key).format(passage), following) if 15 <= len(following.split()) <= 100 else None
