"""Document borders: the marks say where, for two ids, for one id used as both, and without marks."""

from __future__ import annotations

import numpy as np
import pytest

from titanlite.data.documents import document_numbers, document_starts

BOS, EOS, X = 1, 2, 9


def starts(tokens: list[int], bos: int, eos: int) -> list[int]:
    found = document_starts(np.array(tokens, dtype=np.uint16), bos, eos)
    assert found.dtype == np.bool_ and found.shape == (len(tokens),)
    return np.flatnonzero(found).tolist()


@pytest.mark.parametrize(
    ("tokens", "bos", "eos", "expected"),
    [
        ([BOS, 5, 6, EOS, BOS, 7, EOS], BOS, EOS, [0, 4]),
        ([BOS, 5, 6, BOS, 7], BOS, -1, [0, 3]),
        ([5, 6, EOS, 7, EOS], -1, EOS, [0, 3]),
        ([5, BOS, 6, EOS], BOS, EOS, [0, 1]),  # a row that starts inside a document
        ([EOS, BOS, 6], BOS, EOS, [0, 1]),
        ([5, 6, BOS], BOS, EOS, [0, 2]),  # a row that ends with a start
        ([BOS, 5, EOS], -1, -1, [0]),
        ([BOS, 5, EOS, BOS, 6], -1, 70_000, [0]),  # an id that the dtype cannot hold
        ([], BOS, EOS, []),
    ],
)
def test_marks(tokens: list[int], bos: int, eos: int, expected: list[int]):
    assert starts(tokens, bos, eos) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([X, 5, 6, X, 7], [0, 3]),  # before documents
        ([5, 6, X, 7, X], [0, 2]),  # after them: the number of documents is right, not the place of x
        ([X, 5, 6, X, X, 7, X], [0, 4]),  # both: no empty document, and none for the last EOS
        ([X, X, 7, X], [0, 1]),  # a row cut between the two: the rest of a document is its EOS
        ([X, X, X, 7], [0, 2]),
        ([X], [0]),
        ([X, X], [0]),
        ([], []),
    ],
)
def test_one_id_for_both_marks(tokens: list[int], expected: list[int]):
    assert starts(tokens, X, X) == expected


def test_the_label_decides_about_a_mark_at_the_end_of_a_row():
    before, both = np.array([5, X, 6]), np.array([5, X, X])
    assert document_starts(before, X, X)[:-1].tolist() == [True, True]
    assert document_starts(both, X, X)[:-1].tolist() == [True, False]


@pytest.mark.parametrize(("bos", "eos"), [(BOS, EOS), (BOS, -1), (-1, EOS), (X, X), (-1, -1)])
def test_rows_are_independent(bos: int, eos: int):
    tokens = np.random.default_rng(0).choice([BOS, EOS, X, 5], (3, 4, 50))
    found = document_starts(tokens, bos, eos)
    numbers = document_numbers(tokens, bos, eos)
    assert numbers.dtype == np.int32 and numbers.shape == tokens.shape
    for i in np.ndindex(3, 4):
        assert np.array_equal(found[i], document_starts(tokens[i], bos, eos))
        assert np.array_equal(numbers[i], np.cumsum(found[i]) - 1)
    assert (numbers[..., 0] == 0).all()
    assert document_numbers(np.zeros((2, 0), np.int64), bos, eos).shape == (2, 0)
