"""What files of a model and of its adapters say: config.json, quantisation, LoRA, the index of a GGUF file. Pure."""
