"""The devices that a run trains on."""

from __future__ import annotations

import tensorflow as tf

from components.config import TrainConfig
from components.errors import ConfigError


def prepare(config: TrainConfig) -> None:
    """Split the CPU into logical devices where MirroredStrategy is asked for and there is no GPU.

    TensorFlow allows this only before it runs its first operation, so a process calls it first.

    Raises:
        ConfigError: TensorFlow is running already, with too few devices.
    """
    wanted = config.num_devices or 1
    if config.strategy != "mirrored" or tf.config.list_physical_devices("GPU"):
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or [None]) >= wanted:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * wanted)
    except RuntimeError as error:
        raise ConfigError(
            f"train.num_devices is {wanted}, but TensorFlow has started with fewer CPU devices. "
            "Call components.train.devices.prepare(config) before anything else that uses TensorFlow."
        ) from error


def make_strategy(config: TrainConfig) -> tf.distribute.Strategy:
    """The strategy of the configuration.

    Raises:
        ConfigError: there are fewer devices than asked for, or the batch cannot be divided among them.
    """
    if config.strategy == "one_device":
        return tf.distribute.get_strategy()
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    available = [device.name for device in tf.config.list_logical_devices(kind)]
    wanted = config.num_devices or len(available)
    if wanted > len(available):
        raise ConfigError(f"train.num_devices is {wanted}, but there are {len(available)} {kind}s. Lower it.")
    if config.global_batch_size % wanted:
        raise ConfigError(
            f"train.global_batch_size {config.global_batch_size} cannot be divided over {wanted} devices. "
            f"Use a multiple of {wanted}."
        )
    # TensorFlow's CPU collectives allow one number of devices a process; this reduction has no such memory.
    reduction = tf.distribute.ReductionToOneDevice() if kind == "CPU" else None
    return tf.distribute.MirroredStrategy(available[:wanted], cross_device_ops=reduction)
