"""The options of the nccl transport."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields

import pytest

from ddpcomm.comm.nccl_options import NcclOptions
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError

LEFT_OUT = {  # point-to-point and one-sided operations, splitting
    "split_share",
    "n_channels_per_net_peer",
    "num_rma_ctx",
    "max_p2p_peers",
    "num_rma_sig",
    "rma_eager_init",
    "host_cft_mode",
}


def documented_since() -> dict[str, tuple[int, ...]]:
    """By nccl4py's own documentation, the version that each field of NCCLConfig came with."""
    core = pytest.importorskip("nccl.core.communicator", reason="nccl4py is not installed")
    (class_,) = ast.parse(inspect.getsource(core.NCCLConfig)).body
    assert isinstance(class_, ast.ClassDef)
    since = {}
    for statement, after in zip(class_.body, class_.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
            text = ast.literal_eval(after.value)
            version = re.search(r"Available since NCCL (\d+)\.(\d+)\.(\d+)", text)
            assert isinstance(statement.target, ast.Name)
            assert version is not None
            since[statement.target.id] = tuple(map(int, version.groups()))
    return since


def test_every_option_says_since_when_it_is_there() -> None:
    since = documented_since()
    ours = {each.name: each.metadata["since"] for each in fields(NcclOptions) if "since" in each.metadata}
    assert ours == {name: version for name, version in since.items() if name not in LEFT_OUT | {"blocking"}}


def test_what_is_not_set_is_left_to_libnccl() -> None:
    assert NcclOptions().config((2, 21, 5)) == {"blocking": 0}


def test_what_is_set_is_passed_on() -> None:
    options = NcclOptions.from_keywords(
        {
            "min_ctas": 1,
            "max_ctas": 8,
            "cga_cluster_size": 2,
            "traffic_class": 3,
            "net_name": "IB",
            "collnet_enable": True,
            "blocking": True,
        }
    )
    assert options.config((2, 27, 0)) == {
        "blocking": 1,
        "min_ctas": 1,
        "max_ctas": 8,
        "cga_cluster_size": 2,
        "traffic_class": 3,
        "net_name": "IB",
        "collnet_enable": 1,
    }


def test_several_communicators_are_ordered_where_libnccl_can() -> None:
    assert NcclOptions(communicators=2).config((2, 31, 0)) == {"blocking": 0, "launch_order_implicit": 1}
    assert NcclOptions(communicators=2).config((2, 30, 7)) == {"blocking": 0}
    assert NcclOptions(communicators=2, launch_order_implicit=False).config((2, 31, 0)) == {"blocking": 0, "launch_order_implicit": 0}


@pytest.mark.parametrize(
    ("options", "version", "expected"),
    [
        ({}, (2, 31, 0), True),
        ({}, (2, 30, 7), False),
        ({"launch_order_implicit": False}, (2, 31, 0), False),
        ({"side_by_side": True}, (2, 21, 5), True),
        ({"side_by_side": False}, (2, 32, 3), False),
    ],
)
def test_several_communicators_run_at_once_only_if_their_order_is_kept(
    options: dict[str, bool], version: tuple[int, int, int], expected: bool
) -> None:
    assert NcclOptions(communicators=2, **options).runs_side_by_side(version) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_cta": 4}, ConfigurationError, "has no option max_cta; it has communicators"),
        ({"max_ctas": "4"}, ConfigurationTypeError, "max_ctas must be int"),
        ({"max_ctas": True}, ConfigurationTypeError, "max_ctas must be int"),
        ({"blocking": 1}, ConfigurationTypeError, "blocking must be bool"),
        ({"memory": "fast"}, ConfigurationError, "memory must be one of"),
        ({"communicators": 0}, ConfigurationError, "communicators must be from 1 to 32, got 0"),
        ({"min_ctas": 8, "max_ctas": 4}, ConfigurationError, "must not be more than max_ctas"),
    ],
)
def test_what_can_t_be_is_refused(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NcclOptions.from_keywords(options)


def test_what_a_version_lacks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"nvls_ctas needs libnccl 2\.27\.1 or newer, and 2\.27\.0 is loaded"):
        NcclOptions(nvls_ctas=4).config((2, 27, 0))
