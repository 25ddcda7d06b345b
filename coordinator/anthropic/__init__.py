"""Anthropic's Messages API: its bodies, answers and errors. No I/O."""
