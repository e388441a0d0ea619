"""Where documents start in a row of tokens: one rule for the attention mask, the counts and the display. Torch-free.

The marks say it. BOS starts a document, and so does what follows an EOS; position 0 of a row always starts one, though
it may be the rest of a document that began earlier.

Tokenizers such as GPT-2's use one id x for both marks. The same x then stands before documents ("x text x text"),
after them ("text x text x") or both ("x text x x text x"), and the tokens alone do not tell. So with bos_id == eos_id a
document starts at the last x of every run of them: the number of documents is right in all three cases, "x x" is the
end of one document and the start of the next and never an empty one, and where x is only written after documents it
counts as the first token of the next one. What follows an x in the last position is not known, so that it starts
nothing: give the label too ([S + 1] tokens) and drop the last result, and the first S are right.
"""

from __future__ import annotations

import numpy as np


def document_starts(tokens: np.ndarray, bos_id: int, eos_id: int) -> np.ndarray:
    """Which tokens [..., n] of each row are the first of a document: bool [..., n]. An id of -1 is not used."""
    starts = np.zeros(tokens.shape, dtype=np.bool_)
    if 0 <= bos_id == eos_id:
        mark = tokens == bos_id
        starts[..., :-1] = mark[..., :-1] & ~mark[..., 1:]
    else:
        if bos_id >= 0:
            starts |= tokens == bos_id
        if eos_id >= 0:
            starts[..., 1:] |= tokens[..., :-1] == eos_id
    starts[..., :1] = True
    return starts


def document_numbers(tokens: np.ndarray, bos_id: int, eos_id: int) -> np.ndarray:
    """Which document of its row each token is in, from 0: int32 [..., n]."""
    numbers: np.ndarray = np.cumsum(document_starts(tokens, bos_id, eos_id), axis=-1, dtype=np.int32) - np.int32(1)
    return numbers
