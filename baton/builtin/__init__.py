"""The built-in model pair: `target/` and `draft/` in Hugging Face form, and their card in `README.md`."""
