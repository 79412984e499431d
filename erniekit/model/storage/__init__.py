"""Weight files of model folders: safetensors, shards, layouts and stored formats. Needs no Paddle."""
