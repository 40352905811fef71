"""The same step in PyTorch, eager or by `torch.compile`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.training import workloads
from benchmarks.training.contenders import torch_models
from benchmarks.training.turns import Task, Turns
from benchmarks.training.workloads import Batch, Workload

Settings = Mapping[str, Any]


def train(task: Task, turns: Turns) -> None:
    """Take turns; settings: `compile`, and `channels_last` for images."""
    torch.set_num_threads(task.threads)
    data = workloads.make_data(task.workload)
    model, step = make_step(task.workload, data, task.settings)
    step().item()
    turns.started()
    turns.ready(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        forward_difference=_check(model, data, task),
        versions={"torch": torch.__version__},
    )
    for num_steps in turns:
        for _ in range(num_steps):
            loss = step()
        turns.finish(loss.item())


def make_step(
    workload: Workload, data: Batch, settings: Settings
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model, and a function that takes a step on the next batch and returns its loss."""
    torch.manual_seed(workloads.SEED)
    model = torch_models.build(workload).train()
    if settings.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
    x, y = data
    # Views of memory, where TensorFlow and JAX copy each batch.
    batches = [
        ({n: _tensor(values[i], settings) for n, values in x.items()}, torch.from_numpy(y[i])) for i in range(len(y))
    ]
    optimizer = _optimizer(model, workload)
    forward = torch.compile(model) if settings["compile"] else model
    is_binary = workload.output.task == "binary"
    loss_of = functional.binary_cross_entropy_with_logits if is_binary else functional.cross_entropy
    next_batch = itertools.cycle(batches)

    def step() -> torch.Tensor:
        inputs, labels = next(next_batch)
        loss = loss_of(forward(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return model, step


def _tensor(values: np.ndarray, settings: Settings) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    if tensor.ndim != 4:
        return tensor
    memory_format = torch.channels_last if settings.get("channels_last") else torch.contiguous_format
    # (batch, height, width, channels) to PyTorch's (batch, channels, height, width)
    return tensor.permute(0, 3, 1, 2).contiguous(memory_format=memory_format)


def _optimizer(model: torch.nn.Module, workload: Workload) -> torch.optim.Optimizer:
    settings = dict(workload.optimizer)
    rate = settings.pop("learning_rate")
    if settings.pop("name") == "sgd":
        return torch.optim.SGD(model.parameters(), rate, fused=True, **settings)
    # Keras's epsilon
    return torch.optim.AdamW(model.parameters(), rate, eps=1e-7, fused=True, **settings)


@torch.no_grad()
def _check(model: torch.nn.Module, data: Batch, task: Task) -> float:
    """As `workloads.check_keras`; the file must be there."""
    weights, logits = workloads.read_reference(task.reference)
    torch_models.load_keras_weights(model, weights)
    model.eval()
    inputs = {name: _tensor(values, task.settings) for name, values in workloads.checked_inputs(data).items()}
    ours = model(inputs).numpy()
    model.train()
    return float(np.abs(ours - logits).max())
