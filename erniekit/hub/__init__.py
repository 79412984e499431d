"""Find, download and upload model folders through the clients of model hubs."""
