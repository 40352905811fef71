"""The fitted preprocessing: the one implementation that training, evaluation and the served signature all run."""

from components.preprocessing.fitted import CONVERTIBLE_OPS, OPS, FittedOp, Preprocessing

__all__ = ["CONVERTIBLE_OPS", "OPS", "FittedOp", "Preprocessing"]
