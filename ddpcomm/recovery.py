"""Going on with the ranks that are left: `replace_process_group()`."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import torch
from torch import Tensor, nn

from ddpcomm.argument_checks import check_integer, check_timeout
from ddpcomm.comm.base import Communicator
from ddpcomm.comm.exchange import all_gather_objects
from ddpcomm.comm.process_group import resolve
from ddpcomm.comm.torch_ddp import ProcessGroup
from ddpcomm.errors import ConfigurationError, RankMismatchError
from ddpcomm.layout_check import require_same_layout
from ddpcomm.listing import listed
from ddpcomm.named_tensors import named_parameters
from ddpcomm.reports import Reporter
from ddpcomm.transport_choice import TransportChoice
from ddpcomm.verify import model_signatures, require_same_model


class Recovery(TransportChoice):
    """Base of DistributedDataParallel, which has the attributes named here."""

    module: nn.Module
    parameters_to_ignore: set[str]
    _reports: Reporter

    def replace_process_group(
        self, process_group: ProcessGroup | None = None, *, source: int | None = None, timeout: timedelta | None = None
    ) -> None:
        """Synchronises over another group from now on, such as the ranks that are left after one was lost. Collective over the new group.

        The former communicator is given back without waiting for anybody. Weights stay as they are, once they are known to be the same
        bits on all ranks of the new group. Gradients of a backward that failed stay this rank's own: clear them (zero_grad). A
        communication hook whose state names the former group has to be given the new one. Call it between two steps, after the error has
        reached the training loop; a deep copy of this model that shares its communicator needs a call of its own.

        Args:
            process_group: the ranks, this process among them; None means the default group.
            source: give all ranks the parameters and buffers of this rank of the new group, where they may differ. The optimizers'
                state is the caller's: a rank that had done one step more than another has more in it than weights.
            timeout: time limit of every wait from now on; None means the one that this model was made with.

        Raises:
            ConfigurationTypeError: `timeout` is no timedelta, or `source` no integer. Nothing was changed.
            ConfigurationError: this process isn't in the group, or `source` is none of its ranks. Nothing was changed.
            RankMismatchError: the ranks' models, options or (without `source`) weights differ; on every rank. Nothing was changed,
                unless it is only their buckets that differ: then this model can no longer be synchronised.
            CommunicationError: another rank of the new group is lost, or did not arrive in time. Nothing was changed.
        """
        group = resolve(process_group)
        if source is not None and not 0 <= check_integer("replace_process_group: source", source) < group.size():
            raise ConfigurationError(f"replace_process_group: source must be a rank from 0 to {group.size() - 1}, got {source}")
        limit = self._timeout if timeout is None else check_timeout("timeout", timeout)
        communicator = self._open_communicator({"timeout": limit}, group)
        try:
            require_same_model(communicator, model_signatures(self.module, self.parameters_to_ignore, self._describe_options()))
            if source is None:
                _require_same_weights(communicator, self.module, self.parameters_to_ignore)
        except BaseException:
            communicator.close()
            raise
        former, self._communicator = self._communicator, communicator
        self.process_group, self._timeout = group, limit
        self._reports.connect(group)
        try:
            self._reducer.use(communicator)
            self._plan_again()
            require_same_layout(self._reducer)
        finally:
            self._give_back_communicator(former)
        if source is not None:
            self._broadcast_state(source)

    def _describe_options(self) -> dict[str, object]:
        raise AttributeError("_describe_options")

    def _plan_again(self) -> None:
        raise AttributeError("_plan_again")

    def _broadcast_state(self, source: int = 0, *, with_buffers: bool = True) -> None:
        raise AttributeError("_broadcast_state")


def _require_same_weights(communicator: Communicator, module: nn.Module, ignored: set[str]) -> None:
    """Raises on every rank if the ranks hold different parameters. Collective.

    Raises:
        RankMismatchError: names them.
    """
    mine = {name: _digest(parameter) for name, parameter in named_parameters(module, ignored)}
    everyone = all_gather_objects(communicator, mine)
    different = [name for name in mine if len({theirs[name] for theirs in everyone}) > 1]
    if different:
        raise RankMismatchError(
            f"the ranks of the new group hold different weights: {listed(different)}. One of them has probably done "
            "a step that another has not: load the last checkpoint on all of them, or pass source= to take one rank's weights"
        )


def _digest(parameter: Tensor) -> bytes:
    data = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).digest()
