"""Speculative decoding: drafters, how many draft tokens pay (pure), and the step that drafts and verifies."""
