"""Averages of sparse gradients: every rank's rows, put together."""

from __future__ import annotations

import torch
from torch import Tensor

from ddpcomm.comm.base import Communicator
from ddpcomm.parameters import gradient_dtype


def average(communicator: Communicator, parameter: Tensor, used: bool, divisor: float, *, void: bool = False) -> bool:
    """Puts the average of `parameter.grad` over the ranks in its place. Collective, blocking.

    A rank sends its number of rows, then its indices and rows, padded to the most that any rank has: three all-gathers. Rows are summed
    in the order of the ranks, so that all ranks get the same bits.

    Args:
        parameter: its gradient is sparse (COO, over its first dimensions), dense, or None for no rows.
        used: whether this rank used the parameter.
        divisor: what the sum is divided by.
        void: this rank takes part for the others' sake: it sends no rows, and its own gradient stays as it is.

    Returns:
        Whether some rank used the parameter. If none did, its gradient is left as it was.
    """
    gradient = None if void else parameter.grad
    was_dense = gradient is not None and not gradient.is_sparse
    sparse = _as_sparse(gradient, parameter)
    facts = torch.tensor([sparse._nnz(), sparse.sparse_dim(), used and gradient is not None], dtype=torch.int64, device=communicator.device)
    all_facts = facts.new_empty(communicator.world_size * facts.numel())
    communicator.all_gather(all_facts, facts).wait()
    by_rank = all_facts.view(communicator.world_size, -1).tolist()
    if not any(row[2] for row in by_rank):
        return False
    depth = max(row[1] for row in by_rank)
    if sparse.sparse_dim() != depth:
        sparse = sparse.to_dense().to_sparse(depth)
    most = max(row[0] for row in by_rank)
    indices, values = _gather(communicator, sparse.indices().t(), most), _gather(communicator, sparse.values(), most)
    counts = [row[0] for row in by_rank]
    together = torch.sparse_coo_tensor(
        torch.cat([indices[rank, :count] for rank, count in enumerate(counts)]).t().contiguous(),
        torch.cat([values[rank, :count] for rank, count in enumerate(counts)]) / divisor,
        parameter.shape,
        check_invariants=False,
    ).coalesce()
    if not void:
        parameter.grad = together.to_dense() if was_dense else together
    return True


def _as_sparse(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    if gradient is None:
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
            torch.empty(0, *parameter.shape[1:], dtype=gradient_dtype(parameter), device=parameter.device),
            parameter.shape,
            is_coalesced=True,
            check_invariants=False,
        )
    gradient = gradient.detach()
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()


def _gather(communicator: Communicator, rows: Tensor, most: int) -> Tensor:
    """`rows` of every rank, padded to `most`: shape [world size, most, ...]."""
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: len(rows)] = rows
    out = rows.new_empty(communicator.world_size, *padded.shape)
    if padded.numel():
        communicator.all_gather(out, padded).wait()
    return out
