"""The engine that answers: requests of any length side by side, over key-value blocks."""
