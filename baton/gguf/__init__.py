"""Model files in GGUF, llama.cpp's format, presented to Baton as a checkpoint directory."""
