"""Accuracy that int8 costs: this project and tfmot on the same network."""
