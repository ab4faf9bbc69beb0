"""Accepted lengths of one method by domain and draft length, measured in one engine; and that nobody's answer changes by it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from ...engine.bench.acceptance import Acceptance, answer
from ...engine.bench.speculation_turn import Answer
from .answers import Asked, Booted, Effort, digest
from .cells import Cells
from .members import FamilyFolder

SUMS = ("answers", "same_answers", "passes", "accepted", "drafts", "drafted")


def acceptance_of(
    method: str, family: FamilyFolder, asked: Mapping[str, Sequence[Asked]], answers: Mapping[str, Sequence[Answer]],
    effort: Effort, cells: Cells
) -> list[dict[str, Any]]:
    """One row a domain and k, and one over all domains for each k. The engine is loaded only if a row is not known yet."""
    mark = family.mark(method)
    rows: list[dict[str, Any]] = []
    booted: Booted | None = None
    try:
        for domain, k in tqdm([(domain, k) for domain in asked for k in effort.ks], desc=method, dynamic_ncols=True, disable=None):
            key = ("acceptance", method, domain, k, mark, effort.max_tokens, digest(asked[domain]))
            found = cells.get(*key)
            if found is None:
                booted = booted or Booted(family, method, effort)
                # A corpus of its own: suffix decoding learns from this domain's answers, not from what an earlier k left behind.
                wish = {"method": method, "num_speculative_tokens": k, "corpus_id": f"{domain}-{k}"}
                counted = answer(booted.engine, [one.token_ids for one in asked[domain]], effort.max_tokens, wish)
                same = sum(a.token_ids == b.token_ids for a, b in zip(counted, answers[domain], strict=True))
                sums = Acceptance.of(counted)
                found = cells.put(*key, result={
                    "method": method, "domain": domain, "k": k, "most": min(k, booted.most), "answers": len(counted), "same_answers": same,
                    **asdict(sums)})
            rows.append(found)
    finally:
        if booted:
            booted.close()
    return [with_lengths(row) for row in [*rows, *(overall(rows, k) for k in effort.ks)]]


def overall(rows: Sequence[Mapping[str, Any]], k: int) -> dict[str, Any]:
    """All domains of one k together: every target pass counts the same."""
    mine = [row for row in rows if row["k"] == k]
    return {**mine[0], "domain": "all", **{name: sum(row[name] for row in mine) for name in SUMS}}


def with_lengths(row: Mapping[str, Any]) -> dict[str, Any]:
    sums = Acceptance(*(row[name] for name in ("passes", "accepted", "drafts", "drafted")))
    return {
        **row, "mu": round(sums.mu, 4), "mean_accepted_length": round(sums.mean_accepted_length, 4),
        "length_with_draft": round(sums.length_with_draft, 4), "acceptance_rate": round(sums.rate, 4),
    }
