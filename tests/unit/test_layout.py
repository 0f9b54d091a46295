"""Which parameter goes where: properties that hold for all sizes, and a few layouts by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcomm.config import bucket_caps
from ddpcomm.errors import ConfigurationError
from ddpcomm.layout import ALIGNMENT_BYTES, BYTES_PER_MB, BucketLayout, Caps, ParameterSize, assign, plan

CONTROL = ParameterSize(0, 4, "control")
STATUS_NUMEL = 7

element_bytes = {"half": 2, "single": 4, "double": 8}
sizes = st.builds(
    lambda numel, kind: ParameterSize(numel, element_bytes[kind], kind), st.integers(0, 300), st.sampled_from(sorted(element_bytes))
)
models = st.lists(sizes, max_size=12).flatmap(
    lambda found: st.tuples(st.just(found), st.permutations(range(len(found))), st.integers(0, len(found)))
)
caps = st.lists(st.integers(1, 1000), min_size=1, max_size=3).map(lambda found: Caps(tuple(found)))


def lay_out(model: tuple[list[ParameterSize], list[int], int], cap: Caps, apart: bool) -> tuple[list[int], tuple[BucketLayout, ...]]:
    found, order, left_out = model
    order = list(order)[left_out:]
    return order, plan(found, assign(found, order, cap), STATUS_NUMEL, control=CONTROL, flags_apart=order if apart else None)


@given(models, caps, st.booleans())
def test_every_parameter_has_one_place(model: tuple[list[ParameterSize], list[int], int], cap: Caps, apart: bool) -> None:
    order, layouts = lay_out(model, cap, apart)
    placed = [slot.parameter for layout in layouts for slot in layout.slots]
    assert sorted(placed) == sorted(order)
    flagged = [parameter for layout in layouts for parameter in layout.flagged]
    assert sorted(flagged) == sorted(order)
    for layout in layouts:
        assert all(model[0][slot.parameter].kind == layout.kind for slot in layout.slots)
        assert all(model[0][slot.parameter].numel == slot.numel for slot in layout.slots)


@given(models, caps, st.booleans())
def test_nothing_overlaps(model: tuple[list[ParameterSize], list[int], int], cap: Caps, apart: bool) -> None:
    _, layouts = lay_out(model, cap, apart)
    for layout in layouts:
        pieces = [(slot.offset, slot.numel) for slot in layout.slots]
        pieces += [(layout.flags_offset, len(layout.flagged)), (layout.status_offset, layout.status_numel)]
        end = 0
        for offset, numel in pieces:
            assert offset >= end
            end = offset + numel
        assert layout.total_numel == end
        assert layout.data_numel == max((slot.offset + slot.numel for slot in layout.slots), default=0)


@given(models, caps, st.booleans())
def test_alignment(model: tuple[list[ParameterSize], list[int], int], cap: Caps, apart: bool) -> None:
    """Aligned, or packed where hooks are to see gradients alone."""
    _, layouts = lay_out(model, cap, apart)
    for layout in layouts:
        end = 0
        for slot in layout.slots:
            size = model[0][slot.parameter].element_bytes
            assert slot.offset == end if apart else slot.offset * size % ALIGNMENT_BYTES == 0
            end = slot.offset + slot.numel


@given(models, caps, st.booleans())
def test_the_last_bucket_alone_carries_status(model: tuple[list[ParameterSize], list[int], int], cap: Caps, apart: bool) -> None:
    order, layouts = lay_out(model, cap, apart)
    assert [layout.status_numel for layout in layouts] == [0] * (len(layouts) - 1) + [STATUS_NUMEL]
    assert [layout.index for layout in layouts] == list(range(len(layouts)))
    if apart or not order:
        assert layouts[-1].slots == ()
        assert layouts[-1].kind == CONTROL.kind
        assert all(layout.flagged == () for layout in layouts[:-1])


@given(models, caps)
def test_launch_order(model: tuple[list[ParameterSize], list[int], int], cap: Caps) -> None:
    """A bucket goes out with the last of its gradients; inside, they lie in the order in which they become ready."""
    order, layouts = lay_out(model, cap, False)
    ready = {parameter: position for position, parameter in enumerate(order)}
    lasts = [ready[layout.slots[-1].parameter] for layout in layouts if layout.slots]
    assert lasts == sorted(lasts)
    for layout in layouts:
        places = [ready[slot.parameter] for slot in layout.slots]
        assert places == sorted(places)


@given(models, caps)
def test_buckets_close_at_their_cap(model: tuple[list[ParameterSize], list[int], int], cap: Caps) -> None:
    found, order, _ = model
    numbers: dict[object, int] = {}
    buckets = assign(found, list(order), cap)
    for position, bucket in enumerate(buckets):
        kind = found[bucket[0]].kind
        number = numbers.get(kind, 0)
        numbers[kind] = number + 1
        bytes_of = [found[p].numel * found[p].element_bytes for p in bucket]
        assert sum(bytes_of[:-1]) < cap.of(number)
        is_last = all(found[other[0]].kind != kind for other in buckets[position + 1 :])
        assert is_last or sum(bytes_of) >= cap.of(number)


@given(models, st.sets(st.integers(0, 11)))
def test_explicit_ends(model: tuple[list[ParameterSize], list[int], int], ends: set[int]) -> None:
    """A bucket holds what one kind has between two ends, however large."""
    found, order, left_out = model
    order = list(order)[left_out:]
    expected: list[list[int]] = []
    piece: list[int] = []
    for parameter in order:
        piece.append(parameter)
        if parameter in ends or parameter == order[-1]:
            expected += [[p for p in piece if found[p].kind == kind] for kind in dict.fromkeys(found[p].kind for p in piece)]
            piece = []
    buckets = assign(found, order, Caps((1,), frozenset(ends)))
    assert sorted(buckets) == sorted(expected)
    last = [order.index(bucket[-1]) for bucket in buckets]
    assert last == sorted(last)


def test_by_hand() -> None:
    found = [ParameterSize(10, 4, "single"), ParameterSize(3, 2, "half"), ParameterSize(5, 4, "single")]
    layouts = plan(found, assign(found, [2, 1, 0], Caps((1000,))), STATUS_NUMEL, control=CONTROL)
    half, single = layouts
    assert [(slot.parameter, slot.offset) for slot in half.slots] == [(1, 0)]
    assert (half.flags_offset, half.status_numel, half.total_numel) == (32, 0, 33)
    assert [(slot.parameter, slot.offset) for slot in single.slots] == [(2, 0), (0, 16)]
    assert (single.data_numel, single.flags_offset, single.status_offset, single.total_numel) == (26, 32, 34, 34 + STATUS_NUMEL)


def test_no_parameter_at_all() -> None:
    (layout,) = plan([], [], STATUS_NUMEL, control=CONTROL)
    assert layout.slots == layout.flagged == ()
    assert layout.has_status


def test_caps_of_torchs_arguments() -> None:
    assert Caps.of_mb(None).bytes == (BYTES_PER_MB, 25 * BYTES_PER_MB)
    assert Caps.of_mb(2).bytes == (2 * BYTES_PER_MB,)
    assert Caps.of_mb(2, [1, 0.5]).bytes == (BYTES_PER_MB, BYTES_PER_MB // 2)
    assert [Caps((1, 2)).of(number) for number in range(4)] == [1, 2, 2, 2]


def test_a_cap_of_0_sends_every_parameter_by_itself() -> None:
    sizes = [ParameterSize(numel, 4, "same") for numel in (5, 0, 1, 0)]
    assert assign(sizes, [3, 2, 1, 0], bucket_caps(0, None)) == [[3], [2], [1], [0]]


@pytest.mark.parametrize("wrong", [-1, -1e-9, float("nan")])
def test_caps_are_checked(wrong: float) -> None:
    with pytest.raises(ConfigurationError, match="bucket_cap_mb "):
        bucket_caps(wrong, None)
    with pytest.raises(ConfigurationError, match="bucket_cap_mb_list"):
        bucket_caps(None, [1, wrong])
