"""Texts cut into tokens: as keras.layers.TextVectorization does it, for whoever counts them."""

from __future__ import annotations

import tensorflow as tf

from components.transform_config import WORDS, Tokenization

_PUNCTUATION = r'[!"#$%&()\*\+,-\./:;<=>?@\[\\\]^_`{|}~\']'


def tokenize(texts: tf.Tensor, tokenization: Tokenization = WORDS) -> tf.RaggedTensor:
    """Tokens `(batch, None)` of each text `(batch,)`; those of several words or characters have spaces in between."""
    if tokenization.standardize in ("lower", "lower_and_strip_punctuation"):
        texts = tf.strings.lower(texts)
    if tokenization.standardize in ("strip_punctuation", "lower_and_strip_punctuation"):
        texts = tf.strings.regex_replace(texts, _PUNCTUATION, "")
    by_characters = tokenization.split == "character"
    tokens = tf.strings.unicode_split(texts, "UTF-8") if by_characters else tf.strings.split(texts)
    if tokenization.ngrams == 1:
        return tokens
    return tf.strings.ngrams(tokens, ngram_width=tuple(range(1, tokenization.ngrams + 1)), separator=" ")


def name_of(tokenization: Tokenization) -> str:
    """As the statistics call it.

    Example:
        >>> name_of(Tokenization(ngrams=2))
        'lower_and_strip_punctuation/whitespace/2'
    """
    return f"{tokenization.standardize}/{tokenization.split}/{tokenization.ngrams}"
