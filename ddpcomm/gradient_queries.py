"""What a model tells of its gradients: their norm, and which of them are averages."""

from __future__ import annotations

from math import inf

from torch import Tensor, nn

from ddpcomm.argument_checks import check_flag, check_number
from ddpcomm.gradient_norm import clip, gradient_statistics
from ddpcomm.named_tensors import named_parameters
from ddpcomm.reducer import Reducer


class GradientQueries(nn.Module):
    """Base of DistributedDataParallel, which has the attributes named here."""

    module: nn.Module
    parameters_to_ignore: set[str]
    _reducer: Reducer

    def grad_norm(self) -> Tensor:
        """The 2-norm of all parameters' gradients: one float64. Local; after a backward that synchronised it is the same on all ranks.

        One pass over the gradients, with a float64 sum. On CUDA the host doesn't wait.
        """
        return gradient_statistics(self._gradients())[0].sqrt()

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """Scales the gradients so that their 2-norm is at most `max_norm`. Returns the norm before, as `grad_norm` does.

        Raises:
            ConfigurationError, ConfigurationTypeError: `max_norm` is no number, negative or not a number; nothing is changed.
            NonFiniteGradientError: the norm is not finite, and `error_if_nonfinite` is set.
        """
        if max_norm != inf:  # which only measures
            check_number("max_norm", max_norm, least=0)
        check_flag("error_if_nonfinite", error_if_nonfinite)
        gradients = self._gradients()
        return clip(gradients, gradient_statistics(gradients), max_norm, error_if_nonfinite)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def unused_parameters(self) -> dict[str, str]:
        """Parameters that this rank did not use in the last backward that synchronised, and whether others did. Local."""
        return dict(self._reducer.record.unused)

    def unsynchronized_parameters(self) -> dict[str, str]:
        """Parameters whose `.grad` is not the average over the ranks, and why. Local."""
        found = self._reducer.record.unsynchronized(self._reducer.parameters)
        looked_after = {id(p) for p in self._reducer.parameters.parameters}
        left = [(name, p) for name, p in self.module.named_parameters() if name in self.parameters_to_ignore and id(p) not in looked_after]
        return {**found, **{name: "ignored by request" for name, p in left if p.grad is not None}}

    def _unsynchronized_by_id(self) -> dict[int, tuple[str, str]]:
        found = self._reducer.record.unsynchronized(self._reducer.parameters)
        return {id(p): (name, found[name]) for name, p in named_parameters(self.module, self.parameters_to_ignore) if name in found}
