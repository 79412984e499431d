"""LoRA adapters: small trained updates on top of frozen weights, and the folders that store them."""
