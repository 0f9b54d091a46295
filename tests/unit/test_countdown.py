"""The native countdown: which bucket is full when, what was not expected, on which streams."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ddpcomm import _native
from ddpcomm.countdown import Countdown


@dataclass
class Places:
    """What a countdown needs to know of an arrangement."""

    bucket_of: list[int]
    counts: list[int]


class Owner:
    def __init__(self, parameters: list[Tensor], expected: list[int], streams: list[int] | None = None) -> None:
        self.full = 0
        self.uncounted: list[int] = []
        self.countdown = Countdown(self.on_full, self.uncounted_gradient, (lambda: streams.pop(0)) if streams is not None else None)
        self.countdown.attach(parameters, expected)

    def on_full(self) -> None:
        self.full += 1

    def uncounted_gradient(self, index: int) -> None:
        self.uncounted.append(index)


def parameters(count: int) -> list[Tensor]:
    return [torch.zeros(2, requires_grad=True) for _ in range(count)]


def backward(*used: Tensor) -> None:
    torch.stack(used).sum().backward()


def test_bucket_is_full_with_the_last_of_its_gradients() -> None:
    p = parameters(3)
    owner = Owner(p, [1, 1, 1])
    owner.countdown.arm(Places([0, 0, 1], [2, 1, 4]))
    backward(p[0])
    assert (owner.full, owner.countdown.is_full(0)) == (0, False)
    backward(p[1])
    assert (owner.full, owner.countdown.is_full(0), owner.countdown.is_full(1)) == (1, True, False)
    backward(p[2])
    assert owner.full == 2
    assert owner.countdown.fires() == [1, 1, 1]
    assert owner.uncounted == []


def test_a_parameter_that_fires_twice_is_waited_for() -> None:
    p = parameters(1)
    owner = Owner(p, [2])
    owner.countdown.arm(Places([0], [1, 2]))
    backward(p[0])
    assert owner.full == 0
    backward(p[0])
    assert owner.full == 1
    backward(p[0])
    assert owner.uncounted == [0]
    assert owner.countdown.fires() == [3]


def test_every_gradient_is_uncounted_while_nothing_is_armed() -> None:
    p = parameters(2)
    owner = Owner(p, [1, 1])
    backward(p[1])
    backward(p[1])
    assert owner.uncounted == [1, 1]
    assert owner.countdown.fires() == [0, 2]
    owner.countdown.forget(1)
    assert owner.countdown.fires() == [0, 1]
    owner.countdown.rest()
    assert owner.countdown.fires() == [0, 0]


def test_recount_counts_what_arming_forgot() -> None:
    p = parameters(1)
    owner = Owner(p, [1])
    owner.countdown.arm(Places([0], [1, 2]))
    owner.countdown.recount(0)
    assert owner.full == 1
    assert owner.countdown.fires() == [1]


def test_streams_of_a_bucket_each_once() -> None:
    p = parameters(3)
    owner = Owner(p, [1, 1, 1], streams=[7, 9, 7])
    owner.countdown.arm(Places([0, 0, 0], [3, 4]))
    backward(p[0])
    backward(p[1])
    backward(p[2])
    assert owner.countdown.streams(0) == [7, 9]
    owner.countdown.arm(Places([0, 0, 0], [3, 4]))
    assert owner.countdown.streams(0) == []


def test_error_in_a_callback_comes_out_of_backward() -> None:
    def fail() -> None:
        raise ValueError("full of woe")

    counts = _native.Countdown(fail, lambda index: None, None)
    counts.resize(1)
    counts.arm([1], [1], [0])
    p = parameters(1)
    p[0].register_post_accumulate_grad_hook(counts.hook(0))
    with pytest.raises(ValueError, match="full of woe"):
        backward(p[0])


def test_wrong_sizes_are_refused() -> None:
    counts = _native.Countdown(lambda: None, lambda index: None, None)
    counts.resize(2)
    with pytest.raises(ValueError, match="one entry for each parameter"):
        counts.arm([1], [1], [0])
    with pytest.raises(IndexError, match="no such bucket"):
        counts.arm([1, 1], [1], [0, 1])
    with pytest.raises(IndexError, match="no such parameter"):
        counts.hook(2)


def test_hooks_do_not_keep_their_owner_alive() -> None:
    p = parameters(1)
    owner = Owner(p, [1])
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    backward(p[0])


def test_detach_is_idempotent() -> None:
    p = parameters(1)
    owner = Owner(p, [1])
    owner.countdown.detach()
    owner.countdown.detach()
    backward(p[0])
    assert owner.uncounted == []
