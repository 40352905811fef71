"""Rollout of a new version: a canary gets a share of the requests, and what the metrics say promotes it or takes it back."""
