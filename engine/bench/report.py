"""What `bench kernels` found, as tables. Medians; the spreads are in the JSON."""

from collections.abc import Sequence

from .checkpoints import SHAPES
from .measurement import GENERATE, LEVELS, MACHINE, NETWORK, SERVER, STREAMED, Measurement, Results
from .table import Table


def report(results: Results) -> str:
    """The whole page: machine, command, tables of what was measured."""
    models = "; ".join(shape.title for name, shape in SHAPES.items() if any(m.model == name for m in results.measurements))
    skipped = [f"- not measured: {line}" for line in results.skipped]
    head = [
        "# Measured on a CPU", "", f"Machine: {results.machine.describe()}.", "", f"Command: `{results.command}`", "",
        f"Medians of {results.effort.rounds} rounds in which the compared cases took turns; ratios are taken round by round."
        + (f" Random weights: {models}." if models else ""),
        "", *skipped, *([""] if skipped else []),
    ]
    return "\n".join([*head, *(table.markdown() for table in tables(results) if table.rows)])


def tables(results: Results) -> list[Table]:
    return [
        _limits(results), _arithmetic(results), _decode(results), _verification(results), _rows(results), _load(results),
        _prefill(results), _contexts(results), _transformers(results), _speculation(results),
    ]


def _limits(results: Results) -> Table:
    found = results.of(MACHINE, "read")
    threads = sorted({m.x for m in found})
    sizes = {_subject(m): m for m in results.of(MACHINE, "weights")}
    rows = [
        [
            name,
            f"{sizes[name].value.median:,.1f}",
            *(_value(found, name, n, "{:.1f}") for n in threads),
            _limit(found, sizes[name], threads[-1]),
        ]
        for name in sizes
    ]
    header = ["", "MB a token", *(f"{n} thread{'s' * (n > 1)}, GB/s" for n in threads), "limit, tokens/s"]
    return Table(
        "The limit: reading the weights once a token",
        "Best rate of a plain sum over a buffer of the size that one token reads.",
        header,
        rows,
    )


def _limit(found: list[Measurement], size: Measurement, threads: int) -> str:
    rate = next(m for m in found if _subject(m) == _subject(size) and m.x == threads)
    return f"{rate.value.median * 1e3 / size.value.median:,.0f}"


def _arithmetic(results: Results) -> Table:
    found = results.of(MACHINE, "arithmetic")
    threads = sorted({m.x for m in found})
    rows = [[kind, *(_value(found, kind, n, "{:.2f}") for n in threads)] for kind in dict.fromkeys(_subject(m) for m in found)]
    return Table(
        "Arithmetic peak",
        "Operations from registers, for information.",
        ["", *(f"{n} thread{'s' * (n > 1)}, TOP/s" for n in threads)],
        rows,
    )


def _decode(results: Results) -> Table:
    by_level = {level: results.of(level, "decode") for level in LEVELS}
    cases = dict.fromkeys((_subject(m), m.x) for found in by_level.values() for m in found)
    levels = [level for level in LEVELS if by_level[level]]
    rows = [[f"{name}, context {x:,}", *(cell for level in levels for cell in _with_share(by_level[level], name, x))] for name, x in cases]
    header = ["", *(cell for level in levels for cell in (f"{level}, tokens/s", "of the limit"))]
    return Table("Decode, one stream", "Tokens a second, and their share of the limit measured in the same rounds.", header, rows)


def _verification(results: Results) -> Table:
    found = results.of(NETWORK, "verification")
    tokens = sorted({m.x for m in found})
    rows = [[n, _value(found, n, 1, "{:.2f}"), *(_ratio(found, n, t) for t in tokens[1:])] for n in _names(found)]
    about = f"One pass over T tokens behind a context of {results.effort.verified_context}, relative to T = 1."
    return Table("Verification", about, ["", "T=1, ms", *(f"T={t}" for t in tokens[1:])], rows)


def _rows(results: Results) -> Table:
    found = [m for level in (NETWORK, GENERATE) for m in results.of(level, "rows")]
    counts = sorted({m.x for m in found})
    rows: list[list[str]] = []
    for name in _names(found):
        for level in (NETWORK, GENERATE):
            mine = [m for m in found if m.level == level]
            if any(_subject(m) == name for m in mine):
                cells = (cell for n in counts[1:] for cell in (_value(mine, name, n, "{:,.0f}"), _ratio(mine, name, n)))
                rows.append([f"{name}, {level}", _value(mine, name, counts[0], "{:,.1f}"), *cells])
    header = ["", "1 row, tokens/s", *(cell for n in counts[1:] for cell in (f"{n} rows", "times one"))]
    return Table("Batched decode", f"Tokens a second of all rows together, at context {results.effort.rows_context}.", header, rows)


def _load(results: Results) -> Table:
    by_level = {level: results.of(level, "load") for level in LEVELS[1:]}
    cpu, chunks = results.of(STREAMED, "server CPU"), results.of(STREAMED, "chunks")
    rows = [
        [
            f"{name}, {x} stream{'s' * (x > 1)}", _value(by_level[GENERATE], name, x, "{:,.0f}"),
            *(cell for level in (SERVER, STREAMED) for cell in _with_ratio(by_level[level], name, x)),
            _value(cpu, name, x, "{:.0f}"), _value(chunks, name, x, "{:.2f}"),
        ]
        for name, x in dict.fromkeys((_subject(m), m.x) for m in by_level[GENERATE])
    ]
    header = ["", "LLM.generate, tokens/s", "HTTP", "ratio", "HTTP streamed", "ratio", "event loop, us/chunk", "chunks/token"]
    about = (
        f"{results.effort.load_prompt_tokens} tokens in, {results.effort.decode_tokens} out, all requests at once, against `LLM.generate` "
        "on the like; the client runs on the same machine. The event loop's CPU time is that of the server's first thread."
    )
    return Table("The server under load", about, header, rows)


def _prefill(results: Results) -> Table:
    found = {level: results.of(level, "prefill") for level in (NETWORK, GENERATE)}
    names = dict.fromkeys(name for mine in found.values() for name in _names(mine))
    rows = [[n, *(_value(mine, n, results.effort.prompt_tokens, "{:,.0f}") for mine in found.values())] for n in names]
    return Table(f"Prefill of {results.effort.prompt_tokens} tokens", "Tokens a second.", ["", *found], rows)


def _contexts(results: Results) -> Table:
    found = results.of(NETWORK, "context")
    contexts = sorted({m.x for m in found})
    rows = [
        [n, *(_value(found, n, c, "{:.2f}") for c in contexts), *_slopes([m for m in found if _subject(m) == n])] for n in _names(found)
    ]
    header = ["", *(f"{c:,}" for c in contexts), "us per 1,000 to the middle", "from there"]
    return Table(
        "Attention and context",
        "Milliseconds of a pass of one token by context; linear if a further 1,000 places cost the same early and late.",
        header,
        rows,
    )


def _slopes(found: list[Measurement]) -> tuple[str, str]:
    """Microseconds for 1,000 more places below and above the context in the middle of the range, on a linear scale."""
    if len(found) < 3:
        return "", ""
    points = sorted((m.x, m.value.median) for m in found)
    middle = min(points[1:-1], key=lambda point: abs(2 * point[0] - points[0][0] - points[-1][0]))

    def slope(a: tuple[int, float], b: tuple[int, float]) -> str:
        return f"{(b[1] - a[1]) * 1e6 / (b[0] - a[0]):,.0f}"

    return slope(points[0], middle), slope(middle, points[-1])


def _transformers(results: Results) -> Table:
    ours, theirs = results.of(GENERATE, "one stream"), results.of("transformers", "one stream")
    rows = [[n, _value(theirs, n, 1, "{:.1f}"), *_with_ratio(ours, n, 1)] for n in _names(ours)]
    about = f"Whole greedy requests, one at a time: {results.effort.load_prompt_tokens} tokens in, {results.effort.decode_tokens} out."
    return Table("Against transformers", about, ["", "transformers generate, tokens/s", "LLM.generate", "times"], rows)


def _speculation(results: Results) -> Table:
    off, on = results.of(GENERATE, "draft off"), results.of(GENERATE, "draft draft_model")
    length, same = results.of(GENERATE, "draft length"), results.of(GENERATE, "draft identical")
    rows = [
        [
            f"{_subject(m)}, k={m.x}", _value(off, _subject(m), m.x, "{:.1f}"), *_with_ratio(on, _subject(m), m.x),
            _value(length, _subject(m), m.x, "{:.2f}"), _value(same, _subject(m), m.x, "{:.0%}"),
        ]
        for m in on
    ]
    about = (
        "M2 with o_proj and down_proj of the layers from the 7th on scaled by 0.1; the draft is its first six layers, in int8 where the "
        f"native executor runs it. Greedy, one stream, prompts in the cache, {results.effort.drafted_prompts} a round."
    )
    header = ["", "off, tokens/s", "on", "times", "tokens a target pass", "same outputs"]
    return Table("A draft model", about, header, rows)


def _subject(measurement: Measurement) -> str:
    return ", ".join(filter(None, (measurement.model, measurement.precision)))


def _names(found: Sequence[Measurement]) -> list[str]:
    return list(dict.fromkeys(_subject(m) for m in found))


def _one(found: Sequence[Measurement], name: str, x: int) -> Measurement | None:
    return next((m for m in found if _subject(m) == name and m.x == x), None)


def _value(found: Sequence[Measurement], name: str, x: int, form: str) -> str:
    one = _one(found, name, x)
    return form.format(one.value.median) if one else ""


def _ratio(found: Sequence[Measurement], name: str, x: int) -> str:
    one = _one(found, name, x)
    return f"{one.ratio.median:.2f}" if one and one.ratio else ""


def _with_ratio(found: Sequence[Measurement], name: str, x: int) -> tuple[str, str]:
    return _value(found, name, x, "{:,.1f}"), _ratio(found, name, x)


def _with_share(found: Sequence[Measurement], name: str, x: int) -> tuple[str, str]:
    one = _one(found, name, x)
    return _value(found, name, x, "{:,.1f}"), f"{one.ratio.median:.0%}" if one and one.ratio else ""
