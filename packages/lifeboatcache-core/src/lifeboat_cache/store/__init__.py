"""The block store: an index, a target and the workers between them."""
