"""The zoo's architectures in PyTorch. Layers bear the names that they have in Keras, by which weights are copied."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.training.workloads import Workload, lengths

PADDING_ID = 0


def build(workload: Workload) -> nn.Module:
    """What `workloads.keras_model` builds: a module from `{feature: (batch, ...)}` to logits; images channels first."""
    classes: dict[str, type[nn.Module]] = {"resnet": ResNet, "transformer": Transformer, "tabular": Tabular}
    return classes[workload.builder](workload)


def load_keras_weights(model: nn.Module, weights: Mapping[str, np.ndarray]) -> None:
    """Copy weights, by their Keras paths, to the layers of the same names.

    Raises:
        KeyError: a weight has no counterpart.
        ValueError: a counterpart has another shape, or some tensors are left over.
    """
    names = {
        "kernel": "weight",
        "embeddings": "weight",
        "gamma": "weight",
        "beta": "bias",
        "bias": "bias",
        "positions": "positions",
        "moving_mean": "running_mean",
        "moving_variance": "running_var",
    }
    state = {name: tensor for name, tensor in model.state_dict().items() if "num_batches_tracked" not in name}
    for path, value in weights.items():
        layer, _, name = path.rpartition("/")
        target = state.pop(f"layers.{layer}.{names[name]}")
        if name == "kernel":
            # (height, width, in, out) to (out, in, height, width), or (in, out) to (out, in)
            value = value.transpose((3, 2, 0, 1) if value.ndim == 4 else (1, 0))
        if target.shape != value.shape:
            raise ValueError(f"{path} is {value.shape} in Keras, {tuple(target.shape)} in PyTorch")
        target.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    if state:
        raise ValueError(f"Keras has no weights for {sorted(state)}")


class ResNet(nn.Module):
    """`models.resnet`."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        sizes, widths = workload.args["stage_sizes"], workload.args["stage_widths"]
        (image,) = workload.features.values()
        self.layers = nn.ModuleDict({"stem_conv": _conv(lengths(image)[-1], widths[0], 3, 1)})
        self.blocks: list[tuple[str, bool]] = []
        last = widths[0]
        for stage, (size, width) in enumerate(zip(sizes, widths, strict=True), start=1):
            for block in range(1, size + 1):
                name, halves = f"stage{stage}_block{block}", stage > 1 and block == 1
                self.blocks.append((name, halves))
                self.layers[f"{name}_norm1"] = _norm(last)
                self.layers[f"{name}_conv1"] = _conv(last, width, 3, 2 if halves else 1)
                self.layers[f"{name}_norm2"] = _norm(width)
                self.layers[f"{name}_conv2"] = _conv(width, width, 3, 1)
                if halves:
                    self.layers[f"{name}_projection"] = _conv(last, width, 1, 2)
                last = width
        self.layers["final_norm"] = _norm(last)
        self.layers["logits"] = nn.Linear(last, workload.output.num_logits)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        (image,) = inputs.values()
        x = self.layers["stem_conv"](image)
        for name, halves in self.blocks:
            activated = functional.relu(self.layers[f"{name}_norm1"](x))
            branch = _same(self.layers[f"{name}_conv1"], activated)
            branch = self.layers[f"{name}_conv2"](functional.relu(self.layers[f"{name}_norm2"](branch)))
            x = (self.layers[f"{name}_projection"](activated) if halves else x) + branch
        x = functional.relu(self.layers["final_norm"](x)).mean(dim=(2, 3))
        return self.layers["logits"](x)


def _conv(channels: int, width: int, kernel_size: int, stride: int) -> nn.Conv2d:
    padding = 0 if stride > 1 else kernel_size // 2
    return nn.Conv2d(channels, width, kernel_size, stride, padding=padding, bias=False)


def _same(conv: nn.Module, x: Tensor) -> Tensor:
    """Keras's `same` for an even size halved by a 3x3 kernel: one row below and one column to the right."""
    return conv(functional.pad(x, (0, 1, 0, 1)) if conv.stride == (2, 2) else x)


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-5, momentum=0.1)


class Transformer(nn.Module):
    """`models.transformer`; its attention is `scaled_dot_product_attention`."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        args = workload.args
        self.num_layers, self.num_heads, self.dropout = args["num_layers"], args["num_heads"], args["dropout"]
        dim, mlp_dim = args["hidden_dim"], args["mlp_dim"]
        (tokens,) = workload.features.values()
        self.layers = nn.ModuleDict(
            {
                "token_embedding": nn.Embedding(tokens.num_categories, dim),
                "position_embedding": _Positions(lengths(tokens)[0], dim),
            }
        )
        for block in [f"block{i}" for i in range(1, self.num_layers + 1)]:
            self.layers[f"{block}_attention_norm"] = _layer_norm(dim)
            for part in ("query", "key", "value", "attention_output"):
                self.layers[f"{block}_{part}"] = nn.Linear(dim, dim)
            self.layers[f"{block}_mlp_norm"] = _layer_norm(dim)
            self.layers[f"{block}_mlp_hidden"] = nn.Linear(dim, mlp_dim)
            self.layers[f"{block}_mlp_output"] = nn.Linear(mlp_dim, dim)
        self.layers["final_norm"] = _layer_norm(dim)
        self.layers["logits"] = nn.Linear(dim, workload.output.num_logits)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        (ids,) = inputs.values()
        is_token = ids != PADDING_ID
        x = self._drop(self.layers["position_embedding"](self.layers["token_embedding"](ids)))
        for block in [f"block{i}" for i in range(1, self.num_layers + 1)]:
            x = x + self._drop(self._attend(block, self.layers[f"{block}_attention_norm"](x), is_token))
            hidden = self.layers[f"{block}_mlp_hidden"](self.layers[f"{block}_mlp_norm"](x))
            x = x + self._drop(self.layers[f"{block}_mlp_output"](functional.gelu(hidden, approximate="tanh")))
        weights = is_token.to(x.dtype)[:, :, None]
        x = (self.layers["final_norm"](x) * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
        return self.layers["logits"](self._drop(x))

    def _attend(self, block: str, x: Tensor, is_token: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.num_heads, -1)
        query, key, value = (
            self.layers[f"{block}_{part}"](x).view(shape).transpose(1, 2) for part in ("query", "key", "value")
        )
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=is_token[:, None, None, :])
        return self.layers[f"{block}_attention_output"](attended.transpose(1, 2).reshape(x.shape))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class _Positions(nn.Module):
    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(length, dim) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions[: x.shape[1]]


def _layer_norm(dim: int) -> nn.LayerNorm:
    return nn.LayerNorm(dim, eps=1e-3)


class Tabular(nn.Module):
    """`models.tabular`."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.dropout = workload.args["dropout"]
        self.layers = nn.ModuleDict()
        width = 0
        for name, spec in workload.features.items():
            if spec.num_categories is None:
                width += lengths(spec)[0]
            else:
                dim = workload.args["embedding_dim"]
                self.layers[f"{name}_embedding"] = nn.Embedding(spec.num_categories, dim)
                width += dim
        self.num_hidden = len(workload.args["hidden_dims"])
        for index, hidden in enumerate(workload.args["hidden_dims"], start=1):
            self.layers[f"hidden{index}"] = nn.Linear(width, hidden)
            width = hidden
        self.layers["logits"] = nn.Linear(width, workload.output.num_logits)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        columns = []
        for name, tensor in sorted(inputs.items()):
            embedding = f"{name}_embedding"
            columns.append(self.layers[embedding](tensor).flatten(1) if embedding in self.layers else tensor)
        x = torch.cat(columns, dim=1)
        for index in range(1, self.num_hidden + 1):
            x = functional.dropout(functional.relu(self.layers[f"hidden{index}"](x)), self.dropout, self.training)
        return self.layers["logits"](x)
