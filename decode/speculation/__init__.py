"""Speculative decoding: drafters, how many draft tokens pay off (pure), and the step that drafts and verifies."""
