"""Invented tokens and a tokenizer for them, the same every time: a run's data without anything of the user's."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import sentencepiece

from titanlite.config.schema import Config
from titanlite.data.prepare import marks_of
from titanlite.data.shards import ShardWriter, token_dtype
from titanlite.data.tokenizer import load_tokenizer

HELD_OUT_SAMPLES = 8
FOLLOWERS = 4  # a token is followed by one of so many: something to learn
_SPECIAL = 3  # <unk>, <s>, </s>
_FIRST_CHARACTER = 0x4E00  # of twenty thousand letters in a row


def write_data(config: Config) -> None:
    """Write the tokenizer and the shards that the config names; none of its paths may be there yet."""
    training, vocab_size = config.training, config.model.vocab_size
    path = Path(config.tokenizer.path)
    path.write_bytes(tokenizer_of(vocab_size))
    tokenizer = load_tokenizer(path)
    marks = marks_of(tokenizer, config.tokenizer)
    samples = max(HELD_OUT_SAMPLES, training.steps * training.global_batch_size // 2)  # the steps are two epochs
    for number, source in enumerate(config.data.sources):
        for part, (folder, count) in enumerate(((source.path, samples), (source.validation_path, HELD_OUT_SAMPLES))):
            if not folder:
                continue
            writer = ShardWriter(
                Path(folder),
                dtype=token_dtype(vocab_size),
                tokenizer=tokenizer.fingerprint,
                bos_id=marks[0],
                eos_id=marks[1],
            )
            tokens = invent(count * training.seq_len + 1, training.seq_len, vocab_size, marks, [number, part])
            writer.write(tokens, documents=int((tokens == max(marks)).sum()), text_bytes=len(tokens))
            writer.close()


def tokenizer_of(vocab_size: int) -> bytes:
    """A sentencepiece model of exactly so many pieces: single letters, and <unk>, <s> and </s>."""
    letters = "".join(chr(_FIRST_CHARACTER + i) for i in range(vocab_size - _SPECIAL))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([letters[i : i + 1000] for i in range(0, len(letters), 1000)]),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="char",
        character_coverage=1.0,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def invent(n: int, seq_len: int, vocab_size: int, marks: tuple[int, int], seed: list[int]) -> np.ndarray:
    """n token ids, int64: documents of a few to 2 seq_len tokens between their marks (BOS and EOS id, -1: none)."""
    generator = np.random.default_rng(seed)
    followers = np.random.default_rng(0).integers(_SPECIAL, vocab_size, (vocab_size, FOLLOWERS))  # of all sources
    before, after = ([mark] if mark >= 0 else [] for mark in marks)
    tokens: list[int] = []
    while len(tokens) < n:
        document = [int(generator.integers(_SPECIAL, vocab_size))]
        for choice in generator.integers(0, FOLLOWERS, generator.integers(4, 2 * seq_len)):
            document.append(int(followers[document[-1], choice]))
        tokens += [*before, *document, *after]
    return np.array(tokens[:n], dtype=np.int64)
