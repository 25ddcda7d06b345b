"""What OpenAI's API says: bodies in, answers out. No I/O."""
