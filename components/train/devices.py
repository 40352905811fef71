"""The devices that a run trains on."""

from __future__ import annotations

import functools
import os
import signal

import tensorflow as tf

from components.config import TrainConfig
from components.errors import ConfigError
from components.train import cluster as clusters
from components.train.cluster import Cluster
from components.train.meeting import meet
from components.train.supervisor import START_TIMEOUT, Limits


def prepare(config: TrainConfig) -> None:
    """Meet the other workers, or split the CPU into logical devices where MirroredStrategy finds no GPU.

    TensorFlow allows either only before it runs its first operation, so a process calls this first.

    Raises:
        ConfigError: TensorFlow is running already, with too few devices; or the batch is too small for the workers.
        PeerError: the other workers have not started in time.
    """
    if config.strategy == "multi_worker" and (cluster := clusters.from_environ()) is not None:
        if config.num_workers not in (None, len(cluster.addresses)):
            raise ConfigError(
                f"train.num_workers is {config.num_workers}, but TF_CONFIG names {len(cluster.addresses)}. "
                "Make them agree, or leave train.num_workers out."
            )
        if config.global_batch_size < len(cluster.addresses):
            raise ConfigError(
                f"train.global_batch_size {config.global_batch_size} cannot be divided over "
                f"{len(cluster.addresses)} workers. Use at least one example for each."
            )
        _join(cluster)
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
    if config.strategy == "multi_worker" and (cluster := clusters.from_environ()) is not None:
        return _join(cluster)
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    available = [device.name for device in tf.config.list_logical_devices(kind)]
    wanted = config.num_devices or len(available)
    if wanted > len(available):
        raise ConfigError(f"train.num_devices is {wanted}, but there are {len(available)} {kind}s. Lower it.")
    if config.global_batch_size < wanted:
        raise ConfigError(
            f"train.global_batch_size {config.global_batch_size} cannot be divided over {wanted} devices. "
            "Use at least one example for each."
        )
    # TensorFlow's CPU collectives allow one number of devices a process; this reduction has no such memory.
    reduction = tf.distribute.ReductionToOneDevice() if kind == "CPU" else None
    return tf.distribute.MirroredStrategy(available[:wanted], cross_device_ops=reduction)


@functools.cache
def _join(cluster: Cluster) -> tf.distribute.Strategy:
    """Start TensorFlow's side of this worker, once in a process; it uses one device."""
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices([gpus[cluster.index % len(gpus)]], "GPU")
    os.environ["TF_CONFIG"] = cluster.tf_config()
    timeout_s = float(os.environ.get(START_TIMEOUT, Limits.start_timeout_s))
    meet(cluster, timeout_s)
    # Should one of them be gone again, TensorFlow waits in C++ and only a signal without a handler ends it.
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    on_termination = signal.getsignal(signal.SIGTERM)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    signal.setitimer(signal.ITIMER_REAL, 0)
    # TensorFlow has put a handler of its own there, which swallows the signal.
    signal.signal(signal.SIGTERM, on_termination or signal.SIG_DFL)
    return strategy
