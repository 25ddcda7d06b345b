"""Tokens and text: tokenizer, chat template, incremental decoding, stop strings."""
