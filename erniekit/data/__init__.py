"""Turn files into records, conversations, tokens, packs and batches. NumPy only; knows nothing of models."""

# The version of the algorithms that decide which samples a step sees. It stands here so that reading it needs no NumPy.
# Raise it with every change of the order or the packing of samples, in mixing.py, packing.py or sampler.py. A
# checkpoint of another version is then refused, because its remaining steps would train on other samples, and step
# counts that were stored under another version are counted again.
PLAN_VERSION = 1
