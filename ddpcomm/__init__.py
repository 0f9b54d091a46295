"""Gradient synchronisation for data-parallel PyTorch training."""

from ddpcomm import hooks, ops
from ddpcomm.checkpoint import save_checkpoint
from ddpcomm.comm.factory import create_communicator
from ddpcomm.ddp import DistributedDataParallel
from ddpcomm.install import install, uninstall

__all__ = ["DistributedDataParallel", "create_communicator", "hooks", "install", "ops", "save_checkpoint", "uninstall"]

__version__ = "0.1.0"
