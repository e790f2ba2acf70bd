"""Attention whose mask is one int64 word per token."""

from .mask import BitfieldMask
from .reference import dense_mask, reference_attention
from .words import Kind, WordFields, decode_words, encode_words

__all__ = [
    "BitfieldMask",
    "Kind",
    "WordFields",
    "decode_words",
    "dense_mask",
    "encode_words",
    "reference_attention",
]
