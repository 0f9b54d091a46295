"""Communicators: the only part of ddpcomm that talks to torch.distributed, NCCL or shared memory."""
