"""The REST API and its HTTP server."""
