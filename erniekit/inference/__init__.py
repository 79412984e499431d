"""Generate text: the engine, sampling, batches of prompts, answers for evaluation."""
