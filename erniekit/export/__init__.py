"""Write a trained model for others: Hugging Face files, quantised files, Paddle programs, ONNX."""
