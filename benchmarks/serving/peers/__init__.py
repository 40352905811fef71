"""The servers to compare with, each a script that runs in an environment of its own and imports nothing of the project.

Each takes one argument, JSON: `ports`, `keras_file`, `base_path` and settings of its own.
"""
