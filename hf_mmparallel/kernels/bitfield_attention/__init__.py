"""Attention whose mask is one int64 word per token."""

from .attention import bitfield_attention
from .intervals import RowIntervals, row_intervals
from .reference import dense_mask, reference_attention
from .words import BitfieldMask, Kind, WordFields, decode_words, encode_words

__all__ = [
    "BitfieldMask",
    "Kind",
    "RowIntervals",
    "WordFields",
    "bitfield_attention",
    "decode_words",
    "dense_mask",
    "encode_words",
    "reference_attention",
    "row_intervals",
]
