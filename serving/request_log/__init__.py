"""The log of requests and their answers: written beside serving, read by `monitor`."""
