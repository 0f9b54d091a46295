"""Bad input to the public interface: a typed error that names what is wrong, before anything is changed.

One row a case: `row(name of what is called, the call, the error's type, a piece of its message)`. A call gets a `World`, all of one process;
after it nothing there has changed. To add to the interface is to add rows: `test_every_public_name_has_a_row` tells.
"""

# ruff: noqa: E501 - a row a line

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpcomm
from ddpcomm import DistributedDataParallel, create_communicator, hooks, ops
from ddpcomm.comm.base import Communicator, Work
from ddpcomm.comm.fake import FakeCommunicator
from ddpcomm.cost_model import MeasuredCost
from ddpcomm.errors import ClosedError, ConfigurationError, ConfigurationTypeError, PlanError
from ddpcomm.machines import Machine, machine
from ddpcomm.simulate import Exchange, StepProfile
from ddpcomm.tuning import Plan

pytestmark = pytest.mark.timeout(120)

VALUE, TYPE = ConfigurationError, ConfigurationTypeError


class World:
    """A wrapped model, one that is not, communicators and tensors; all in this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = nn.Linear(3, 2)
        self.ddp = DistributedDataParallel(nn.Linear(3, 2), transport="process_group")
        self.ddp(torch.ones(1, 3)).sum().backward()
        self.fake = FakeCommunicator(world_size=4)
        self.group = create_communicator(transport="process_group")
        self.shared = create_communicator(transport="shared_memory")
        self.out = torch.full((6,), 7.0)
        self.parts = [torch.full((2,), 3.0), torch.full((4,), 5.0)]
        self.codes, self.scales = torch.zeros(256, dtype=torch.uint8), torch.zeros(1)
        self.closed = FakeCommunicator()
        self.closed.close()
        self.works = {id(each): each.barrier() for each in (self.fake, self.group, self.shared)}

    def state(self) -> list[Any]:
        """What no refused call changes."""
        parameters = [*self.model.parameters(), *self.ddp.parameters()]
        tensors = [self.out, *self.parts, self.codes, self.scales, *parameters, *(p.grad for p in parameters if p.grad is not None)]
        hooked = [len(p._post_accumulate_grad_hooks or ()) for p in parameters]
        files = len(os.listdir("/proc/self/fd")), list(self.directory.iterdir())
        return [
            [t.tolist() for t in tensors],
            hooked,
            len(self.fake.calls),
            self.ddp.require_backward_grad_sync,
            files,
            list(self.directory.iterdir()),
        ]

    def still_works(self) -> None:
        for communicator in (self.fake, self.group, self.shared):
            communicator.all_reduce(torch.ones(3)).wait()

    def close(self) -> None:
        for each in (self.ddp, self.fake, self.group, self.shared):
            each.close()


class Row(NamedTuple):
    called: str
    call: Callable[[World], Any]
    error: type[Exception]
    message: str


def row(called: str, call: Callable[[World], Any], error: type[Exception], message: str) -> Row:
    return Row(called, call, error, message)


def wrap(**arguments: Any) -> Callable[[World], Any]:
    return lambda world: DistributedDataParallel(**{"module": world.model, "transport": "process_group", **arguments})


def make(*_: Any, **arguments: Any) -> Callable[[World], Any]:
    return lambda _: create_communicator(**arguments)


def entered(context: Any) -> None:
    with context:
        pass


NAN, INF = math.nan, math.inf
FLAGS = [
    "broadcast_buffers",
    "init_sync",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "forward_sync_buffers",
    "error_on_unsynchronized",
]
WRAP = "DistributedDataParallel"
CONSTRUCTOR = [
    row(WRAP, lambda w: DistributedDataParallel("model"), TYPE, "module must be a torch.nn.Module, got str"),  # type: ignore[arg-type]
    row(WRAP, wrap(module=nn.ReLU()), VALUE, "doesn't have any parameter"),
    row(WRAP, wrap(module=nn.LazyLinear(2)), VALUE, "not initialised"),
    row(WRAP, wrap(device_ids=[0, 1]), VALUE, "device_ids can only be None or contain a single element"),
    row(WRAP, wrap(device_ids=[0]), VALUE, "device_ids"),
    row(WRAP, wrap(device_ids="cpu"), TYPE, "device_ids must be a list, got 'cpu'"),
    row(WRAP, wrap(output_device=1), VALUE, "output_device 1"),
    row(WRAP, wrap(process_group="world"), VALUE, "process group that was given"),
    row(WRAP, wrap(device_mesh=object()), TYPE, "device_mesh must be a DeviceMesh"),
    row(WRAP, wrap(transport="fake"), VALUE, "moves no data"),
    row(WRAP, lambda w: wrap(process_group=dist.group.WORLD, device_mesh=object())(w), VALUE, "process_group and device_mesh"),
    *(row(WRAP, wrap(bucket_cap_mb=bad), VALUE, f"bucket_cap_mb must be .*{bad}") for bad in (-1, -1e-9, NAN, INF)),
    row(WRAP, wrap(bucket_cap_mb="big"), VALUE, "bucket_cap_mb must be a number of MiB or \"auto\", got 'big'"),
    row(WRAP, wrap(bucket_cap_mb=True), TYPE, "bucket_cap_mb must be a number, got True"),
    row(WRAP, wrap(bucket_cap_mb=[1]), TYPE, r"bucket_cap_mb must be a number, got \[1\]"),
    *(row(WRAP, wrap(bucket_cap_mb_list=[1, bad]), VALUE, f"bucket_cap_mb_list must be .*{bad}") for bad in (-1, NAN, INF)),
    row(WRAP, wrap(bucket_cap_mb_list="1,2"), TYPE, "bucket_cap_mb_list must be a list, got '1,2'"),
    row(WRAP, wrap(bucket_cap_mb_list=["1"]), TYPE, "bucket_cap_mb_list must be a number, got '1'"),
    row(WRAP, wrap(bucket_cap_mb_list=5), TYPE, "bucket_cap_mb_list must be a list, got 5"),
    row(WRAP, wrap(bucket_cap_mb="auto", bucket_cap_mb_list=[1]), VALUE, "only one of them"),
    row(WRAP, wrap(delay_all_reduce_named_params=[("weight", torch.ones(1))]), VALUE, "param_to_hook_all_reduce"),
    *(row(WRAP, wrap(delay_all_reduce_named_params=odd, param_to_hook_all_reduce=0), TYPE, "a list") for odd in (5, [5], ["ab"], [("w",)])),
    row(WRAP, wrap(param_to_hook_all_reduce=torch.ones(1)), VALUE, "delay_all_reduce_named_params"),
    row(WRAP, wrap(mixed_precision="bf16"), TYPE, "mixed_precision"),
    row(WRAP, wrap(transport="pigeon"), VALUE, "transport must be one of .*'pigeon'"),
    row(WRAP, wrap(transport=None), TYPE, "transport must be the name of a transport, got None"),
    row(WRAP, wrap(transport_options="fast"), TYPE, "transport_options must map names of options to their values, got 'fast'"),
    row(WRAP, wrap(transport_options={"wings": 2}), VALUE, "wings"),
    *(
        row(WRAP, wrap(transport="process_group", transport_options={name: None}), VALUE, f"transport_options can't hold {name}")
        for name in ("device", "process_group", "timeout", "transport")
    ),
    row(WRAP, wrap(plan="/nowhere/plan.json"), PlanError, "/nowhere/plan.json can't be read"),
    row(WRAP, wrap(plan=5), TYPE, "plan must be a path, got 5"),
    row(WRAP, wrap(plan="x", bucket_cap_mb=1), VALUE, "only one of them"),
    *(row(WRAP, wrap(**{flag: "False"}), TYPE, f"{flag} must be True or False, got 'False'") for flag in FLAGS),
    *(row(WRAP, wrap(**{flag: 2}), TYPE, f"{flag} must be True or False, got 2") for flag in FLAGS),
]
METHODS = [
    row("no_sync", lambda w: entered(w.ddp.no_sync("yes")), TYPE, "enabled must be True or False, got 'yes'"),
    *(
        row("join", lambda w, name=name: w.ddp.join(**{name: "no"}), TYPE, f"{name} must be True or False, got 'no'")
        for name in ("divide_by_initial_world_size", "enable", "throw_on_early_termination")
    ),
    row("timeline", lambda w: entered(w.ddp.timeline(5)), TYPE, "timeline: path must be a path, got 5"),
    row("save_plan", lambda w: w.ddp.save_plan(None), TYPE, "save_plan: path must be a path, got None"),
    row("save_plan", lambda w: w.ddp.save_plan(w.directory / "plan.json"), PlanError, "there is no plan to save"),
    row("register_comm_hook", lambda w: w.ddp.register_comm_hook(None, "hook"), TYPE, "callable"),
    row("register_comm_hook", lambda w: w.ddp.register_comm_hook(None, None), TYPE, "callable"),
    *(row("clip_grad_norm_", lambda w, b=bad: w.ddp.clip_grad_norm_(b), VALUE, f"max_norm must be .*{bad}") for bad in (NAN, -1, -INF)),
    *(row("clip_grad_norm_", lambda w, b=bad: w.ddp.clip_grad_norm_(b), TYPE, "max_norm must be a number") for bad in ("1", None, True)),
    row("clip_grad_norm_", lambda w: w.ddp.clip_grad_norm_(1.0, "no"), TYPE, "error_if_nonfinite must be True or False"),
]
CREATE = [
    row("create_communicator", make(transport="pigeon"), VALUE, "transport must be one of .*'pigeon'"),
    row("create_communicator", make(transport=["fake"]), VALUE, "transport must be one of"),
    row("create_communicator", make(process_group=5), VALUE, "process group that was given"),
    *(row("create_communicator", make(device=bad), VALUE, "device must name a device") for bad in ("gpu", "cpu:x")),
    row("create_communicator", make(device=1.5), TYPE, "device must be a device, got 1.5"),
    *(
        row("create_communicator", make(timeout=bad, transport=t), TYPE, "timeout must be a datetime.timedelta, got")
        for bad in (5, "5")
        for t in ("fake", "shared_memory")
    ),
    *(
        row("create_communicator", make(timeout=timedelta(seconds=bad), transport="fake"), VALUE, "timeout must be more than 0")
        for bad in (0, -1)
    ),
    row("create_communicator", make(piece_bytes=64), VALUE, "options need a transport that is named"),
    *(
        row("create_communicator", make(transport=t, wings=2), VALUE, "wings")
        for t in ("shared_memory", "hierarchical", "process_group", "nccl", "fake")
    ),
    *(row("create_communicator", make(transport=t, device="meta"), VALUE, "meta") for t in ("shared_memory", "hierarchical", "nccl")),
    *(
        row("create_communicator", make(transport=t, **{name: bad}), error, f"{name} must be")
        for t in ("shared_memory", "hierarchical")
        for name, bad, error in (
            ("piece_bytes", 63, VALUE),
            ("piece_bytes", "1024", TYPE),
            ("piece_bytes", 1e5, TYPE),
            ("small_bytes", -1, VALUE),
            ("small_bytes", True, TYPE),
            ("longest_spin", 0.1, TYPE),
            ("instruction_set", "sse", VALUE),
            ("capacity_bytes", 0, VALUE),
            ("capacity_bytes", "all", TYPE),
        )
    ),
    *(
        row("create_communicator", make(transport=t, longest_spin=timedelta(-1)), VALUE, "longest_spin must not be negative")
        for t in ("shared_memory",)
    ),
    row("create_communicator", make(transport="fake", rank=4, world_size=4), VALUE, "rank must be from 0 to 3, got 4"),
]


def on_each(call: Callable[[Communicator, World], Any], error: type[Exception], message: str) -> list[Row]:
    """The same on every transport; the communicator's method is the first word of the message."""
    called = f"Communicator.{message.split(':')[0]}"
    return [row(called, lambda w, each=each: call(getattr(w, each), w), error, message) for each in ("fake", "group", "shared")]


def wait(timeout: Any) -> Callable[[Communicator, World], Any]:
    return lambda c, w: w.works[id(c)].wait(timeout)


COMMUNICATORS = [
    *on_each(lambda c, w: c.empty(-1, torch.float32), VALUE, "empty: numel must not be negative, got -1"),
    *on_each(lambda c, w: c.empty(1.5, torch.float32), TYPE, "empty: numel must be an integer, got 1.5"),  # type: ignore[arg-type]
    *on_each(lambda c, w: c.empty(True, torch.float32), TYPE, "empty: numel must be an integer, got True"),
    *on_each(lambda c, w: c.empty(1, "float"), TYPE, "empty: dtype must be a torch.dtype"),  # type: ignore[arg-type]
    *on_each(lambda c, w: c.empty(1 << 70, torch.float32), VALUE, "more than can be addressed"),
    *on_each(lambda c, w: c.all_reduce([1.0]), TYPE, "all_reduce: expected a tensor, got list"),  # type: ignore[arg-type]
    *on_each(lambda c, w: c.all_reduce(w.out, "mean"), VALUE, "all_reduce: op must be .*'mean'"),  # type: ignore[arg-type]
    *on_each(lambda c, w: c.all_reduce(w.out, None), VALUE, "all_reduce: op must be .*None"),  # type: ignore[arg-type]
    *on_each(lambda c, w: c.all_reduce(w.out, []), VALUE, "all_reduce: op must be"),  # type: ignore[arg-type]
    *on_each(lambda c, w: c.all_reduce(w.codes, "avg"), TYPE, 'all_reduce: op "avg" needs a floating-point tensor'),
    *on_each(lambda c, w: c.all_reduce(torch.ones(2, dtype=torch.complex64), "max"), TYPE, 'all_reduce: op "max" is not defined'),
    *on_each(lambda c, w: c.all_reduce(torch.ones(2, 2).t()[:1]), VALUE, "all_reduce: the tensor must be dense and contiguous"),
    *on_each(lambda c, w: c.all_reduce(torch.ones(2).to_sparse()), VALUE, "all_reduce: the tensor must be dense"),
    *on_each(lambda c, w: c.all_reduce(torch.ones(2, device="meta")), VALUE, "all_reduce: the tensor is on meta"),
    row("Communicator.all_reduce_from", lambda w: w.fake.all_reduce_from(w.out, "mean", [(0, 1, 0)], []), VALUE, "op must be"),
    row("Communicator.all_reduce_from", lambda w: w.fake.all_reduce_from(w.out, "sum", [(0, 1, 0)], []), VALUE, "reads nothing elsewhere"),
    *on_each(lambda c, w: c.broadcast(w.out, -1), VALUE, "broadcast: source must be a rank"),
    *on_each(lambda c, w: c.broadcast(w.out, 99), VALUE, "broadcast: source must be a rank .*99"),
    *on_each(lambda c, w: c.broadcast(w.out, 0.0), TYPE, "broadcast: source must be an integer, got 0.0"),  # type: ignore[arg-type]
    *on_each(lambda c, w: c.broadcast(None), TYPE, "broadcast: expected a tensor"),  # type: ignore[arg-type]
    *on_each(lambda c, w: c.all_gather(w.out, torch.ones(5)), VALUE, "all_gather: out must have"),
    *on_each(lambda c, w: c.all_gather(w.out, w.out.double()), TYPE, "all_gather: the tensors have different dtypes"),
    *on_each(lambda c, w: c.reduce_scatter(w.out, torch.ones(5)), VALUE, "reduce_scatter: tensor must have"),
    *on_each(lambda c, w: c.reduce_scatter(w.out, w.out, "prod"), VALUE, "reduce_scatter: op must be"),  # type: ignore[arg-type]
    *(
        r._replace(called="Work.wait")
        for bad in (5, "1", 0.5)
        for r in on_each(wait(bad), TYPE, "wait: timeout must be a datetime.timedelta")
    ),
    *(r._replace(called="Work.wait") for bad in (0, -1) for r in on_each(wait(timedelta(bad)), VALUE, "wait: timeout must be more than 0")),
    row("Communicator.barrier", lambda w: w.closed.barrier(), ClosedError, "barrier: .* is closed"),
]
OPS = [
    row("flatten", lambda w: ops.flatten(w.parts, "out"), TYPE, "flatten: out must be a tensor, got str"),  # type: ignore[arg-type]
    row("flatten", lambda w: ops.flatten(w.parts, w.out[:5]), VALUE, "outside the buffer of 5"),
    row("flatten", lambda w: ops.flatten(w.parts, w.out.view(2, 3)), VALUE, "one-dimensional"),
    row("flatten", lambda w: ops.flatten([1.0], w.out), TYPE, "flatten: expected a tensor at 0, got float"),  # type: ignore[list-item]
    row("flatten", lambda w: ops.flatten(5, w.out), TYPE, "flatten: tensors must be a list, got 5"),  # type: ignore[arg-type]
    row("flatten", lambda w: ops.flatten(w.parts[0], w.out), TYPE, "flatten: tensors must be a list, got a Tensor"),  # type: ignore[arg-type]
    row("flatten", lambda w: ops.flatten([None], w.out), TYPE, "tensor 0 is None"),
    row("flatten", lambda w: ops.flatten(w.parts, w.out, "2"), TYPE, "flatten: scale must be a number, got '2'"),  # type: ignore[arg-type]
    row("flatten", lambda w: ops.flatten(w.parts, w.out, NAN), VALUE, "flatten: scale must be finite, got nan"),
    row("flatten", lambda w: ops.flatten(w.parts, w.out, offsets=[0]), VALUE, "2 tensors but 1 offsets"),
    row("flatten", lambda w: ops.flatten(w.parts, w.out, offsets=[0, -4]), VALUE, "negative"),
    row("flatten", lambda w: ops.flatten(w.parts, w.out, offsets=[0, 1]), VALUE, "overlap"),
    row("flatten", lambda w: ops.flatten(w.parts, w.out, offsets=[0, 1 << 62]), VALUE, "outside the buffer"),
    row("flatten", lambda w: ops.flatten(w.parts, w.out, offsets=[0, 1 << 70]), TYPE, "offsets"),
    row("flatten", lambda w: ops.flatten(w.parts, w.out, offsets=[0, 2.0]), TYPE, "offsets must be an integer, got 2.0"),  # type: ignore[list-item]
    row("flatten", lambda w: ops.flatten(w.parts, w.out, offsets="01"), TYPE, "offsets must be a list, got '01'"),  # type: ignore[arg-type]
    row("flatten", lambda w: ops.flatten(w.parts, w.out, implementation="magic"), VALUE, "implementation is 'magic'"),
    row("unflatten", lambda w: ops.unflatten(w.out[:5], w.parts), VALUE, "outside the buffer"),
    row("unflatten", lambda w: ops.unflatten(None, w.parts), TYPE, "unflatten: flat must be a tensor"),  # type: ignore[arg-type]
    row("unflatten", lambda w: ops.unflatten(w.out, w.parts, INF), VALUE, "unflatten: scale must be finite, got inf"),
    row("unflatten", lambda w: ops.unflatten(w.out, [w.parts[0], torch.ones(1).expand(4).t()[::1]]), VALUE, "share one place"),
    row("unflatten", lambda w: ops.unflatten(w.out, w.parts, statistics=torch.zeros(2)), TYPE, "statistics"),
    row("norm", lambda w: ops.norm([1.0]), TYPE, "norm: expected a tensor at 0"),  # type: ignore[list-item]
    row("norm", lambda w: ops.norm(w.out), TYPE, "norm: tensors must be a list, got a Tensor"),  # type: ignore[arg-type]
    row("norm", lambda w: ops.norm([w.codes]), TYPE, "norm"),
    row("quantise", lambda w: ops.quantise(w.parts, w.codes[:100], w.scales), VALUE, "256"),
    row("quantise", lambda w: ops.quantise(w.parts[:1], w.codes, torch.zeros(3)), VALUE, "scales"),
    row("quantise", lambda w: ops.quantise(w.parts[:1], w.codes.float(), w.scales), TYPE, "codes"),
    row("quantise", lambda w: ops.quantise(w.parts[:1], w.codes, w.scales, code="int4"), VALUE, "int4"),
    row("quantise", lambda w: ops.quantise(w.parts[:1], w.codes, w.scales, NAN), VALUE, "quantise: scale must be finite"),
    row("quantise", lambda w: ops.quantise(w.parts[:1], w.codes, w.scales, residual=torch.zeros(3)), VALUE, "residual"),
    row("dequantise", lambda w: ops.dequantise(w.codes, torch.zeros(3), w.parts[:1]), VALUE, "scales"),
    row("dequantise", lambda w: ops.dequantise(w.codes, w.scales, w.parts[:1], "1"), TYPE, "dequantise: scale must be"),  # type: ignore[arg-type]
    row("implementations", lambda w: ops.implementations("fold", "cpu"), VALUE, "op must be one of .*'fold'"),
    row("implementations", lambda w: ops.implementations("flatten", "gpu"), VALUE, "device must name a device"),
    row("is_taken_as_it_is", lambda w: ops.is_taken_as_it_is(5), TYPE, "is_taken_as_it_is: expected a tensor, got int"),  # type: ignore[arg-type]
    row("FlattenPlan", lambda w: ops.FlattenPlan([2], [0], 1, torch.float32, "cpu"), VALUE, "outside the buffer"),
    row("FlattenPlan", lambda w: ops.FlattenPlan([2], [0], 2, torch.float32, "gpu"), VALUE, "device must name a device"),
    row("QuantisePlan", lambda w: ops.QuantisePlan([2], [0], "x", "cpu"), TYPE, "total_numel must be an integer"),  # type: ignore[arg-type]
    row("FlattenPlan", lambda w: ops.FlattenPlan([-2], [0], 1, torch.float32, "cpu"), VALUE, "negative"),
    row("FlattenPlan", lambda w: ops.FlattenPlan([2], [0], 2, "float32", "cpu"), TYPE, "dtype float32"),  # type: ignore[arg-type]
    row("FlattenPlan", lambda w: ops.FlattenPlan(["2"], [0], 2, torch.float32, "cpu"), TYPE, "FlattenPlan"),  # type: ignore[list-item]
    row("QuantisePlan", lambda w: ops.QuantisePlan([2], [0], 100, "cpu"), VALUE, "256"),
    row("QuantisePlan", lambda w: ops.QuantisePlan([2], [0], 256, "cpu", "int4"), VALUE, "int4"),
]
HOOKS = [
    row("Quantized", lambda w: hooks.Quantized("int4"), VALUE, "code must be one of .*'int4'"),
    row("WireFormat", lambda w: hooks.WireFormat(torch.int8), VALUE, "dtype must be a floating-point one"),
    row("WireFormat", lambda w: hooks.WireFormat("bf16"), VALUE, "dtype must be .*'bf16'"),  # type: ignore[arg-type]
]
COST = MeasuredCost(((0, 1e-6), (1024, 2e-6)))
MODELS = [
    row("Plan", lambda w: Plan.load(w.directory / "none"), PlanError, "can't be read as a plan"),
    row("Plan", lambda w: Plan.from_json([]), PlanError, "a plan of version"),
    row("Plan", lambda w: Plan.from_json({"version": 1}), PlanError, "damaged"),
    *(row("Exchange", lambda w, b=bad: Exchange(COST, communicators=b), VALUE, "communicator") for bad in (0, -1)),
    *(row("Exchange", lambda w, b=bad: Exchange(COST, contention=b), VALUE, "contention must be") for bad in (-0.1, 1.1, NAN)),
    row("StepProfile", lambda w: StepProfile((), (1.0,), 1.0), VALUE, "0 parameters, but 1 times"),
    row("machine", lambda w: machine("abacus"), VALUE, "abacus"),
    row("Machine", lambda w: Machine("m", 0, "nvlink", 1, 1), VALUE, "ranks_per_host of machine 'm'"),
    row("Machine", lambda w: Machine("m", NAN, "nvlink", 1, 1), TYPE, "ranks_per_host of machine 'm' must be an integer"),
    row("Machine", lambda w: Machine("m", 8, "rope", 1, 1), VALUE, "link must be nvlink or pci, got 'rope'"),
]
TABLE = [*CONSTRUCTOR, *METHODS, *CREATE, *COMMUNICATORS, *OPS, *HOOKS, *MODELS]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        made = World(tmp_path_factory.mktemp("bad-input"))
        yield made
        made.close()
        dist.destroy_process_group()


@pytest.mark.parametrize("case", TABLE, ids=[f"{each.called}-{i}" for i, each in enumerate(TABLE)])
@pytest.mark.filterwarnings("ignore")
def test_bad_input(world: World, case: Row) -> None:
    before = world.state()
    with pytest.raises(case.error, match=case.message):
        case.call(world)
    assert world.state() == before
    world.still_works()


VARIABLES = [
    ("DDPCOMM_TRANSPORT", "pigeon", lambda w: create_communicator()),
    *(("DDPCOMM_TIMEOUT_SECONDS", bad, lambda w: create_communicator()) for bad in ("soon", "0", "-1", "nan", "inf", "1e300", "1e-7")),
    ("DDPCOMM_IMPLEMENTATION", "magic", lambda w: ops.flatten(w.parts, w.out)),
    ("DDPCOMM_TIMELINE", "/", lambda w: create_communicator()),
    ("DDPCOMM_TIMELINE", "/tmp", lambda w: create_communicator()),
    ("DDPCOMM_TRANSPORT", "fake", lambda w: create_communicator()),
]


@pytest.mark.parametrize(("name", "value", "call"), VARIABLES, ids=[f"{name}={value}" for name, value, _ in VARIABLES])
def test_bad_variables(world: World, monkeypatch: pytest.MonkeyPatch, name: str, value: str, call: Callable[[World], Any]) -> None:
    before = world.state()
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"{value}"):
        call(world)
    monkeypatch.undo()
    assert world.state() == before


LOCAL_AND_WITHOUT_ARGUMENTS = {
    "install", "uninstall", "hooks", "ops", "bf16", "fp16", "quantized", "stats", "grad_norm", "unused_parameters", "unsynchronized_parameters",
    "plan", "close", "Communicator.barrier", "Communicator.progress", "Communicator.own_share", "Communicator.others_have_called", "Communicator.reads_elsewhere", "Communicator.announce", "Communicator.check", "Communicator.close", "Communicator.closed",
    "Work.is_completed", "Communicator.averages_in_passing", "Communicator.cuda_runtime", "Communicator.timer", "Communicator.transport", "Communicator.shares_order_with",
}  # fmt: skip
TORCHS_OWN = (
    set(dir(nn.Module)) | set(dir(torch.nn.parallel.DistributedDataParallel)) | {"shadow_iteration", "take_final_state", "join_hook"}
)
TESTED_ELSEWHERE = {"replace_process_group", "save_checkpoint"}  # with the features themselves


def test_every_public_name_has_a_row() -> None:
    public = {name for module in (ddpcomm, ops, hooks) for name in module.__all__}
    public |= {
        name
        for name in dir(DistributedDataParallel)
        if not name.startswith("_") and name not in TORCHS_OWN and inspect.isfunction(getattr(DistributedDataParallel, name))
    }
    public |= {"no_sync", "join", "register_comm_hook"}
    for kind in (Communicator, Work):
        public |= {f"{kind.__name__}.{name}" for name in vars(kind) if not name.startswith("_")}
    missing = public - {each.called for each in TABLE} - LOCAL_AND_WITHOUT_ARGUMENTS - TESTED_ELSEWHERE
    assert not missing, f"no row of bad input for {sorted(missing)}"


def test_every_argument_of_the_constructor_has_a_row() -> None:
    told = " ".join(each.message for each in CONSTRUCTOR)
    harmless = {"self", "dim"}  # kept for torch's signature
    later = {"timeout", "nonfinite"}  # tested with the features themselves
    missing = [
        name for name in inspect.signature(DistributedDataParallel.__init__).parameters if name not in told and name not in harmless | later
    ]
    assert not missing
