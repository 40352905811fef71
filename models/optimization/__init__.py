"""Stages that make a model smaller while it is trained, in this order: distill, prune, cluster, quantize.

Each takes a model and gives a `Stage`, whose `finish()` gives the model for the next.
"""

from models.optimization.clustering import ClusteringConfig, cluster
from models.optimization.distillation import DistillationConfig, distill
from models.optimization.pruning import PruningConfig, prune
from models.optimization.quantization import quantize
from models.optimization.size import zipped_size
from models.optimization.stage import Stage

__all__ = [
    "ClusteringConfig",
    "DistillationConfig",
    "PruningConfig",
    "Stage",
    "cluster",
    "distill",
    "prune",
    "quantize",
    "zipped_size",
]
