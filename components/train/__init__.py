"""Step `train`: a Keras model from transformed examples."""

from components.train.step import TrainResult, train

__all__ = ["TrainResult", "train"]
