"""Models in one GGUF file, as llama.cpp runs them."""
