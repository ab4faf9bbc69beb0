"""Packed documents: what a batch holds, where a document ends, what is learned."""

from pathlib import Path

import numpy as np
import pytest
import torch

from foretoken.proposers.training.packing import Document, Packed, PackedStream, write


def document(*ids: int, learn: tuple[int, ...] = ()) -> Document:
    return Document(np.array(ids, np.uint32), np.array(learn or (1,) * len(ids), np.uint8))


@pytest.mark.parametrize("vocab_size", [100, 200_000])
def test_batches_hold_whole_documents_in_order(tmp_path: Path, vocab_size: int) -> None:
    top = vocab_size - 1
    documents = [document(1, 2, 3), document(4), document(5, top), document(6, 7, 8, 9, 10, 11, 12), document(13, 14)]
    assert write(tmp_path / "a", documents, vocab_size) == 15
    stream = PackedStream([tmp_path / "a"], 5)
    batches = [stream[index] for index in range(len(stream))]
    # A document of a single token teaches nothing.
    assert [batch.token_ids.tolist() for batch in batches] == [[1, 2, 3, 5, top], [6, 7, 8, 9, 10], [13, 14]]
    assert [batch.bounds for batch in batches] == [(0, 3, 5), (0, 5), (0, 2)]
    again = stream[4]                                     # the stream begins again
    assert again.token_ids.tolist() == batches[1].token_ids.tolist() and again.number == 4


def test_labels_stop_at_the_end_of_a_document_and_at_what_is_only_read() -> None:
    batch = Packed(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 0, 1, 0, 1]).bool(), (0, 3, 5))
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    labels, learned = batch.ahead(1)
    assert learned.tolist() == [0, 1, 0, 1, 0] and labels[learned.bool()].tolist() == [3, 5]
    assert batch.inside(1).tolist() == [1, 1, 0, 1, 0]
    labels, learned = batch.ahead(2)
    assert learned.tolist() == [1, 0, 0, 0, 0] and labels[0] == 3


def test_a_file_without_documents_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [document(1)], 100)
    with pytest.raises(ValueError, match="no documents"):
        PackedStream([tmp_path / "a"], 5)


@pytest.mark.parametrize("kind", ["ids", "learn", "partial"])
def test_a_full_disk_leaves_nothing_that_looks_whole(kind: str, tmp_path: Path) -> None:
    """A training that goes on would take it for all of the data."""
    (tmp_path / f"a.{kind}").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a", [document(5, 6, 7)], 100)
    assert not (tmp_path / "a.bounds").exists()
