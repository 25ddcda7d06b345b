"""OpenAI's API: parses request bodies and renders answers. No I/O."""
