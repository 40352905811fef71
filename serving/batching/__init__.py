"""Dynamic batching, as TF Serving's parameters say."""
