"""Write a trained model for others to load: Hugging Face files, quantized files, Paddle programs, ONNX."""
