"""The gRPC API and its server."""
