"""Options of the reducer, and the checks of torch's constructor arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpcomm.argument_checks import check_number, check_sequence
from ddpcomm.layout import Caps
from ddpcomm.nonfinite import NonFinite


@dataclass(frozen=True)
class ReducerOptions:
    """What a reducer must be told. The ranks must agree on all of it.

    Args:
        caps: bucket sizes.
        gradient_as_bucket_view: `.grad` becomes the bucket's memory.
        find_unused_parameters: the user expects unused parameters: no warning about them.
        static_graph: the user promises the same graph in every backward: no warning about unused parameters.
        check_at_once: on CUDA, the host waits at the end of every backward to hear whether the other ranks' went well, not at the start
            of the next one.
        nonfinite: what to do about gradients that are not finite.
        skip_unused_buckets: buckets in which this rank used nothing stay at home; the user promises the same on all ranks.
    """

    caps: Caps
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    skip_unused_buckets: bool = False
    check_at_once: bool = False
    nonfinite: NonFinite = "ignore"


def bucket_caps(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> Caps:
    """torch's two arguments, checked.

    Raises:
        ConfigurationError: a size below 0, or not finite.
        ConfigurationTypeError: a size that is no number.
    """
    if bucket_cap_mb is not None:
        check_number("bucket_cap_mb", bucket_cap_mb, least=0)
    if bucket_cap_mb_list is not None:
        for value in check_sequence("bucket_cap_mb_list", bucket_cap_mb_list):
            check_number("bucket_cap_mb_list", value, least=0)
    return Caps.of_mb(bucket_cap_mb, bucket_cap_mb_list)
