"""Measurements that are run by hand: side by side in one run, with JSON out. README.md says how and what came out."""
