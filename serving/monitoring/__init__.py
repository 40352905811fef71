"""Metrics, traces and shadow traffic."""
