"""The nccl transport's collectives between real ranks, over Gloo in libnccl's place: what goes where, in which dtype, by which operator."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from ddpcomm.errors import CollectiveMismatchError, ConfigurationError, ConfigurationTypeError, RankMismatchError, TransportUnavailableError
from tests.comm.nccl_over_gloo import nccl_over_gloo
from tests.comm.recorder import Recorder
from tests.rank_process import RankContext
from tests.ranks import RankPool

FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SUMMABLE = [*FLOATING, torch.int32, torch.int64, torch.uint8, torch.complex64]


def numbers(rank: int, dtype: torch.dtype, numel: int = 6) -> torch.Tensor:
    """Small whole numbers, whose sums and halves every dtype holds exactly."""
    values = torch.arange(numel) * 2 + 4 * rank
    return torch.complex(values.float(), -values.float()) if dtype == torch.complex64 else values.to(dtype)


def all_reduces(context: RankContext) -> list[str]:
    communicator, _ = nccl_over_gloo(context)
    wrong = []
    with communicator:
        for dtype in SUMMABLE:
            total = numbers(0, dtype) + numbers(1, dtype)
            for op in ("sum", "avg", "max"):
                if (op == "avg" and not (dtype.is_floating_point or dtype.is_complex)) or (op == "max" and dtype.is_complex):
                    continue
                for make in ("own", "plain", "unaligned"):
                    tensor = communicator.empty(7, dtype)[1:] if make == "unaligned" else communicator.empty(6, dtype)
                    tensor = torch.empty(6, dtype=dtype) if make == "plain" else tensor
                    tensor.copy_(numbers(context.rank, dtype))
                    communicator.all_reduce(tensor, op).wait()
                    expected = {"sum": total, "avg": total / 2, "max": numbers(1, dtype)}[op]
                    if not torch.equal(tensor, expected.to(dtype)):
                        wrong.append(f"{dtype} {op} {make}: {tensor}")
    return wrong


def test_all_reduce(two_ranks: RankPool) -> None:
    assert two_ranks.run(all_reduces) == [[], []]


def others(context: RankContext) -> list[object]:
    communicator, recorder = nccl_over_gloo(context)
    with communicator:
        flags = torch.tensor([context.rank == 0, context.rank == 1, False])
        communicator.all_reduce(flags).wait()
        scaled = torch.full((3,), 2.0 * (context.rank + 1))
        communicator.all_reduce(scaled, scale=0.25).wait()
        sent = torch.full((2, 2), context.rank, dtype=torch.int16)
        communicator.broadcast(sent, source=1).wait()
        gathered = torch.empty(4, dtype=torch.complex128)
        communicator.all_gather(gathered, torch.full((2,), context.rank + 1j, dtype=torch.complex128)).wait()
        part = torch.empty(3)
        communicator.reduce_scatter(part, torch.arange(6.0) * (context.rank + 1), "avg").wait()
        nothing = communicator.all_reduce(torch.empty(0))
        nothing.wait()
        communicator.barrier().wait()
        communicator.check_order()
        operators = [call for call in recorder.library.calls if call.startswith("create_scaled_sum")]
    return [flags.tolist(), scaled.tolist(), sent.tolist(), gathered.tolist(), part.tolist(), nothing.is_completed(), operators]


def test_other_collectives(two_ranks: RankPool) -> None:
    for rank, result in enumerate(two_ranks.run(others)):
        flags, scaled, sent, gathered, part, empty_is_done, operators = result
        assert flags == [True, True, False]
        assert scaled == [1.5] * 3
        assert sent == [[1, 1], [1, 1]]
        assert gathered == [1j, 1j, 1 + 1j, 1 + 1j]
        assert part == [[0.0, 1.5, 3.0], [4.5, 6.0, 7.5]][rank]
        assert empty_is_done
        assert operators == ["create_scaled_sum 0.25 torch.float32", "create_scaled_sum 0.5 torch.float32"]


def takes_turns(context: RankContext) -> tuple[list[float], list[str], list[str]]:
    communicator, recorder = nccl_over_gloo(context, communicators=3)
    with communicator:
        buckets = [communicator.empty(4, torch.float32).fill_(context.rank + index) for index in range(5)]
        for work in [communicator.all_reduce(bucket, "avg") for bucket in buckets]:
            work.wait()
        streams = [entry.stream for entry in recorder.trace if "all_reduce" in entry.label]
        operators = [call for call in recorder.library.calls if call.startswith("create_scaled_sum")]
    return [bucket[0].item() for bucket in buckets], streams, operators


def test_communicators_take_turns_alike_on_all_ranks(two_ranks: RankPool) -> None:
    for averages, streams, operators in two_ranks.run(takes_turns):
        assert averages == [0.5, 1.5, 2.5, 3.5, 4.5]
        assert streams == ["comm0", "comm1", "comm2", "comm0", "comm1"]
        assert operators == ["create_scaled_sum 0.5 torch.float32"] * 3  # one for each communicator, not for each collective


def compares_order(context: RankContext) -> str:
    communicator, _ = nccl_over_gloo(context)
    with communicator:
        communicator.all_reduce(torch.zeros(2), tag=f"bucket {context.rank}").wait()
        communicator.check_order()
        communicator._order.add("all_reduce", 4 * (1 + context.rank), torch.float32, "sum", "")
        with pytest.raises(CollectiveMismatchError) as raised:
            communicator.check_order()
    return str(raised.value)


def test_a_different_order_is_found(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(compares_order)
    assert first == second
    assert "all_reduce (4 bytes" in first
    assert "all_reduce (8 bytes" in first


def differ_in_memory(context: RankContext) -> str:
    communicator, _ = nccl_over_gloo(context)
    with communicator:
        window = communicator.empty(4, torch.float32)
        communicator.all_reduce(window[2:]).wait()
        communicator.check_order()
        communicator.all_reduce(window[2:] if context.rank else torch.zeros(2)).wait()
        with pytest.raises(CollectiveMismatchError) as raised:
            communicator.check_order()
    return str(raised.value)


def test_a_window_against_other_memory_is_found(two_ranks: RankPool) -> None:
    """libnccl would choose its algorithm by it, each rank for itself."""
    for message in two_ranks.run(differ_in_memory):
        assert "sum outside windows" in message
        assert "sum at 8 of a window" in message


def averages_of_three(context: RankContext) -> list[bool]:
    communicator, recorder = nccl_over_gloo(context)
    results = []
    with communicator:
        for dtype in FLOATING:
            tensor = numbers(context.rank, dtype)
            communicator.all_reduce(tensor, "avg").wait()
            parts = [numbers(rank, dtype) * (1.0 / 3) for rank in range(3)]
            results.append(torch.allclose(tensor.double(), sum(part.double() for part in parts), rtol=2 * torch.finfo(dtype).eps))
        operators = [call for call in recorder.library.calls if call.startswith("create")]
        results.append(operators == [f"create_scaled_sum 0.333333 {dtype}" for dtype in (torch.float64, torch.float32)])
    return results


def test_a_factor_that_16_bits_can_t_hold_is_applied_in_32(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(3).run(averages_of_three) == [[True] * 5] * 3


def refuses(context: RankContext, what: str) -> str:
    recorder = Recorder()
    options: dict[str, object] = {}
    expected: tuple[type[Exception], ...] = (RankMismatchError,)
    if what == "options":
        options["max_ctas"] = 4 + context.rank
    elif what == "version":
        recorder.library.version = (2, 30, 3 + context.rank)
    elif what == "old":
        recorder.library.version = (2, 21, 5) if context.rank else (2, 32, 3)
        options["traffic_class"] = 3
        expected = (ConfigurationError,)
    elif what == "start":
        recorder.library.refused = {"start"} if context.rank else set()
        expected = (TransportUnavailableError,)
    with pytest.raises(expected) as raised:
        nccl_over_gloo(context, recorder=recorder, **options)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("what", ["options", "version"])
def test_ranks_that_differ_all_say_so(two_ranks: RankPool, what: str) -> None:
    first, second = two_ranks.run(refuses, what)
    assert first == second
    assert {"options": "max_ctas=5", "version": "libnccl 2.30.4"}[what] in first


def test_an_option_that_one_rank_lacks_is_found_on_all(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(refuses, "old")
    assert first.startswith("TransportUnavailableError: ")
    assert "rank 1: traffic_class needs libnccl 2.26.0 or newer, and 2.21.5 is loaded" in first
    assert second.startswith("ConfigurationError: ")


def test_a_start_that_fails_on_one_rank_fails_on_all(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(refuses, "start")
    assert first.startswith("TransportUnavailableError: ")
    assert "rank 1" in first
    assert "start was refused" in second


def finds_memory(context: RankContext, what: str) -> tuple[str, str, int, list[str]]:
    recorder = Recorder()
    recorder.runtime.idle = True
    if context.rank == 1:
        recorder.library.refused = {"window": {"register_window"}, "nothing": {"allocate"}}.get(what, set())
    communicator, _ = nccl_over_gloo(context, recorder=recorder, communicators=2)
    with communicator:
        buffer = communicator.empty(8, torch.float32).fill_(1.0)
        communicator.all_reduce(buffer).wait()
        assert buffer.tolist() == [2.0] * 8
        report = communicator.memory
        assert communicator.registered_bytes == report.bucket_bytes
        calls = [call for call in recorder.library.calls if "regist" in call or call in ("allocate", "free")]
    gc.collect()
    return report.mode, report.reason, report.bucket_bytes, calls


def test_windows_where_all_ranks_have_them(two_ranks: RankPool) -> None:
    for result in two_ranks.run(finds_memory, "all"):
        assert result == ("window", "", 32, ["allocate", "register_window", "register_window"])


def test_registration_where_one_rank_has_no_windows(two_ranks: RankPool) -> None:
    for mode, reason, nbytes, calls in two_ranks.run(finds_memory, "window"):
        assert (mode, reason, nbytes) == ("registered", "register_window was refused", 32)
        assert calls[-3:] == ["allocate", "register", "register"]
        assert calls.count("free") == 1


def test_plain_memory_where_one_rank_has_nothing_else(two_ranks: RankPool) -> None:
    """And nobody waits in a collective registration for the rank that has no memory to register."""
    for rank, (mode, reason, nbytes, calls) in enumerate(two_ranks.run(finds_memory, "nothing")):
        assert (mode, reason, nbytes) == ("plain", "allocate was refused", 0)
        assert calls == [["allocate", "free"] * 2, ["allocate"] * 2][rank]


def checks_arguments(context: RankContext) -> None:
    communicator, _ = nccl_over_gloo(context)
    with communicator:
        with pytest.raises(ConfigurationTypeError, match=r"libnccl can't reduce torch\.int16"):
            communicator.all_reduce(torch.zeros(2, dtype=torch.int16))
        with pytest.raises(ConfigurationError, match="scale goes with"):
            communicator.all_reduce(torch.zeros(2), "max", scale=2.0)
        communicator._library.version = (2, 23, 4)
        with pytest.raises(ConfigurationTypeError, match=r"from 2\.24\.0 on"):
            communicator.all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fn))


def test_arguments_are_refused_before_anything_is_sent(two_ranks: RankPool) -> None:
    two_ranks.run(checks_arguments)
