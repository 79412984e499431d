"""What `erniekit server` and `erniekit ui` share: who may ask, and how a port is listened on."""
