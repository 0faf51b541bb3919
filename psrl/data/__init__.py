"""Recorded data: token samples and chat traces, read and checked. NumPy only, never torch."""

from psrl.data.load import load_samples
from psrl.data.samples import ReplaySample, padding_of
from psrl.data.tokenizer import ChatTokenizer, load_tokenizer

__all__ = ["ChatTokenizer", "ReplaySample", "load_samples", "load_tokenizer", "padding_of"]
