"""`baton bench`: measures any OpenAI-compatible server."""
