"""Whether all ranks have laid out the same parameters at the same places: a mixture of gradients must never go unnoticed.

Where calls meet in shared memory, each bucket's all-reduce carries a header, which the transport compares before any data is touched.
Elsewhere the ranks compare their layouts once, whenever they have changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpcomm.agreement import Signature
from ddpcomm.buckets import Bucket
from ddpcomm.comm.base import bucket_header
from ddpcomm.errors import CommunicationError, RankMismatchError
from ddpcomm.verify import require_same_model

if TYPE_CHECKING:
    from ddpcomm.reducer import Reducer


def describe_layout(buckets: Sequence[Bucket]) -> list[Signature]:
    """Where everything lies, in launch order."""
    found = [("the number of buckets", str(len(buckets)))]
    for bucket in buckets:
        index = bucket.layout.index
        found.append((f"bucket {index}", f"{bucket.layout.total_numel} x {bucket.dtype}"))
        for slot, member in zip(bucket.slots, bucket.members, strict=True):
            strides = [step for size, step in zip(member.shape, member.strides, strict=True) if size != 1]
            what = f"{list(member.shape)} {member.dtype} with strides {strides}"
            found.append((member.name, f"{what} at element {slot.offset} of bucket {index}"))
    return found


def headers(buckets: Sequence[Bucket]) -> list[int]:
    """For each bucket, what its all-reduce is to carry: equal on two ranks if their layouts are, but for a chance of 2 to the -32."""
    digest = int.from_bytes(hashlib.sha256(repr(describe_layout(buckets)).encode()).digest()[:4], "little")
    return [bucket_header(digest, index, len(buckets)) for index in range(len(buckets))]


def require_same_layout(reducer: Reducer) -> None:
    """Raises on every rank if the ranks' layouts differ. Collective: one all-gather of 32 bytes. The model can't be synchronised then.

    Raises:
        RankMismatchError: names what differs.
    """
    try:
        require_same_model(reducer.communicator, describe_layout(reducer.arrangement.buckets))
    except (RankMismatchError, CommunicationError) as error:
        reducer.broken = error
        raise
