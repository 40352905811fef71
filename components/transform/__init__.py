"""Step `transform`: fit the preprocessing to the train split's statistics, without another pass over the data."""

from components.transform.step import TransformResult, default_operations, fit, fit_all, transform

__all__ = ["TransformResult", "default_operations", "fit", "fit_all", "transform"]
